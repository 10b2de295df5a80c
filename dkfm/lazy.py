"""Dask arrays through a model, lazily, with exact shape, chunks and dtype.

A small model travels in the graph as one key; a larger one is written once and opened by path in the workers.
"""

import atexit
import shutil
import tempfile
import uuid
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dkfm import apply, store
from dkfm.errors import InvalidInputError
from dkfm.kernels import config
from dkfm.kernels.rows import Array, as_rows, double
from dkfm.model import Model
from dkfm.record import Record, save_record
from dkfm.workers import cached_scorer, saved_scorer, single_blas_thread

if TYPE_CHECKING:
    import dask.array as da

__all__ = ["SMALL_MODEL", "Carried", "Spilled", "carry", "transform"]

SMALL_MODEL = 5_000_000
"""Bytes up to which a model travels in the graph."""


class Carried:
    """A model inside a graph, under its token."""

    def __init__(self, model: Model) -> None:
        self.token = uuid.uuid4().hex
        self._model = model

    def scorer(self) -> apply.Scorer:
        """Return the prepared model, made once per process."""
        return cached_scorer(self.token, lambda: apply.prepare(self._model))


class Spilled:
    """A model in a store of its own, which lives as long as the estimator or a graph that needs it.

    Once it was sent to a worker it lives as long as this process: what is persisted there has no graph here.
    """

    def __init__(self, record: Record, workspace: str | Path | None) -> None:
        parent = None if workspace is None else store.local_path(workspace).absolute()
        with store.writing(parent or Path(tempfile.gettempdir())):
            if parent is not None:
                parent.mkdir(parents=True, exist_ok=True)
            folder = tempfile.mkdtemp(prefix="dkfm-model-", dir=parent)
        self._remove = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.token = uuid.uuid4().hex
        self._path = str(Path(folder) / "model")
        self._digest = save_record(Path(self._path), record)
        self._trusted = config.functions(record.model.kernel)

    def __reduce__(self) -> tuple[type["_Opened"], tuple[str, str, tuple[str, ...]]]:
        # A copy on a worker must not remove the files when it goes, and may outlive what is here.
        if self._remove.detach() is not None:
            atexit.register(shutil.rmtree, Path(self._path).parent, ignore_errors=True)
        return _Opened, (self._path, self._digest, self._trusted)

    def scorer(self) -> apply.Scorer:
        """Return the prepared model, read once per process."""
        return saved_scorer(self._path, self._digest, self._trusted)


class _Opened:
    """A spilled model as a worker knows it: a path, a digest, and the user's functions in its kernel."""

    def __init__(self, path: str, digest: str, trusted: tuple[str, ...]) -> None:
        self._path, self._digest, self._trusted = path, digest, trusted

    def scorer(self) -> apply.Scorer:
        """Return the prepared model, read once per process."""
        return saved_scorer(self._path, self._digest, self._trusted)


def carry(record: Record, workspace: str | Path | None) -> Carried | Spilled:
    """Return the model of a record in the form that suits its size, if its kernel can be written at all."""
    small = record.model.nbytes < SMALL_MODEL or not config.is_writable(record.model.kernel)
    return Carried(record.model) if small else Spilled(record, workspace)


def transform(
    carried: Carried | Spilled, model: Model, name: str, Z: "da.Array", diagonal: object = None
) -> "da.Array":
    """Return one output of a model for a dask array of rows (n, d), as a lazy dask array (n, width).

    Row chunks stay as they are, unknown ones too. The rows of a block that is not finite raise when it is computed.
    `diagonal`, an array-like or dask array of shape (n,), holds k(z, z) where the kernel does not know it.
    """
    from dask.delayed import delayed

    d = model.columns
    if Z.ndim != 2 or Z.shape[1] != d:
        raise InvalidInputError(f"The dask array has shape {Z.shape} and the model was fitted with {d} columns.")
    if Z.dtype.kind not in "biuf":
        raise InvalidInputError(f"The dask array must hold real numbers, and its dtype is {Z.dtype}.")
    shared = delayed(carried, name=f"dkfm-model-{carried.token}", traverse=False)
    known = () if diagonal is None else (_aligned(diagonal, Z)[:, np.newaxis],)
    scores: da.Array = Z.rechunk({1: -1}).map_blocks(
        _score_block,
        *known,
        carried=shared,
        head=name,
        head_width=model.head(name).width,
        dtype=np.float64,
        chunks=(Z.chunks[0], (model.head(name).width,)),
        meta=np.empty((0, 0)),
    )
    return scores


def _aligned(diagonal: object, Z: "da.Array") -> "da.Array":
    """Return k(z, z) of the rows of a dask array as a dask array (n,) with the same chunks."""
    import dask.array as da

    known = da.asarray(diagonal)
    if known.ndim != 1 or known.dtype.kind not in "biuf" or known.shape != Z.shape[:1]:
        raise InvalidInputError(f"diag must hold k(z, z), of shape {Z.shape[:1]}, and its shape is {known.shape}.")
    chunked: da.Array = known.rechunk(Z.chunks[:1])
    return chunked


def _score_block(
    block: Array, diagonal: Array | None = None, *, carried: Carried | Spilled, head: str, head_width: int
) -> Array:
    if block.shape[0] == 0:
        return np.empty((0, head_width))
    what = "a block of rows"
    rows, scorer = double(as_rows(block, what)), carried.scorer()
    known = None if diagonal is None else diagonal[:, 0]
    with single_blas_thread():
        return apply.finite_scores(scorer, head, rows, what, diagonal=known)
