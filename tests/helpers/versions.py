"""What the tests know of versions of Dask."""

import dask
import pytest

HAS_DASK_2026_3 = tuple(map(int, dask.__version__.split(".")[:2])) >= (2026, 3)
"""Whether Dask names tasks of data frames, makes reports beside every Bokeh, and counts CPUs as dkfm does."""


def needs_dask_2026_3(reason: str) -> pytest.MarkDecorator:
    """Return the mark of a test of what older Dask does otherwise; `reason` says what that is."""
    return pytest.mark.skipif(not HAS_DASK_2026_3, reason=f"With Dask before 2026.3 {reason}")
