"""Scores of a finished output for their users, lazily or chunk by chunk; what is damaged is an error, not a value."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from dkfm.core.chunking import count_tiles
from dkfm.core.prefetch import prefetch
from dkfm.core.rows import Array
from dkfm.errors import DamagedStoreError, StoreError, reason
from dkfm.files.location import locate
from dkfm.scoring import completion, outputs
from dkfm.scoring.chunk_files import ZarrChunks, compute_checksum
from dkfm.scoring.outputs import Output
from dkfm.scoring.parquet_chunks import ParquetChunks
from dkfm.scoring.receipts import Receipt

if TYPE_CHECKING:
    import dask.array as da
    import dask.dataframe as dd
    import pandas as pd
    import pyarrow as pa

_TASKS = "dkfm-read"
"""What the dashboard calls the tasks that read scores."""


@dataclass(frozen=True)
class ChunkReader:
    """Scores (n, width) of a finished output, read by slices; what was lost, changed or replaced since is an error."""

    output: Output
    name: str
    shape: tuple[int, int]
    dtype: np.dtype[np.generic]
    checksums: npt.NDArray[np.uint32]
    """Of each chunk, as its receipt says."""
    ndim: ClassVar[int] = 2

    def __getitem__(self, places: tuple[slice, ...]) -> Array:
        output = self.output
        outputs.require_run(output.root, output.run)
        start, stop, _ = places[0].indices(self.shape[0])
        parts = []
        for number in range(start // output.chunk_rows, count_tiles(stop, output.chunk_rows)):
            first = output.slice(number).start
            parts.append(self._chunk(number)[max(0, start - first) : stop - first])
        rows = np.concatenate(parts) if parts else np.empty((0, self.shape[1]), self.dtype)
        return rows[:, places[1]] if len(places) > 1 else rows

    def _chunk(self, number: int) -> npt.NDArray[np.generic]:
        form = self.output.form
        assert isinstance(form, ZarrChunks)  # noqa: S101  # of arrays; this tells the type checker
        file = [columns.output for columns in form.columns].index(self.name)
        values = form.values(self.output.chunk(number), file, int(self.checksums[number]))
        if values is None:
            raise DamagedStoreError(f"Chunk {number} of {self.output.root} is lost, or not what was written.")
        return values


def open_scores(path: str | Path, output: str | None = None) -> "da.Array | dd.DataFrame":
    """Open a finished output lazily.

    Parameters
    ----------
    path : str or Path
        Or a URL.
    output : str, optional
        Which of several outputs of a Zarr store, by default the first; a table has them all.

    Returns
    -------
    dask.array.Array of shape (n, width), or dask.dataframe.DataFrame of n rows

    Raises
    ------
    StoreError
        Nothing there, not finished, or a chunk lost, cut short or without a receipt; when it is computed, a chunk
        whose bytes changed.

    Examples
    --------
    See `batch_score`.
    """
    found, receipts = completion.open_complete(locate(path))
    return _frame(found, receipts, output) if found.is_table else _array(found, receipts, output)


def _array(output: Output, receipts: dict[int, Receipt], name: str | None) -> "da.Array":
    import dask.array as da
    from dask.base import tokenize

    scores = _chunks(output, receipts, name)
    chunks, key = (output.chunk_rows, scores.shape[1]), f"{_TASKS}-{tokenize(scores)}"
    lazy: da.Array = da.from_array(scores, chunks=chunks, name=key, asarray=False)
    return lazy


def _chunks(output: Output, receipts: dict[int, Receipt], name: str | None) -> ChunkReader:
    names = [columns.output for columns in output.columns]
    file = names.index(_chosen(output, name))
    checksums = np.array([receipts[number].crc32c[file] for number in range(output.chunks)], np.uint32)
    columns = output.columns[file]
    return ChunkReader(output, columns.output, (output.rows, columns.width), np.dtype(columns.dtype), checksums)


def read_scores(output: Output, receipts: dict[int, Receipt], name: str, rows: slice) -> Array:
    """Read some rows (n, width) of one output, as open_scores would."""
    if not output.is_table:
        return _chunks(output, receipts, name)[rows, :]
    parts, read = [], _of_tables(output, name)
    for number in range(rows.start // output.chunk_rows, count_tiles(rows.stop, output.chunk_rows)):
        block, first = read(receipts[number])[0], output.slice(number).start
        parts.append(block[max(0, rows.start - first) : rows.stop - first])
    return np.concatenate(parts)


def _chosen(output: Output, name: str | None) -> str:
    names = [columns.output for columns in output.columns]
    if name is not None and name not in names:
        raise StoreError(f"{output.root} has no output {name!r}; it has {', '.join(names)}.")
    return names[0] if name is None else name


def _frame(output: Output, receipts: dict[int, Receipt], name: str | None) -> "dd.DataFrame":
    import dask.dataframe as dd

    if name is not None:
        raise StoreError(f"{output.root} is a table of all its outputs; choose among its columns.")
    starts = [output.slice(number).start for number in range(output.chunks)]
    first = _frame_of(receipts[0], output)
    frame: dd.DataFrame = dd.from_map(
        _frame_of,
        list(receipts.values()),
        output=output,
        meta=first.iloc[:0],
        divisions=[*starts, output.rows - 1],
        label=_TASKS,
    )
    return frame


def _frame_of(receipt: Receipt, output: Output) -> "pd.DataFrame":
    rows = output.slice(receipt.chunk)
    frame: pd.DataFrame = _table(output, receipt).to_pandas()
    return frame.set_axis(range(rows.start, rows.stop), axis=0)


def _table(output: Output, receipt: Receipt) -> "pa.Table":
    """Read the table of a chunk, once its file is seen to be the one of its receipt, and no larger than it says."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    outputs.require_run(output.root, output.run)
    form = output.form
    assert isinstance(form, ParquetChunks)  # noqa: S101  # of tables; this tells the type checker
    lost = f"Chunk {receipt.chunk} of {output.root} is lost, or not what was written"
    opened = output.place.open(form.files(receipt.chunk)[0], receipt.bytes)
    if opened is None:
        raise DamagedStoreError(f"{lost}.")
    try:
        with opened:
            if compute_checksum(opened)[:2] != (receipt.crc32c[0], receipt.bytes):
                raise DamagedStoreError(f"{lost}.")
            opened.seek(0)
            with pq.ParquetFile(opened) as table:
                if table.schema_arrow.names != form.names or table.metadata.num_rows != receipt.rows:
                    raise DamagedStoreError(f"{lost}.")
                return table.read()
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DamagedStoreError(f"{lost}: {reason(error)}.") from None


def iter_scores(path: str | Path, output: str | None = None) -> Iterator[tuple[Array, npt.NDArray[np.generic]]]:
    """Yield the scores of a finished output chunk by chunk, in order; while one is used the next is read.

    Parameters
    ----------
    path : str or Path
        Or a URL.
    output : str, optional
        Which output, by default the first.

    Yields
    ------
    block : ndarray of shape (m, width)
    rows : ndarray of shape (m,)
        The numbers of the rows in the input, or their ids.

    Raises
    ------
    StoreError
        What `open_scores` raises; a damaged chunk in its turn.

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
    found, receipts = completion.open_complete(locate(path))
    read = _of_tables(found, output) if found.is_table else _of_arrays(found, receipts, output)
    return prefetch(partial(read, receipts[number]) for number in range(found.chunks))


_Block: TypeAlias = tuple[Array, npt.NDArray[np.generic]]


def _of_arrays(output: Output, receipts: dict[int, Receipt], name: str | None) -> Callable[[Receipt], _Block]:
    chunks = _chunks(output, receipts, name)

    def read(receipt: Receipt) -> _Block:
        rows = output.slice(receipt.chunk)
        return chunks[rows, :], np.arange(rows.start, rows.stop)

    return read


def _of_tables(output: Output, name: str | None) -> Callable[[Receipt], _Block]:
    columns = {columns.output: columns for columns in output.columns}
    chosen = columns[_chosen(output, name)]
    ids = output.settings.get("id_column")

    def read(receipt: Receipt) -> _Block:
        table, rows = _table(output, receipt), output.slice(receipt.chunk)
        block = np.column_stack([table.column(column).to_numpy() for column in chosen.names])
        return block, np.arange(rows.start, rows.stop) if ids is None else table.column(ids).to_numpy()

    return read
