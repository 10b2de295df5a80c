"""What the tests know of versions of Dask."""

import dask
import pytest

HAS_DASK_2026_3 = tuple(map(int, dask.__version__.split(".")[:2])) >= (2026, 3)

needs_dask_2026_3 = pytest.mark.skipif(not HAS_DASK_2026_3, reason="Dask before 2026.3 does this otherwise")
