"""Read the scores of a finished output, lazily or chunk by chunk; damaged chunks raise."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from dkfm.core.background_io import prefetch
from dkfm.core.chunking import split_by_chunk
from dkfm.core.rows import Array
from dkfm.errors import DamagedStoreError, StoreError, extract_reason
from dkfm.files.arrow_files import reopen_natively
from dkfm.files.location import locate
from dkfm.scoring import completion, output_store
from dkfm.scoring.formats.chunk_files import compute_checksum_and_size
from dkfm.scoring.formats.parquet_chunks import ParquetChunks, ids_to_numpy, to_pandas_exactly
from dkfm.scoring.formats.zarr_chunks import ZarrChunks
from dkfm.scoring.marker import ReceiptTable
from dkfm.scoring.output_store import Output
from dkfm.scoring.receipts import ChunkReceipt

if TYPE_CHECKING:
    import dask.array as da
    import dask.dataframe as dd
    import pandas as pd
    import pyarrow as pa

_TASK_NAME = "dkfm-read"
"""Name of the reading tasks on Dask's dashboard."""


@dataclass(frozen=True)
class ScoresArray:
    """Scores of a finished output, read by slices; chunks that were lost, changed or replaced raise.

    Attributes
    ----------
    output : Output
        The output.
    output_name : str
        Name of the output of the model.
    shape : tuple of int
        Rows and columns (n, width).
    dtype : dtype
        Dtype of the scores.
    checksums : ndarray of uint32, shape (chunks,)
        Checksum of each chunk, from its receipt.
    """

    output: Output
    output_name: str
    shape: tuple[int, int]
    dtype: np.dtype[np.generic]
    checksums: npt.NDArray[np.uint32]
    ndim: ClassVar[int] = 2

    def __getitem__(self, index: tuple[slice | int, ...]) -> Array:
        output = self.output
        output_store.require_not_replaced(output.root, output.creation_id)
        # Dask passes the steps and the numbers of its own slices on.
        numbers = range(self.shape[0])[index[0] if isinstance(index[0], slice) else slice(index[0], index[0] + 1)]
        first, *_, last = sorted([numbers[0], numbers[-1]]) if numbers else (0, -1)
        spans = split_by_chunk(first, last + 1, output.chunk_rows)
        parts = [self._read_chunk(number)[part] for number, part in spans]
        rows = np.concatenate(parts)[:: numbers.step] if parts else np.empty((0, self.shape[1]), self.dtype)
        return (rows if isinstance(index[0], slice) else rows[0])[(..., *index[1:])]

    def _read_chunk(self, number: int) -> npt.NDArray[np.generic]:
        chunk_format = self.output.format
        assert isinstance(chunk_format, ZarrChunks)  # noqa: S101  # for the type checker
        file = [columns.output for columns in chunk_format.columns].index(self.output_name)
        values = chunk_format.read_values(self.output.chunk(number), file, int(self.checksums[number]))
        if values is None:
            raise _make_lost_chunk_error(self.output, number)
        return values


def _make_lost_chunk_error(output: Output, number: int, reason: str = "") -> DamagedStoreError:
    return DamagedStoreError(f"Chunk {number} of {output.root} is lost, or not what was written{reason}.")


def open_scores(path: str | Path, output: str | None = None) -> "da.Array | dd.DataFrame":
    """Open a finished output lazily.

    Parameters
    ----------
    path : str or Path
        Path or URL of the output.
    output : str, optional
        Name of the output of the model in a Zarr store, by default the first. A Parquet output is read with the columns
        of all its outputs.

    Returns
    -------
    dask.array.Array of shape (n, width), or dask.dataframe.DataFrame of n rows
        The scores: an array for a Zarr store, a data frame for Parquet. Integer ids of a chunk with nulls have pandas'
        nullable integer dtype. Predicted classes are codes in an array, and labels in a data frame.

    Raises
    ------
    StoreError
        There is no output, it is not finished, or a chunk is lost, truncated or without a receipt. The files are only
        listed; a chunk whose bytes changed raises when it is computed.

    Examples
    --------
    See `batch_score`.
    """
    scores, receipts = completion.open_complete(locate(path))
    return _lazy_frame(scores, receipts, output) if scores.is_table else _lazy_array(scores, receipts, output)


def _lazy_array(output: Output, receipts: ReceiptTable, name: str | None) -> "da.Array":
    import dask.array as da
    from dask.base import tokenize

    scores = _make_scores_array(output, receipts, name)
    chunks, key = (output.chunk_rows, scores.shape[1]), f"{_TASK_NAME}-{tokenize(scores)}"
    lazy: da.Array = da.from_array(scores, chunks=chunks, name=key, asarray=False)
    return lazy


def _make_scores_array(output: Output, receipts: ReceiptTable, name: str | None) -> ScoresArray:
    names = [columns.output for columns in output.columns]
    file = names.index(_resolve_output_name(output, name))
    columns, checksums = output.columns[file], receipts.crc32c[:, file]
    return ScoresArray(output, columns.output, (output.rows, columns.width), np.dtype(columns.dtype), checksums)


def read_score_rows(output: Output, receipts: ReceiptTable, name: str, rows: slice) -> Array:
    """Read some rows (n, width) of one output of the model."""
    if not output.is_table:
        return _make_scores_array(output, receipts, name)[rows, :]
    read = _make_parquet_block_reader(output, name)
    parts = split_by_chunk(rows.start, rows.stop, output.chunk_rows)
    return np.concatenate([read(receipts[number])[0][part] for number, part in parts])


def read_id_rows(output: Output, receipts: ReceiptTable, rows: slice) -> "pa.Array":
    """Read the ids (n,) of some rows."""
    import pyarrow as pa

    def read(number: int) -> "pa.Array":
        if not output.is_table:
            return pa.array(_read_ids(output, receipts[number]))
        return _read_table(output, receipts[number]).column(output.settings["id_column"]).combine_chunks()

    parts = split_by_chunk(rows.start, rows.stop, output.chunk_rows)
    return pa.concat_arrays([read(number)[part] for number, part in parts])


def _resolve_output_name(output: Output, name: str | None) -> str:
    """Return the checked name of an output, by default of the first; raise a StoreError if there is no such output."""
    names = [columns.output for columns in output.columns]
    if name is not None and name not in names:
        raise StoreError(f"{output.root} has no output {name!r}; it has {', '.join(names)}.")
    return names[0] if name is None else name


def _lazy_frame(output: Output, receipts: ReceiptTable, name: str | None) -> "dd.DataFrame":
    import dask.dataframe as dd

    if name is not None:
        raise StoreError(f"{output.root} is a table of all its outputs; choose among its columns.")
    divisions = [*range(0, output.rows, output.chunk_rows), output.rows - 1]
    first = _read_frame(receipts[0], output)
    frame: dd.DataFrame = dd.from_map(
        _read_frame, receipts, output=output, meta=first.iloc[:0], divisions=divisions, label=_TASK_NAME
    )
    return frame


def _read_frame(receipt: ChunkReceipt, output: Output) -> "pd.DataFrame":
    rows = output.chunk_slice(receipt.chunk)
    table = _read_table(output, receipt)
    chunk_format, may_have_nulls = _parquet_chunks(output), output.settings["on_invalid"] == "nan"
    frame: pd.DataFrame = table.to_pandas(use_threads=False)  # see `arrow_files`
    for columns in chunk_format.columns:  # pandas would convert integers with nulls to floats
        for name in columns.names if columns.has_codes else []:
            column = table.column(name)
            if chunk_format.find_labels(columns) is None:
                frame[name] = chunk_format.read_scores(column, columns)
            else:
                frame[name] = to_pandas_exactly(column, nullable=may_have_nulls)  # one dtype for all chunks
    if (ids := output.settings.get("id_column")) is not None:
        frame[ids] = to_pandas_exactly(table.column(ids))
    return frame.set_axis(range(rows.start, rows.stop), axis=0)


def _parquet_chunks(output: Output) -> ParquetChunks:
    chunk_format = output.format
    assert isinstance(chunk_format, ParquetChunks)  # noqa: S101  # for the type checker
    return chunk_format


def _read_table(output: Output, receipt: ChunkReceipt) -> "pa.Table":
    """Verify the size and checksum of a chunk's file, and read its table."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    output_store.require_not_replaced(output.root, output.creation_id)
    chunk_format = _parquet_chunks(output)
    opened = output.output_location.open_for_reading(chunk_format.file_names(receipt.chunk)[0], receipt.bytes)
    if opened is None:
        raise _make_lost_chunk_error(output, receipt.chunk)
    try:
        with opened:
            if compute_checksum_and_size(opened) != (receipt.file_checksums[0], receipt.bytes):
                raise _make_lost_chunk_error(output, receipt.chunk)
            opened.seek(0)
            with reopen_natively(opened) as file, pq.ParquetFile(file, pre_buffer=False) as table:
                schema = table.schema_arrow
                is_of_output = schema.names == chunk_format.names and chunk_format.has_types(schema)
                if not is_of_output or table.metadata.num_rows != receipt.rows:
                    raise _make_lost_chunk_error(output, receipt.chunk)
                return table.read(use_threads=False)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise _make_lost_chunk_error(output, receipt.chunk, f": {extract_reason(error)}") from None


def iter_scores(path: str | Path, output: str | None = None) -> Iterator[tuple[Array, npt.NDArray[np.generic]]]:
    """Yield the scores of a finished output chunk by chunk, in order; the next chunk is prefetched.

    Parameters
    ----------
    path : str or Path
        Path or URL of the output.
    output : str, optional
        Name of the output of the model, by default the first.

    Yields
    ------
    block : ndarray of shape (m, width)
        Scores of the rows of a chunk. Predicted classes are codes: positions in `classes_`, -1 for a row without a
        score.
    rows : ndarray of shape (m,)
        Numbers of these rows in the input, or their ids if the output has an id column. Integer ids with nulls are an
        array of objects.

    Raises
    ------
    StoreError
        As for `open_scores`; a damaged chunk raises when it is reached.

    Examples
    --------
    >>> import dkfm, numpy as np, tempfile
    >>> from sklearn.linear_model import SGDClassifier
    >>> X = np.random.default_rng(0).normal(size=(300, 5))
    >>> y = (X[:, 0] > 0).astype(int)
    >>> classifier = SGDClassifier()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     phi = dkfm.ExactFeatureMap(dkfm.kernels.Gaussian(3.0)).fit(X[:100])
    ...     report = dkfm.batch_score(phi, X, folder + "/features.zarr", progress=False)
    ...     for block, rows in dkfm.iter_scores(folder + "/features.zarr"):
    ...         classifier = classifier.partial_fit(block, y[rows], classes=[0, 1])
    >>> classifier.coef_.shape
    (1, 100)
    """
    scores, receipts = completion.open_complete(locate(path))
    if scores.is_table:
        read = _make_parquet_block_reader(scores, output)
    else:
        read = _make_zarr_block_reader(scores, receipts, output)
    return prefetch(partial(read, receipts[number]) for number in range(scores.n_chunks))


_Block: TypeAlias = tuple[Array, npt.NDArray[np.generic]]


def _make_zarr_block_reader(
    output: Output, receipts: ReceiptTable, name: str | None
) -> Callable[[ChunkReceipt], _Block]:
    """Return a function that reads the chunk of a receipt from a Zarr store: its scores, and its row numbers or ids."""
    chunks = _make_scores_array(output, receipts, name)

    def read(receipt: ChunkReceipt) -> _Block:
        rows = output.chunk_slice(receipt.chunk)
        numbers = np.arange(rows.start, rows.stop) if output.ids is None else _read_ids(output, receipt)
        return chunks[rows, :], numbers

    return read


def _read_ids(output: Output, receipt: ChunkReceipt) -> npt.NDArray[np.generic]:
    """Return the ids of a chunk of a Zarr store."""
    chunk_format = output.format
    assert isinstance(chunk_format, ZarrChunks)  # noqa: S101  # for the type checker
    ids = chunk_format.read_ids(output.chunk(receipt.chunk), receipt.file_checksums[-1], receipt.bytes)
    if ids is None:
        raise _make_lost_chunk_error(output, receipt.chunk)
    return ids


def _make_parquet_block_reader(output: Output, name: str | None) -> Callable[[ChunkReceipt], _Block]:
    """Return a function that reads the chunk of a receipt from Parquet: its scores, and its row numbers or ids."""
    columns = {columns.output: columns for columns in output.columns}
    selected = columns[_resolve_output_name(output, name)]
    chunk_format, ids = _parquet_chunks(output), output.settings.get("id_column")

    def read(receipt: ChunkReceipt) -> _Block:
        table, rows = _read_table(output, receipt), output.chunk_slice(receipt.chunk)
        try:
            scores = [chunk_format.read_scores(table.column(column), selected) for column in selected.names]
        except ValueError as error:  # a label that is no class
            raise _make_lost_chunk_error(output, receipt.chunk, f": {extract_reason(error)}") from None
        return np.column_stack(scores), np.arange(rows.start, rows.stop) if ids is None else ids_to_numpy(
            table.column(ids)
        )

    return read
