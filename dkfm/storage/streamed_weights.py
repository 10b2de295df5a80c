"""Read weights out of core, a few columns at a time, from the store of a model that is larger than memory."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, cast

import numpy as np

from dkfm.core.rows import Array
from dkfm.errors import DamagedStoreError, StoreError, UnsupportedStoreError
from dkfm.storage import raw_chunk_reader, store_metadata

CHUNK_BYTES = 2**22
"""Largest chunk of an array of a model, in bytes, unless one row or one column is larger."""

PANEL_BYTES = 2**25
"""Bytes of weights that are read at a time, for one product."""


def count_columns_within(limit: int, n: int, itemsize: int) -> int:
    """Return how many columns of n values fit into `limit` bytes, at least 1."""
    return max(1, limit // (itemsize * max(1, n)))


def open_weights(path: Path, digest: str, name: str, info: store_metadata.ArrayInfo, triangular: bool) -> Array:
    """Return weights (N, r) that stay in a store and are read as `dkfm.numerics.model.StoredWeights` describes."""
    n, r = info.shape
    dtype: np.dtype[np.floating] = np.dtype(info.dtype_name)
    chunk = info.chunks[1]
    panel = max(1, count_columns_within(PANEL_BYTES, n, dtype.itemsize) // chunk) * chunk
    return cast("Array", _ZarrWeights(path, digest, name, (n, r), dtype, triangular, min(panel, max(1, r))))


@dataclass(frozen=True, eq=False)
class _ZarrWeights:
    """Weights in a store; all checksums were verified when it was opened, and each read checks the digest again."""

    path: Path
    model_digest: str
    name: str
    shape: tuple[int, int]
    dtype: np.dtype[np.floating]
    triangular: bool
    panel_columns: int
    ndim: ClassVar[int] = 2

    def __getitem__(self, index: tuple[slice, slice]) -> Array:
        rows, columns = index
        self._require_unchanged()
        try:
            values = cast("Array", raw_chunk_reader.read_own_array(self.path / self.name, (slice(None), columns)))
        except FileNotFoundError:
            raise DamagedStoreError(f"A part of the weights of {self.path} is gone.") from None
        except (ValueError, OSError) as error:
            raise DamagedStoreError(f"The weights of {self.path} cannot be read: {error}") from None
        if not np.isfinite(values).all():
            raise DamagedStoreError(f"The weights of {self.path} are not finite.")
        if self.triangular and (values[columns.stop :].any() or np.tril(values[columns], -1).any()):
            raise UnsupportedStoreError("A head's weights are said to be triangular, and are not.")
        self._require_unchanged()
        return values[rows]

    def _require_unchanged(self) -> None:
        """Raise if another model has replaced this one, because its chunks would be valid too."""
        if not self.path.is_dir():
            raise StoreError(
                f"The weights at {self.path} are gone, and are read from there; fit again, or load a saved model."
            )
        if store_metadata.read_completion_marker(self.path).get("digest") != self.model_digest:
            raise DamagedStoreError(f"The model at {self.path} was replaced while it was in use.")
