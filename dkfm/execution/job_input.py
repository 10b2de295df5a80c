"""Open any input of a job, and write rows that only this process holds to files for the workers of a cluster.

Blocks of a dask collection are not gathered: a task computes a block and writes it to a temporary folder, and the
driver receives only its size and a digest.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dkfm.core import cpus
from dkfm.core.display.quantities import format_names
from dkfm.core.frames import (
    column_names,
    convert_container,
    describe_known_names,
    is_dask_array,
    is_dask_collection,
    validate_columns_argument,
)
from dkfm.core.rows import Rows
from dkfm.errors import ClusterError, DkfmError, InvalidInputError, extract_reason
from dkfm.execution.stage_log import log_stage
from dkfm.files import temporary_folders
from dkfm.files.local import translate_write_errors
from dkfm.sources.base import Source
from dkfm.sources.blocks import BlockRows, FrameBlockRows, WrittenBlock, block_name, write_block
from dkfm.sources.memory import FrameSource, MemorySource
from dkfm.sources.npy import NpySource, save_npy
from dkfm.sources.opening import open_source, warn_of_nonstring_columns
from dkfm.sources.zarr import CsrCopySource
from dkfm.storage import csr
from dkfm.storage.zarr_store import new_store

if TYPE_CHECKING:
    from distributed import Client


@contextmanager
def open_input(
    data: object,
    name: str,
    client: "Client | None",
    *,
    columns: Sequence[str] | None = None,
    id_column: str | None = None,
    fitted_columns: Sequence[str] | None = None,
) -> Iterator[Source]:
    """Yield a source of the rows of any input of `open_source`, or of a dask array or data frame.

    Parameters
    ----------
    data : object
        Input of `open_source`, a dask array, a dask data frame, or a DataArray that holds a dask array.
    name : str
        Name of an array or a data frame in messages.
    client : distributed.Client, optional
        Client of the cluster that computes a collection; None for threads of this process.
    columns : sequence of str, optional
        Names of the columns to read, in this order.
    id_column : str, optional
        Name of the column that contains the ids of the rows.
    fitted_columns : sequence of str, optional
        Names of the columns to read if `columns` is None; ignored if the columns of `data` have no names.

    Raises
    ------
    InvalidInputError
        As for `open_source`; or a block of the collection cannot be computed.
    ClusterError
        Workers died, or this process does not see the files that they wrote.
    """
    collection: Any = convert_container(data)
    if not is_dask_collection(collection):
        yield open_source(data, name, columns=columns, id_column=id_column, fitted_columns=fitted_columns)
        return
    names: tuple[str, ...] | None = None
    if is_dask_array(collection):
        if columns is not None or id_column is not None:
            raise InvalidInputError(f"columns and id_column name columns of tables, and {name} is a dask array.")
        blocks, need = _split_array(collection, name)
    else:
        names = _select_names(collection, name, columns, id_column, fitted_columns)
        blocks, need = collection.to_delayed(), 0
    with temporary_folders.open_temporary_folder("rows", need=need, what="The rows of the dask collection") as folder:
        log_stage("input", f"{len(blocks):,} blocks of {name} computed and written to {folder}", blocks=len(blocks))
        written = _compute_and_write_blocks(blocks, folder, name, client, names, id_column)
        yield _make_block_source(written, folder, name, names, id_column)


@contextmanager
def ensure_rows_on_disk(rows: Source, client: "Client | None") -> Iterator[Source]:
    """Yield the rows; write those in memory to disk if the workers of a cluster must read them."""
    if client is None or not isinstance(rows, MemorySource):
        yield rows
        return
    array = rows.array
    parts = [array] if isinstance(array, np.ndarray) else [array.data, array.indices, array.indptr]
    need = sum(part.nbytes for part in parts)
    with temporary_folders.open_temporary_folder("rows", need=need, what="The rows for the workers") as folder:
        if isinstance(rows, FrameSource) and rows.id_column is not None:
            with translate_write_errors(folder):
                rows.write_parquet(folder / "rows.parquet")
            copy: Any = open_source(folder / "rows.parquet", columns=rows.columns, id_column=rows.id_column)
        else:
            copy = write_rows(array, folder / "rows")
        yield replace(copy, given_name=rows.name)


def write_rows(rows: Rows, path: Path) -> Source:
    """Write rows to a new .npy file, or CSR rows to a store, and return a source that reads them."""
    with translate_write_errors(path):
        if isinstance(rows, np.ndarray):
            save_npy(path, rows)
            return NpySource.open(path)
        with new_store(path, "rows", {}, csr.array_names("rows")) as group:
            csr.write_csr(group, "rows", rows)
    source = MemorySource(rows)
    return CsrCopySource(path, source.shape, source.float64s_per_row, source.max_nnz_per_row_window, "rows")


def _split_array(X: Any, name: str) -> tuple[list[Any], int]:
    """Return the blocks of all columns of a dask array, as delayed values, and their size in bytes if it is known."""
    if len(X.shape) != 2:
        raise InvalidInputError(f"{name} must have two dimensions, and its shape is {X.shape}.")
    rows = X if len(X.chunks[1]) == 1 else X.rechunk({1: -1})
    size = 8 * X.shape[0] * X.shape[1]
    return list(rows.to_delayed()[:, 0]), 0 if math.isnan(size) else int(size)


def _select_names(
    frame: Any, name: str, columns: Sequence[str] | None, id_column: str | None, fitted: Sequence[str] | None
) -> tuple[str, ...] | None:
    """Return the names of the columns of a dask data frame to read; None if its column names are numbers."""
    if getattr(frame, "ndim", 0) != 2 or not hasattr(frame, "to_delayed"):
        raise InvalidInputError(f"{name} must be a dask array or data frame, and is {type(frame).__name__}.")
    known = column_names(frame, name)
    if known is None:
        if columns is not None or id_column is not None:
            raise InvalidInputError(f"The columns of {name} are called by numbers; call them by text to name some.")
        warn_of_nonstring_columns(frame, name, fitted)
        return None
    requested = validate_columns_argument(fitted if columns is None else columns)
    index = "index" if frame.index.name is None else str(frame.index.name)
    selected = tuple(column for column in known if column != id_column) if requested is None else requested
    ids = () if id_column in (None, index) else (id_column,)
    if absent := [column for column in (*selected, *ids) if column not in known]:
        raise InvalidInputError(f"{name} has no {format_names(absent)}; {describe_known_names(absent, known)}.")
    return selected


def _make_block_source(
    written: Sequence[WrittenBlock], folder: Path, name: str, names: tuple[str, ...] | None, id_column: str | None
) -> Source:
    """Return a source of the rows of all blocks in a folder."""
    columns = {block.n_columns for block in written if block.rows}
    id_types = {block.id_type for block in written if block.rows}
    if len(columns) != 1:
        raise InvalidInputError(f"{name} needs at least one row, and the same columns in all blocks.")
    if len(id_types) != 1:
        raise InvalidInputError(f"The ids of {name} are {' and '.join(sorted(id_types))}; give them one type.")
    if not all((folder / block_name(number)).is_file() for number, block in enumerate(written) if block.rows):
        raise ClusterError(f"{folder} is not what the workers have written to; set TMPDIR to a folder that all see.")
    first_rows = tuple(accumulate((block.rows for block in written), initial=0))
    content = hashlib.sha256(" ".join(block.digest for block in written).encode()).hexdigest()
    arguments: dict[str, Any] = {"given_name": name, "first_rows": first_rows, "content_digest": content}
    shape = first_rows[-1], columns.pop()
    if names is None:
        return BlockRows(folder, shape, **arguments)
    return FrameBlockRows(folder, shape, columns=names, id_column=id_column, **arguments)


def _compute_and_write_blocks(
    blocks: list[Any],
    folder: Path,
    name: str,
    client: "Client | None",
    names: tuple[str, ...] | None,
    id_column: str | None,
) -> tuple[WrittenBlock, ...]:
    """Compute and write each block in a task; return the results of the tasks."""
    from dask.base import compute
    from dask.delayed import delayed

    write = delayed(write_block, pure=False)
    tasks = [
        write(block, str(folder), number, name, names, id_column, dask_key_name=f"dkfm-input-{folder.name}-{number}")
        for number, block in enumerate(blocks)
    ]
    try:
        with ThreadPoolExecutor(cpus.COUNT, "dkfm-input") as pool:  # waits at the end for running tasks
            scheduler = {"scheduler": "threads", "pool": pool} if client is None else {"scheduler": client}
            written: tuple[WrittenBlock, ...] = compute(*tasks, **scheduler)
    except DkfmError:
        raise
    except Exception as error:  # the graph is user code
        of_cluster = type(error).__module__.startswith("distributed")
        reason = f"{type(error).__name__}: {extract_reason(error)}"
        raise (ClusterError if of_cluster else InvalidInputError)(f"{name} cannot be computed ({reason}).") from error
    return written
