"""Write CSR rows to a store as three arrays, read any slice of them, and bound the memory of a slice."""

from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from dkfm.core.rows import Array, Sparse, build_csr_rows
from dkfm.errors import UnsupportedStoreError, extract_reason
from dkfm.storage import raw_chunk_reader, store_metadata, zarr_store

if TYPE_CHECKING:
    import zarr

_PARTS = ("data", "indices", "indptr")
_CHUNK_LENGTH = 2**20
_MAX_POWER = 13
"""Values are counted in runs of 1, 2, 4, .. rows, up to 2 to this power."""


def array_names(name: str) -> list[str]:
    """Return the names of the three arrays of CSR rows that are stored as `name`."""
    return [f"{name}.{part}" for part in _PARTS]


def write_csr(group: "zarr.Group", name: str, rows: Sparse, dtype: str = "float64") -> None:
    """Add CSR rows to a store that is being written, with their values in a dtype."""
    for array, values in zip(array_names(name), (rows.data, rows.indices, rows.indptr), strict=True):
        stored = dtype if values is rows.data else "int64"
        chunks = (max(1, min(len(values), _CHUNK_LENGTH)),)
        zarr_store.add_array(group, array, values.shape, chunks, stored)[...] = values.astype(stored, copy=False)


def read_csr(root: Path, name: str, columns: int, row_slice: slice | None = None) -> Sparse:
    """Read a slice of CSR rows, or all of them, and check that their arrays are consistent.

    Raises
    ------
    UnsupportedStoreError
        The arrays are not valid CSR rows.
    """
    fault = f"The arrays {name}.* of {root} do not make rows"
    data, indices, indptr = paths = [root / array for array in array_names(name)]
    shapes = [store_metadata.read_array_info(path).shape for path in paths]
    if any(len(shape) != 1 for shape in shapes) or shapes[2][0] < 2:
        raise UnsupportedStoreError(f"{fault}.")
    selected = slice(0, shapes[2][0] - 1) if row_slice is None else row_slice
    try:
        bounds = slice(selected.start, selected.stop + 1)
        pointers = raw_chunk_reader.read_own_array(indptr, (bounds,)).astype(np.int64, copy=False)
        if len(pointers) != selected.stop - selected.start + 1:
            raise UnsupportedStoreError(f"{fault}.")
        span = (value_slice(pointers, shapes[0][0]),)
        values = cast("Array", raw_chunk_reader.read_own_array(data, span))
        numbers = cast("npt.NDArray[np.integer]", raw_chunk_reader.read_own_array(indices, span))
        return assemble_csr(pointers, values, numbers, columns)
    except (ValueError, OSError) as error:
        raise UnsupportedStoreError(f"{fault}: {extract_reason(error)}.") from None


def value_slice(pointers: npt.NDArray[np.int64], stored: int) -> slice:
    """Return the slice of the stored values that belong to consecutive rows, from their row pointers.

    Raises
    ------
    ValueError
        The pointers decrease, or exceed the number of stored values.
    """
    rising = (pointers[1:] >= pointers[:-1]).all()  # a difference could overflow
    if not (rising and 0 <= pointers[0] <= pointers[-1] <= stored):
        raise ValueError("the pointers do not rise within the values.")
    return slice(int(pointers[0]), int(pointers[-1]))


def assemble_csr(
    pointers: npt.NDArray[np.int64], data: Array, indices: npt.NDArray[np.integer], columns: int
) -> Sparse:
    """Return consecutive rows of a store as a CSR array.

    The pointers count from the start of the store; `data` and `indices` hold the values of these rows alone.

    Raises
    ------
    ValueError
        An index is negative, or not below `columns`.
    """
    dtype = np.result_type(indices.dtype, np.min_scalar_type(-1 - len(data)))  # common, so that SciPy widens neither
    offsets = (pointers - pointers[0]).astype(dtype)
    rows = build_csr_rows(data, indices, offsets, columns)
    try:
        rows.check_format(full_check=True)
    except IndexError as error:
        raise ValueError(str(error)) from None
    return rows


class PointerCheck:
    """Check the row pointers of CSR rows, which are passed in parts and in their order.

    Parameters
    ----------
    stored : int
        Number of stored values.
    """

    def __init__(self, stored: int) -> None:
        self._stored = stored
        self._last: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._runs = [0] * (_MAX_POWER + 1)
        self._rows = -1

    def add(self, part: npt.NDArray[np.integer]) -> None:
        """Check the next pointers.

        Raises
        ------
        ValueError
            The first pointer is not 0, the pointers decrease, or they exceed the number of values.
        """
        if not len(self._last) and part[0] != 0:
            raise ValueError(f"the pointers must begin with 0, and begin with {part[0]}")
        pointers = np.concatenate([self._last, part])
        if (pointers[1:] < pointers[:-1]).any() or pointers[-1] > self._stored:
            raise ValueError("the pointers do not rise within the values")
        for power in range(_MAX_POWER + 1):
            if len(pointers) > 2**power:
                self._runs[power] = max(self._runs[power], int((pointers[2**power :] - pointers[: -(2**power)]).max()))
        self._last = pointers[-(2**_MAX_POWER) :]
        self._rows += len(part)

    def max_nnz_per_row_window(self) -> tuple[int, ...]:
        """Return the largest number of values in 1, 2, 4, .. consecutive rows, after the last pointer was added.

        Raises
        ------
        ValueError
            The last pointer is not the number of values.
        """
        if self._last[-1] != self._stored:
            raise ValueError(f"the pointers must end with the {self._stored} values, and end with {self._last[-1]}")
        # A window that is longer than the array contains all values.
        return tuple(self._stored if 2**power >= self._rows else largest for power, largest in enumerate(self._runs))


def max_nnz_per_row_window(rows: Sparse) -> tuple[int, ...]:
    """Return the largest number of stored values in 1, 2, 4, .. consecutive rows."""
    pointers = PointerCheck(int(rows.indptr[-1]))
    for start in range(0, len(rows.indptr), _CHUNK_LENGTH):
        pointers.add(rows.indptr[start : start + _CHUNK_LENGTH])
    return pointers.max_nnz_per_row_window()


def max_csr_size_in_float64s(max_nnz: tuple[int, ...], rows: int) -> int:
    """Return the largest memory of `rows` consecutive CSR rows, as a number of float64 values.

    Each stored value counts twice, with its column index, and each row once, for its pointer.

    >>> max_csr_size_in_float64s((5, 9, 16), 3)
    31
    """
    full_runs, rest = divmod(rows, 1 << len(max_nnz) - 1)
    in_parts = sum(largest for power, largest in enumerate(max_nnz[:-1]) if rest >> power & 1)
    in_next_run = max_nnz[(rest - 1).bit_length()] if rest else 0
    return 2 * (full_runs * max_nnz[-1] + min(in_parts, in_next_run)) + rows


def require_csr_complete(root: Path, name: str) -> None:
    """Raise a DamagedStoreError unless every chunk of the three arrays exists and has its exact size."""
    for array in array_names(name):
        store_metadata.require_chunks(root / array, store_metadata.read_array_info(root / array))
