"""Write the blocks of a dask collection to a folder, one task per block, and read them as one source of rows."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dkfm.core.chunking import split_by_part
from dkfm.core.frames import column_names
from dkfm.core.rows import Array, as_float64, as_rows_allow_nonfinite
from dkfm.errors import InvalidInputError
from dkfm.files.local import open_plain, translate_write_errors
from dkfm.sources.base import DenseRows
from dkfm.sources.memory import open_frame
from dkfm.sources.npy import NpySource, save_npy

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class WrittenBlock:
    """Facts that a task returns about a block that it wrote.

    Attributes
    ----------
    rows, n_columns : int
        Rows and columns of the block; 0 if nothing was written.
    digest : str
        SHA-256 digest of values and ids.
    id_type : str
        Arrow type of the ids, as text; empty if there are none.
    """

    rows: int = 0
    n_columns: int = 0
    digest: str = ""
    id_type: str = ""


@dataclass(frozen=True)
class BlockRows(DenseRows):
    """Rows of blocks in a folder, one after the other."""

    location: Path
    _: KW_ONLY
    first_rows: tuple[int, ...]
    """First row of each block, and at the end the number of all rows."""
    content_digest: str
    """Digest of all values and ids, which identifies the input when it is computed again."""

    def stamp(self, *, include_ctime: bool = False) -> str:  # only this job writes the folder
        """Return the digest of all values; raise an InvalidInputError if this process does not see the folder."""
        if not (self.location / block_name(self._first_nonempty_block)).is_file():
            raise InvalidInputError(f"There is no {self.location}, where the rows of {self.name} are.")
        return self.content_digest

    def is_opening_valid(self, current_stamp: str) -> bool:
        """Return True: only this job writes the folder."""
        return True

    def read(self, rows: slice) -> Array:
        """Return some rows."""
        parts = [
            NpySource.open(self.location / block_name(number)).with_float32_preserved().read(part)
            for number, part in self._split(rows)
        ]
        values = parts[0] if len(parts) == 1 else np.concatenate([np.empty((0, self.shape[1]), np.float32), *parts])
        return values if self.keep_float32 else values.astype(np.float64, copy=False)

    @property
    def _first_nonempty_block(self) -> int:
        """Number of the first block that has rows."""
        return int(np.searchsorted(self.first_rows, 0, side="right")) - 1

    def _split(self, rows: slice) -> list[tuple[int, slice]]:
        """Return the blocks that contain some rows, each with its part of them as a slice."""
        start, stop, _ = rows.indices(self.shape[0])
        return list(split_by_part(start, stop, self.first_rows))


@dataclass(frozen=True, kw_only=True)
class FrameBlockRows(BlockRows):
    """Rows of named columns of blocks in a folder, and their ids."""

    columns: tuple[str, ...]
    """Names of the columns that are read."""
    id_column: str | None

    def read_ids(self, rows: slice) -> "pa.Array":
        """Return the ids of some rows; raise an InvalidInputError if there is no id column."""
        import pyarrow as pa

        if self.id_column is None:
            raise InvalidInputError(f"{self.name} was opened without ids; name their column with id_column=.")
        parts = []
        for number, part in self._split(rows) or [(self._first_nonempty_block, slice(0))]:  # no ids have a type too
            with open_plain(self.location / _ids_name(number)) as file:
                parts.append(pa.ipc.open_stream(file).read_all().column(0).combine_chunks()[part])
        return pa.concat_arrays(parts)

    def find_file_with_missing_ids(self) -> None:
        """Return None, because the tasks that read the rows check this."""


def write_block(
    block: object, folder: str, number: int, name: str, columns: Sequence[str] | None, id_column: str | None
) -> WrittenBlock:
    """Write a block of rows, an array or a data frame, to a folder that every task and the driver see.

    Nothing is written for a block without rows.

    Raises
    ------
    InvalidInputError
        The folder is not there, or the block does not contain rows of numbers.
    """
    if not Path(folder).is_dir():
        raise InvalidInputError(f"There is no {folder} on this worker; name a folder that all workers see in TMPDIR.")
    if len(getattr(block, "shape", ())) == 2 and block.shape[0] == 0:  # type: ignore[attr-defined]  # it has a shape
        return WrittenBlock()
    rows, ids = _extract_rows_and_ids(block, name, columns, id_column)
    digest = hashlib.sha256(f"{rows.shape} {rows.dtype}".encode())
    digest.update(np.ascontiguousarray(rows).data)
    with _new_file(Path(folder) / block_name(number)) as path:
        save_npy(path, rows)
    if ids is None:
        return WrittenBlock(rows.shape[0], rows.shape[1], digest.hexdigest())
    encoded = _encode_ids(ids)
    digest.update(encoded)
    with _new_file(Path(folder) / _ids_name(number)) as path:
        path.write_bytes(encoded)
    return WrittenBlock(rows.shape[0], rows.shape[1], digest.hexdigest(), str(ids.type))


def _extract_rows_and_ids(
    block: object, name: str, columns: Sequence[str] | None, id_column: str | None
) -> "tuple[Array, pa.Array | None]":
    """Return the dense rows of a block, and their ids if there are any."""
    names = column_names(block, name)
    source = None if names is None else open_frame(block, names, name, columns, id_column)
    rows = as_float64(as_rows_allow_nonfinite(block, name)) if source is None else source.array
    if not isinstance(rows, np.ndarray):
        raise InvalidInputError(f"The blocks of {name} are sparse, and must be dense; save the rows in a .npz.")
    return rows, None if source is None else source.ids


def _encode_ids(ids: "pa.Array") -> memoryview:
    """Return ids as a stream of Arrow."""
    import pyarrow as pa

    with (sink := pa.BufferOutputStream()), pa.ipc.new_stream(sink, pa.schema([("ids", ids.type)])) as writer:
        writer.write_table(pa.table([ids], ["ids"]))
    return memoryview(sink.getvalue())


@contextmanager
def _new_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path, and rename its file to `path` at the end, because a task may run twice."""
    with translate_write_errors(path):
        partial = path.with_name(f"{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
        yield partial
        partial.replace(path)


def block_name(number: int) -> str:
    """Return the name of the file of a block.

    >>> block_name(7)
    '000007.npy'
    """
    return f"{number:06d}.npy"


def _ids_name(number: int) -> str:
    return f"{number:06d}.arrow"
