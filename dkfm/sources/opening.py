"""Open a source for an array, a data frame, a path or a URL, by its format."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dkfm.core.frames import column_names, convert_container, has_range_columns, is_dask_collection
from dkfm.core.rows import as_float64, as_rows_allow_nonfinite
from dkfm.errors import InvalidInputError, warn_caller
from dkfm.files.location import Location, locate
from dkfm.files.object_store import Remote
from dkfm.sources.base import Source
from dkfm.sources.csr_npz import NpzSource
from dkfm.sources.memory import MemorySource, open_frame
from dkfm.sources.npy import open_npy
from dkfm.sources.parquet_files.listing import has_wildcards
from dkfm.sources.zarr import open_zarr

_OPENERS: Mapping[str, Callable[[Location], Source]] = {".npy": open_npy, ".npz": NpzSource.open, ".zarr": open_zarr}
"""Functions that open formats without column names. Parquet is not among them, because it needs pyarrow."""

_PARQUET = ".parquet"


def open_source(
    data: object,
    name: str = "X",
    *,
    columns: Sequence[str] | None = None,
    id_column: str | None = None,
    fitted_columns: Sequence[str] | None = None,
    excluded_columns: Sequence[str] = (),
) -> Source:
    """Return a source for an array, a data frame, a path, a URL of fsspec, or a local Zarr array.

    Parameters
    ----------
    data : array-like, data frame, zarr.Array or path
        A path or a URL of a ``.npy`` file, of a ``.npz`` file (CSR rows of ``scipy.sparse.save_npz``), of a
        ``.parquet`` file, of a folder of ``.parquet`` files, of a Zarr store or of an array ``store.zarr/array``; or a
        pattern of Parquet files such as ``tables/2024-*.parquet``. A data frame is one of pandas or polars in memory,
        or an Arrow table or record batch. The columns of data frames and Parquet files have names.
    name : str
        Name of an array or a data frame in messages.
    columns : sequence of str, optional
        Names of the columns to read, in this order; by default all but the ids.
    id_column : str, optional
        Name of the column that contains the ids of the rows, or of the key of partition folders (``country=de``).
    fitted_columns : sequence of str, optional
        Names of the columns to read if `columns` is None; ignored if the columns of `data` have no names.
    excluded_columns : sequence of str
        Names of columns of Parquet files that are not read by default.

    Returns
    -------
    Source
        The opened source.

    Raises
    ------
    InvalidInputError
        There is no such input, it does not contain rows of real numbers, or requested columns have no names.
    MissingExtraError
        A package that Parquet files, ids, or URLs need is not installed.
    StoreError
        An object store does not respond, or denies access.
    """
    requested = fitted_columns if columns is None else columns
    if isinstance(data, str | os.PathLike):
        return _open_location(locate(data), requested, columns, id_column, excluded_columns)
    if (path := _find_local_zarr_path(data)) is not None:
        _require_no_columns(name, columns, id_column)
        return open_zarr(path)
    return _open_memory(convert_container(data), name, requested, columns, id_column, fitted_columns)


def _find_local_zarr_path(data: object) -> Path | None:
    """Return the path of a zarr.Array or zarr.Group on this file system; None if data are something else."""
    zarr = sys.modules.get("zarr")  # a caller with an array has imported it; another thread may be at it
    kinds = tuple(getattr(zarr, name) for name in ("Array", "Group") if hasattr(zarr, name))
    if not isinstance(data, kinds) or not hasattr(data.store, "root"):
        return None
    return Path(str(data.store.root)) / str(data.path)


def _open_location(
    location: Location,
    requested: Sequence[str] | None,
    columns: Sequence[str] | None,
    id_column: str | None,
    excluded_columns: Sequence[str],
) -> Source:
    suffix = _detect_format(location)
    if suffix == _PARQUET:
        from dkfm.sources.parquet import ParquetSource  # pyarrow is an extra, and slow to import

        return ParquetSource.open(location, requested, id_column, excluded_columns)
    _require_no_columns(location, columns, id_column)
    if suffix not in _OPENERS:
        raise InvalidInputError(
            f"{location} is neither a .npy, .npz or .parquet file, nor a folder of .parquet files, nor a Zarr version "
            "3 store; save its rows as one of these."
        )
    return _OPENERS[suffix](location)


def _open_memory(
    data: object,
    name: str,
    requested: Sequence[str] | None,
    columns: Sequence[str] | None,
    id_column: str | None,
    fitted: Sequence[str] | None,
) -> Source:
    if is_dask_collection(data):
        raise InvalidInputError(f"{name} is a dask collection, which is not read here; compute it, or give a path.")
    names = column_names(data, name)
    if names is not None:
        return open_frame(data, names, name, requested, id_column)
    warn_of_nonstring_columns(data, name, fitted)
    _require_no_columns(name, columns, id_column)
    return MemorySource(as_float64(as_rows_allow_nonfinite(data, name)), name)


def _detect_format(location: Location) -> str:
    """Return the suffix of the format at a location; a Zarr store may have any name."""
    return _detect_remote_format(location) if isinstance(location, Remote) else _detect_local_format(location)


def _detect_local_format(path: Path) -> str:
    if not path.exists():
        if has_wildcards(path):
            return _PARQUET
        raise InvalidInputError(f"There is no {path}.")
    if not path.is_dir():
        return path.suffix if path.suffix != ".zarr" else ""  # a store is a folder
    if (path / "zarr.json").is_file():
        return ".zarr"
    if next(path.rglob("*.parquet"), None) is not None:
        return _PARQUET
    if next(path.iterdir(), None) is None:
        raise InvalidInputError(f"{path} is an empty folder.")
    return ".zarr" if path.suffix == ".zarr" else ""


def _detect_remote_format(remote: Remote) -> str:
    suffix = Path(remote.url).suffix
    if suffix in (".npy", ".npz"):
        return suffix  # without a request
    if suffix == _PARQUET and remote.size() is not None:
        return _PARQUET
    if remote.size("zarr.json") is not None:
        return ".zarr"  # even if the URL itself is an object, because some tools mark a folder by such an object
    if remote.size() is not None:
        return ""
    if suffix == _PARQUET or any(name.endswith(_PARQUET) for name, _, _ in remote.list_objects()):
        return _PARQUET
    if next(remote.list_objects(), None) is None and not has_wildcards(remote):
        raise InvalidInputError(f"There is no {remote}.")
    return _PARQUET if has_wildcards(remote) else ""


def _require_no_columns(what: object, columns: Sequence[str] | None, id_column: str | None) -> None:
    if columns is not None or id_column is not None:
        raise InvalidInputError(
            f"columns and id_column name columns of Parquet files and data frames, and {what} is neither."
        )


def warn_of_nonstring_columns(frame: object, name: str, fitted: Sequence[str] | None) -> None:
    """Warn if column names of a data frame are not text; they are not matched, so the order may be wrong."""
    if not has_range_columns(frame) or (fitted is not None and hasattr(frame, "columns")):
        message = (
            f"The columns of {name} are called by numbers or tuples, which are not matched: they are taken in "
            "their order; call them by text."
        )
        warn_caller(message)
