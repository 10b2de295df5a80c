"""Rows of an array, a file or a store behind one small interface.

A source on disk is a value of a few words: it travels in a task, and opens its file where it is read.
"""

import os
import uuid
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import zarr

from dkfm.core.frames import column_names, is_numbered_in_order, unwrapped
from dkfm.core.rows import Array, Rows, as_array, double, require_finite, stacked
from dkfm.errors import DkfmError, DkfmWarning, InvalidInputError, reason
from dkfm.files import change_detection
from dkfm.files.object_store import Remote, Root, at_url
from dkfm.sources import chunk_cache
from dkfm.sources.memory import MemorySource, in_frame
from dkfm.sources.npy import NpySource
from dkfm.sources.npz import NpzSource
from dkfm.sources.remote import open_remote
from dkfm.storage import bounded_chunks, json_documents, zarr_schema
from dkfm.storage.raw_chunks import Plain
from dkfm.storage.zarr_store import local_path

__all__ = [
    "MemorySource",
    "Named",
    "NpySource",
    "Source",
    "ZarrSource",
    "in_single",
    "open_source",
    "read_finite",
    "sample",
]


class Source(Protocol):
    """Rows (n, d) that are read by slices."""

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""

    @property
    def chunk_rows(self) -> int:
        """Rows that are read together whatever is asked for; 1 where it does not matter."""

    @property
    def row_values(self) -> int:
        """How many float64 values a row takes in memory; fewer than its columns where rows are sparse."""

    def values_of(self, rows: int) -> int:
        """Return how many float64 values any so many consecutive rows take in memory, at most."""

    def decoding_bytes(self, chunks: int) -> int:
        """Return the bytes that reading rows of so many chunks takes for a while, beside the rows themselves."""

    def read(self, rows: slice) -> Rows:
        """Return some rows as float64, not checked for NaN; after `in_single`, as float32 where they are stored so."""

    def stamp(self) -> str:
        """Return what is another text once the rows have changed: of names, sizes and times, or of values in memory."""

    def state(self) -> str:
        """Return what is another text once anything was written to the rows, whatever was done to the times since."""

    def is_of(self, stamp: str) -> bool:
        """Whether the rows are the ones that were opened, by a stamp that was taken since."""

    def where(self, row: int) -> tuple[str, int]:
        """Return the name of the file that holds a row, and the number of the row in it."""


@runtime_checkable
class Named(Protocol):
    """Rows whose columns have names."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns that are read."""


@dataclass(frozen=True)
class ZarrSource:
    """Rows of an array in a Zarr version 3 store; its codecs are checked before it is opened."""

    path: Path
    shape: tuple[int, int]
    chunk_rows: int
    plain: Plain | None = None
    """How its rows are read without Zarr, if they can be."""
    single: bool = False
    """Whether rows of float32 are read as they are."""
    opened: str = field(default_factory=lambda: uuid.uuid4().hex, compare=False)
    """Which opening of the array this is: what was decoded for an earlier one may have changed since."""

    @classmethod
    def open(cls, path: Path) -> "ZarrSource":
        """Read the metadata of an array, or of the only array of a group."""
        if zarr_schema.status_within(path, path / "zarr.json") is None:
            raise InvalidInputError(f"There is no Zarr version 3 array at {path}.")
        if json_documents.read_json(path / "zarr.json").get("node_type") == "group":
            arrays = sorted(p.parent.name for p in path.glob("*/zarr.json"))
            if len(arrays) != 1:
                held = ", ".join(arrays) or "none"
                raise InvalidInputError(f"{path} is a group; name one of its arrays as {path}/NAME ({held}).")
            zarr_schema.status_within(path, path / arrays[0] / "zarr.json")
            path = path / arrays[0]
        _, info = zarr_schema.read_source(path)
        if len(info.shape) != 2 or 0 in info.shape:
            raise InvalidInputError(f"{path} must hold rows and columns, and its shape is {info.shape}.")
        return cls(path, (info.shape[0], info.shape[1]), info.chunks[0], Plain.of(path, info))

    @property
    def name(self) -> str:
        """The path."""
        return str(self.path)

    @property
    def row_values(self) -> int:
        """The columns."""
        return self.shape[1]

    def values_of(self, rows: int) -> int:
        """Return how many float64 values so many rows take in memory."""
        return rows * self.shape[1]

    def decoding_bytes(self, chunks: int) -> int:
        """Return the bytes of chunks as they are stored, and as they are decoded."""
        return chunk_cache.chunk_bytes(self.shape, self.chunk_rows, chunks)

    def stamp(self) -> str:
        """Return a digest of names, sizes and times of change."""
        return change_detection.of_path(self.path)

    def state(self) -> str:
        """Return a digest that no writer can bring back."""
        return change_detection.of_path(self.path, exact=True)

    def where(self, row: int) -> tuple[str, int]:
        """Return the path, and the row."""
        return self.name, row

    def read(self, rows: slice) -> Array:
        """Return some rows; of a chunk much larger than they are, which is kept for those after them."""
        return chunk_cache.by_chunks((self.opened, self.single), rows, self.chunk_rows, self._read)

    def is_of(self, stamp: str) -> bool:  # nothing was kept of the array but its metadata
        """Whether the metadata, read again, say the same."""
        return ZarrSource.open(self.path) == self

    def _read(self, rows: slice) -> Array:
        try:
            values = None if self.plain is None else self.plain.read(rows)
            return chunk_cache.widened(bounded_chunks.read(self.path, rows) if values is None else values, self.single)
        except DkfmError:
            raise
        except Exception as error:  # whatever a decoder makes of a stranger's bytes
            raise InvalidInputError(
                f"Rows {rows.start} to {rows.stop} of {self.path} cannot be read: {reason(error)}."
            ) from error


def in_single(source: Source) -> Source:
    """Return a source whose rows of float32 are read as they are, for a model that would round them anyway."""
    # Those that can have the field; naming the class of Parquet files here would import pyarrow.
    return replace(source, single=True) if is_dataclass(source) and hasattr(source, "single") else source


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
    place = _place(data) if isinstance(data, str | os.PathLike) else None
    wanted = fitted if columns is None else columns
    if place is not None and _is_parquet(place):
        from dkfm.sources.parquet import ParquetSource  # pyarrow is an extra, and takes long

        return ParquetSource.open(place, wanted, id_column)
    if place is None:
        data = unwrapped(data)
        names = None if hasattr(data, "__dask_graph__") else column_names(data, name)
        if names is not None:
            return in_frame(data, names, name, wanted, id_column)
        _warn_of_numbers(data, name, fitted)
    _require_no_columns(place or name, columns, id_column)
    if place is not None:
        return _open_unnamed(place)
    if isinstance(data, zarr.Array) and hasattr(data.store, "root"):
        return ZarrSource.open(Path(data.store.root) / data.path)
    if hasattr(data, "__dask_graph__"):
        raise InvalidInputError("A dask collection is not a source; it belongs to transform(), which stays lazy.")
    return MemorySource(double(as_array(data, name)), name)


def _warn_of_numbers(frame: object, name: str, fitted: Sequence[str] | None) -> None:
    """Warn where the columns of a data frame are called by what is no text, and may be in another order than meant."""
    if not is_numbered_in_order(frame) or (fitted is not None and hasattr(frame, "columns")):
        message = (
            f"The columns of {name} are called by numbers or tuples, which are not matched: they are taken in "
            "their order; call them by text."
        )
        warnings.warn(message, DkfmWarning, stacklevel=4)


def _place(data: str | os.PathLike[str]) -> Root:
    """Return where something is, which is there."""
    found = at_url(data) or local_path(data).absolute()
    if isinstance(found, Path) and not found.exists():
        raise InvalidInputError(f"There is no {found}.")
    return found


def _require_no_columns(what: object, columns: Sequence[str] | None, id_column: str | None) -> None:
    if columns is not None or id_column is not None:
        raise InvalidInputError(
            f"columns and id_column name columns of Parquet files and data frames, and {what} is neither."
        )


def _is_parquet(path: Root) -> bool:
    if isinstance(path, Remote):
        return _is_parquet_at(path)
    if not path.is_dir():
        return path.suffix == ".parquet"
    return not (path / "zarr.json").is_file() and next(path.rglob("*.parquet"), None) is not None


def _is_parquet_at(place: Remote) -> bool:
    if place.url.endswith((".npy", ".npz")):
        return False  # without a request
    if place.size() is not None:
        return place.url.endswith(".parquet")
    if place.size("zarr.json") is not None:
        return False
    return place.url.endswith(".parquet") or any(name.endswith(".parquet") for name, _, _ in place.names())


def _open_unnamed(path: Root) -> Source:
    """Open rows whose columns have no names."""
    if isinstance(path, Remote):
        return NpzSource.open(path) if path.url.endswith(".npz") else open_remote(path)
    if path.is_dir():
        return ZarrSource.open(path)
    if path.suffix == ".npy":
        return NpySource.open(path)
    if path.suffix == ".npz":
        return NpzSource.open(path)
    raise InvalidInputError(
        f"{path} is neither a .npy, .npz or .parquet file, nor a folder of .parquet files, nor a Zarr store."
    )


def read_finite(source: Source, rows: slice) -> Rows:
    """Read some rows and raise with the number of the first that is not finite."""
    values = source.read(rows)
    require_finite(values, source.name, rows.start)
    return values


def sample(source: Source, rows: int) -> Rows:
    """Read about `rows` rows in sixteen runs, evenly spread over the source."""
    n = source.shape[0]
    run = max(1, rows // 16)
    if n <= rows:
        return read_finite(source, slice(0, n))
    starts = np.linspace(0, n - run, 16).astype(np.intp)
    return stacked([read_finite(source, slice(int(a), int(a) + run)) for a in starts])
