"""`open_source`: from what a user gives to the reader of its format."""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import zarr

from dkfm.core.frames import column_names, is_dask_collection, is_numbered_in_order, unwrap
from dkfm.core.rows import as_array, as_float64
from dkfm.errors import DkfmWarning, InvalidInputError
from dkfm.files.location import Location, locate
from dkfm.files.object_store import Remote
from dkfm.sources.base import Source
from dkfm.sources.memory import MemorySource, open_frame
from dkfm.sources.npy import open_npy
from dkfm.sources.npz import NpzSource
from dkfm.sources.zarr import open_zarr

_READERS: Mapping[str, Callable[[Location], Source]] = {".npy": open_npy, ".npz": NpzSource.open, ".zarr": open_zarr}
"""The readers of formats whose columns have no names. Parquet's is imported where it is used, for it needs pyarrow."""

_PARQUET = ".parquet"


def open_source(
    data: object,
    name: str = "X",
    *,
    columns: Sequence[str] | None = None,
    id_column: str | None = None,
    fitted: Sequence[str] | None = None,
) -> Source:
    """Return a source for an array, a data frame, a path, a URL of fsspec's, or a local Zarr array.

    Parameters
    ----------
    data : array-like, data frame, zarr.Array or path
        A path or a URL ends in ``.npy``, in ``.npz`` (CSR rows of ``scipy.sparse.save_npz``) or in ``.parquet``, or is
        a folder with ``.parquet`` files in it, or a Zarr store, or ``store.zarr/array``. A data frame is in memory, of
        pandas or polars, or a table or a record batch of Arrow's. Its columns, and those of Parquet files, have names.
    name : str
        What messages call an array or a data frame.
    columns : sequence of str, optional
        The columns that are read, by name, in this order; by default all but the ids.
    id_column : str, optional
        The column that names the rows.
    fitted : sequence of str, optional
        The columns that are read where `columns` does not say; other rows may have no names.

    Raises
    ------
    InvalidInputError
        Nothing there, or something that does not hold rows of real numbers, or columns of what has no names.
    MissingExtraError
        Parquet files, ids, or a URL, and a package that is not installed.
    StoreError
        An object store that did not answer, or does not let one read.
    """
    wanted = fitted if columns is None else columns
    if isinstance(data, str | os.PathLike):
        return _open_location(locate(data), wanted, columns, id_column)
    if isinstance(data, zarr.Array) and hasattr(data.store, "root"):
        _require_no_columns(name, columns, id_column)
        return open_zarr(Path(data.store.root) / data.path)
    return _open_memory(unwrap(data), name, wanted, columns, id_column, fitted)


def _open_location(
    location: Location, wanted: Sequence[str] | None, columns: Sequence[str] | None, id_column: str | None
) -> Source:
    kind = _format_of(location)
    if kind == _PARQUET:
        from dkfm.sources.parquet import ParquetSource  # pyarrow is an extra, and takes long

        return ParquetSource.open(location, wanted, id_column)
    _require_no_columns(location, columns, id_column)
    if kind not in _READERS:
        raise InvalidInputError(
            f"{location} is neither a .npy, .npz or .parquet file, nor a folder of .parquet files, nor a Zarr version "
            "3 store."
        )
    return _READERS[kind](location)


def _open_memory(
    data: object,
    name: str,
    wanted: Sequence[str] | None,
    columns: Sequence[str] | None,
    id_column: str | None,
    fitted: Sequence[str] | None,
) -> Source:
    if is_dask_collection(data):
        raise InvalidInputError("A dask collection is not a source; it belongs to transform(), which stays lazy.")
    names = column_names(data, name)
    if names is not None:
        return open_frame(data, names, name, wanted, id_column)
    _warn_of_numbers(data, name, fitted)
    _require_no_columns(name, columns, id_column)
    return MemorySource(as_float64(as_array(data, name)), name)


def _format_of(location: Location) -> str:
    """Return the suffix of the format of what is there; a Zarr store has any name."""
    return _remote_format(location) if isinstance(location, Remote) else _local_format(location)


def _local_format(path: Path) -> str:
    if not path.exists():
        raise InvalidInputError(f"There is no {path}.")
    if not path.is_dir():
        return path.suffix
    holds_tables = not (path / "zarr.json").is_file() and next(path.rglob("*.parquet"), None) is not None
    return _PARQUET if holds_tables else ".zarr"


def _remote_format(place: Remote) -> str:
    suffix = Path(place.url).suffix
    if suffix in (".npy", ".npz"):
        return suffix  # without a request
    if place.size() is not None:
        return suffix if suffix == _PARQUET else ""
    if place.size("zarr.json") is not None:
        return ".zarr"
    if suffix == _PARQUET or any(name.endswith(_PARQUET) for name, _, _ in place.list_objects()):
        return _PARQUET
    if next(place.list_objects(), None) is None:
        raise InvalidInputError(f"There is no {place}.")
    return ""


def _require_no_columns(what: object, columns: Sequence[str] | None, id_column: str | None) -> None:
    if columns is not None or id_column is not None:
        raise InvalidInputError(
            f"columns and id_column name columns of Parquet files and data frames, and {what} is neither."
        )


def _warn_of_numbers(frame: object, name: str, fitted: Sequence[str] | None) -> None:
    """Warn where the columns of a data frame are called by what is no text, and may be in another order than meant."""
    if not is_numbered_in_order(frame) or (fitted is not None and hasattr(frame, "columns")):
        message = (
            f"The columns of {name} are called by numbers or tuples, which are not matched: they are taken in "
            "their order; call them by text."
        )
        warnings.warn(message, DkfmWarning, stacklevel=5)
