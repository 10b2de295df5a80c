"""CSR rows in a store: three arrays, of which some rows are read without the others."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import zarr

from dkfm import formats, stamps, store
from dkfm.errors import UnsupportedStoreError, reason
from dkfm.kernels.rows import Array, Rows, Sparse, csr_rows

__all__ = ["CsrSource", "array_names", "joined", "read", "require_complete", "span", "write"]

_PARTS = ("data", "indices", "indptr")
_CHUNK = 2**20


def array_names(name: str) -> list[str]:
    """Return the names of the arrays that hold the rows of a name."""
    return [f"{name}.{part}" for part in _PARTS]


def write(group: zarr.Group, name: str, rows: Sparse) -> None:
    """Add rows to a store that is being made."""
    for array, values in zip(array_names(name), (rows.data, rows.indices, rows.indptr), strict=True):
        dtype = "float64" if values is rows.data else "int64"
        chunks = (max(1, min(len(values), _CHUNK)),)
        store.add_array(group, array, values.shape, chunks, dtype)[...] = values.astype(dtype, copy=False)


def read(root: Path, name: str, columns: int, rows: slice | None = None) -> Sparse:
    """Read some rows, or all, once what their arrays say of each other is seen to be true.

    Raises
    ------
    UnsupportedStoreError
        The arrays do not make CSR rows.
    """
    data, indices, indptr = (store.open_array(root, array) for array in array_names(name))
    if any(array.ndim != 1 for array in (data, indices, indptr)) or indptr.shape[0] < 2:
        raise UnsupportedStoreError(f"The arrays {name}.* of {root} do not make rows.")
    part = slice(0, indptr.shape[0] - 1) if rows is None else rows
    try:
        pointers = np.asarray(indptr[part.start : part.stop + 1], dtype=np.int64)
        if len(pointers) != part.stop - part.start + 1:
            raise UnsupportedStoreError(f"The arrays {name}.* of {root} do not make rows.")
        values = span(pointers, data.shape[0])
        return joined(pointers, np.asarray(data[values]), np.asarray(indices[values]), columns)
    except (ValueError, RuntimeError, OSError) as error:
        raise UnsupportedStoreError(f"The arrays {name}.* of {root} do not make rows: {reason(error)}.") from None


def span(pointers: npt.NDArray[np.int64], stored: int) -> slice:
    """Return which of the stored values belong to the rows that some pointers tell of.

    Raises
    ------
    ValueError
        The pointers fall, or lead out of the values.
    """
    rising = (pointers[1:] >= pointers[:-1]).all()  # a difference may be more than an integer holds
    if not (rising and 0 <= pointers[0] <= pointers[-1] <= stored):
        raise ValueError("the pointers do not rise within the values.")
    return slice(int(pointers[0]), int(pointers[-1]))


def joined(pointers: npt.NDArray[np.int64], data: Array, indices: npt.NDArray[np.integer], columns: int) -> Sparse:
    """Return the rows of the values and columns of a `span`.

    Raises
    ------
    ValueError
        An index leads out of the columns.
    """
    kind = np.result_type(indices.dtype, np.min_scalar_type(-1 - len(data)))  # of both, so that neither is widened
    offsets = (pointers - pointers[0]).astype(kind)
    found = csr_rows(data, indices, offsets, columns)
    try:
        found.check_format(full_check=True)
    except IndexError as error:
        raise ValueError(str(error)) from None
    return found


def require_complete(root: Path, name: str) -> None:
    """Raise unless every chunk of the arrays is there."""
    for array in array_names(name):
        formats.require_chunks(root / array, formats.read_array(root / array))


@dataclass(frozen=True)
class CsrSource:
    """CSR rows in a store of dkfm's."""

    root: Path
    array: str
    shape: tuple[int, int]
    row_values: int
    chunk_rows: int = 1

    @property
    def path(self) -> Path:
        """The store."""
        return self.root

    @property
    def name(self) -> str:
        """The path."""
        return str(self.root)

    def read(self, rows: slice) -> Rows:
        """Return some rows."""
        return read(self.root, self.array, self.shape[1], rows)

    def stamp(self) -> str:
        """Return a digest of names, sizes and times of change."""
        return stamps.of_path(self.root)

    def where(self, row: int) -> tuple[str, int]:
        """Return the path, and the row."""
        return self.name, row
