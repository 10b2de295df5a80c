"""CSR rows in a store: three arrays, of which some rows are read without the others."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import zarr

from dkfm.core.rows import Array, Sparse, csr_rows
from dkfm.errors import UnsupportedStoreError, reason
from dkfm.storage import zarr_schema, zarr_store

_PARTS = ("data", "indices", "indptr")
_CHUNK = 2**20
_LONGEST_RUN = 13
"""Runs of 1, 2, 4, .. rows are looked at, up to 2 to this power."""


def array_names(name: str) -> list[str]:
    """Return the names of the arrays that hold the rows of a name."""
    return [f"{name}.{part}" for part in _PARTS]


def write_csr(group: zarr.Group, name: str, rows: Sparse) -> None:
    """Add rows to a store that is being made."""
    for array, values in zip(array_names(name), (rows.data, rows.indices, rows.indptr), strict=True):
        dtype = "float64" if values is rows.data else "int64"
        chunks = (max(1, min(len(values), _CHUNK)),)
        zarr_store.add_array(group, array, values.shape, chunks, dtype)[...] = values.astype(dtype, copy=False)


def read_csr(root: Path, name: str, columns: int, rows: slice | None = None) -> Sparse:
    """Read some rows, or all, once what their arrays say of each other is seen to be true.

    Raises
    ------
    UnsupportedStoreError
        The arrays do not make CSR rows.
    """
    data, indices, indptr = (zarr_store.open_array(root, array) for array in array_names(name))
    if any(array.ndim != 1 for array in (data, indices, indptr)) or indptr.shape[0] < 2:
        raise UnsupportedStoreError(f"The arrays {name}.* of {root} do not make rows.")
    part = slice(0, indptr.shape[0] - 1) if rows is None else rows
    try:
        pointers = np.asarray(indptr[part.start : part.stop + 1], dtype=np.int64)
        if len(pointers) != part.stop - part.start + 1:
            raise UnsupportedStoreError(f"The arrays {name}.* of {root} do not make rows.")
        values = value_span(pointers, data.shape[0])
        return join_csr(pointers, np.asarray(data[values]), np.asarray(indices[values]), columns)
    except (ValueError, RuntimeError, OSError) as error:
        raise UnsupportedStoreError(f"The arrays {name}.* of {root} do not make rows: {reason(error)}.") from None


def value_span(pointers: npt.NDArray[np.int64], stored: int) -> slice:
    """Return which of the stored values belong to the rows that some pointers are of.

    Raises
    ------
    ValueError
        The pointers fall, or lead out of the values.
    """
    rising = (pointers[1:] >= pointers[:-1]).all()  # a difference may be more than an integer holds
    if not (rising and 0 <= pointers[0] <= pointers[-1] <= stored):
        raise ValueError("the pointers do not rise within the values.")
    return slice(int(pointers[0]), int(pointers[-1]))


def join_csr(pointers: npt.NDArray[np.int64], data: Array, indices: npt.NDArray[np.integer], columns: int) -> Sparse:
    """Return the rows of the values and columns of a `value_span`.

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


class PointerCheck:
    """The row pointers of CSR rows, which come some at a time in their order, checked as they come.

    Parameters
    ----------
    stored : int
        Values that there are.
    """

    def __init__(self, stored: int) -> None:
        self._stored = stored
        self._last: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._runs = [0] * (_LONGEST_RUN + 1)
        self._rows = -1

    def add(self, part: npt.NDArray[np.integer]) -> None:
        """Take the next ones.

        Raises
        ------
        ValueError
            They do not begin with 0, they fall, or they lead out of the values.
        """
        if not len(self._last) and part[0] != 0:
            raise ValueError(f"the pointers must begin with 0, and begin with {part[0]}")
        found = np.concatenate([self._last, part])
        if (found[1:] < found[:-1]).any() or found[-1] > self._stored:
            raise ValueError("the pointers do not rise within the values")
        for power in range(_LONGEST_RUN + 1):
            if len(found) > 2**power:
                most = (found[2**power :] - found[: -(2**power)]).max()
                self._runs[power] = max(self._runs[power], int(most))
        self._last = found[-(2**_LONGEST_RUN) :]
        self._rows += len(part)

    def runs(self) -> tuple[int, ...]:
        """Return how many values 1, 2, 4, .. consecutive rows hold at most, once all pointers are there.

        Raises
        ------
        ValueError
            The last one is not the number of values.
        """
        if self._last[-1] != self._stored:
            raise ValueError(f"the pointers must end with the {self._stored} values, and end with {self._last[-1]}")
        # A run of more rows than there are holds all of them.
        return tuple(self._stored if 2**power >= self._rows else most for power, most in enumerate(self._runs))


def longest_runs(rows: Sparse) -> tuple[int, ...]:
    """Return how many values 1, 2, 4, .. consecutive rows hold at most."""
    pointers = PointerCheck(int(rows.indptr[-1]))
    for start in range(0, len(rows.indptr), _CHUNK):
        pointers.add(rows.indptr[start : start + _CHUNK])
    return pointers.runs()


def values_in_rows(runs: tuple[int, ...], rows: int) -> int:
    """Return how many dense float64 values take the memory of any so many consecutive rows, at most.

    >>> values_in_rows((5, 9, 16), 3)
    31
    """
    whole, rest = divmod(rows, 1 << len(runs) - 1)
    parts = sum(most for power, most in enumerate(runs[:-1]) if rest >> power & 1)
    above = runs[(rest - 1).bit_length()] if rest else 0
    return 2 * (whole * runs[-1] + min(parts, above)) + rows


def require_csr_complete(root: Path, name: str) -> None:
    """Raise unless every chunk of the arrays is there."""
    for array in array_names(name):
        zarr_schema.require_chunks(root / array, zarr_schema.read_array(root / array))
