"""Products with a Gram matrix in its store: any tiles, what is damaged, and no more memory than tiles."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dkfm
from dkfm import kernels
from dkfm.errors import DamagedStoreError
from dkfm.gram.stored_gram import StoredGram


@given(st.integers(1, 16), st.integers(1, 20), st.integers(1, 5), st.integers(1, 3))
@settings(max_examples=10)
def test_products_are_those_of_the_dense_matrix(tmp_path_factory, n, rows, columns, threads):
    rng = np.random.default_rng(n)
    X, V = rng.normal(size=(n, 3)), rng.normal(size=(n, columns))
    path = tmp_path_factory.mktemp("gram") / "gram.zarr"
    dkfm.build_gram(kernels.Gaussian(1.0), X, path, tile_rows=rows)
    K = StoredGram(path, threads)
    np.testing.assert_allclose(K @ V, kernels.Gaussian(1.0)(X) @ V, rtol=0, atol=1e-13 * n)
    np.testing.assert_array_equal(K @ V, K @ V)


def test_a_damaged_tile_is_told(rng, tmp_path):
    dkfm.build_gram(kernels.Gaussian(1.0), rng.normal(size=(30, 3)), tmp_path / "g", tile_rows=10)
    file = tmp_path / "g" / "gram" / "c" / "2" / "1"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamagedStoreError, match=r"Tile \(2, 1\) .* checksum"):
        StoredGram(tmp_path / "g") @ np.ones((30, 1))
    file.unlink()
    with pytest.raises(DamagedStoreError, match=r"Tile \(2, 1\)"):
        StoredGram(tmp_path / "g") @ np.ones((30, 1))
