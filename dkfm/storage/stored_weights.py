"""Weights that are larger than memory: they stay in their store, and are read some columns at a time."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, cast

import numpy as np

from dkfm.core.rows import Array
from dkfm.errors import DamagedStoreError, UnsupportedStoreError
from dkfm.storage import zarr_schema, zarr_store

PANEL_BYTES = 2**25
"""What is read at a time, for one product."""


def count_columns_within(limit: int, n: int, itemsize: int) -> int:
    """Return how many columns of n values stay within some bytes, at least 1."""
    return max(1, limit // (itemsize * max(1, n)))


def open_weights(path: Path, digest: str, name: str, info: zarr_schema.ArrayInfo, triangular: bool) -> Array:
    """Return the weights (N, r) of an array that stays where it is; `StoredWeights` says how they are read."""
    n, r = info.shape
    dtype: np.dtype[np.floating] = np.dtype(info.dtype)
    chunk = info.chunks[1]
    panel = max(1, count_columns_within(PANEL_BYTES, n, dtype.itemsize) // chunk) * chunk
    return cast("Array", _InStore(path, digest, name, (n, r), dtype, triangular, min(panel, max(1, r))))


@dataclass(frozen=True, eq=False)
class _InStore:
    """Weights that stay in a store: whole in every byte when it was opened, and checked again at every read."""

    path: Path
    digest: str
    name: str
    shape: tuple[int, int]
    dtype: np.dtype[np.floating]
    triangular: bool
    panel: int
    ndim: ClassVar[int] = 2

    def __getitem__(self, places: tuple[slice, slice]) -> Array:
        rows, columns = places
        self._require_same()
        try:
            values = np.asarray(zarr_store.open_array(self.path, self.name)[:, columns])
        except (ValueError, RuntimeError, OSError) as error:
            raise DamagedStoreError(f"The weights of {self.path} cannot be read: {error}") from None
        if not np.isfinite(values).all():  # a missing chunk is NaN
            raise DamagedStoreError(f"The weights of {self.path} are not finite, or a part of them is gone.")
        if self.triangular and (values[columns.stop :].any() or np.tril(values[columns], -1).any()):
            raise UnsupportedStoreError("A head's weights are said to be triangular, and are not.")
        self._require_same()
        return values[rows]

    def _require_same(self) -> None:
        """Raise where another model lies here by now, whose chunks are as sound."""
        if zarr_schema.read_marker(self.path).get("digest") != self.digest:
            raise DamagedStoreError(f"The model at {self.path} was replaced while it was in use.")
