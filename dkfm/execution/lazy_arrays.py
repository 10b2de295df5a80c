"""Dask arrays and data frames through a model, lazily, with exact shape, chunks, dtype and index.

A small model travels in the graph as one key; a larger one is written once and opened by path in the workers.
"""

import uuid
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from dkfm.core.rows import Array, Rows, as_float64, as_rows
from dkfm.errors import InvalidInputError
from dkfm.execution.blas_threads import single_blas_thread
from dkfm.execution.model_cache import get_saved_scorer, get_scorer
from dkfm.files import local, temporary
from dkfm.kernels import serialization
from dkfm.kernels.base import Kernel
from dkfm.numerics.model import Model
from dkfm.numerics.scorer import Scorer, compute_finite_scores, kernel_distances, prepare_compact_scorer
from dkfm.storage.model_store import Record, save_record

if TYPE_CHECKING:
    import dask.array as da
    import dask.dataframe as dd

SMALL_MODEL = 5_000_000
"""Bytes up to which a model travels in the graph."""

F = TypeVar("F", bound=Callable[..., object])


def dashboard_name(name: str) -> Callable[[F], F]:
    """Let the dashboard call the tasks of a function so; which parameter does it depends on the version of dask."""

    def named(function: F) -> F:
        function.__name__ = name
        return function

    return named


class EmbeddedModel:
    """A model inside a graph, under its token."""

    def __init__(self, model: Model) -> None:
        self.token = uuid.uuid4().hex
        self._model = model

    def scorer(self) -> Scorer:
        """Return the prepared model, made once per process."""
        return get_scorer(self.token, lambda: prepare_compact_scorer(self._model))


class StoredModel:
    """A model in a store of its own, which lives as long as the estimator or a graph that needs it.

    Once it was sent to a worker it lives as long as this process: what is persisted there has no graph here.
    """

    def __init__(self, record: Record, workspace: str | Path | None) -> None:
        within = None if workspace is None else local.make_folder(local.local_path(workspace))
        folder = temporary.SharedPart("model", within, need=record.model.nbytes, what="The model for Dask's workers")
        self._remove = weakref.finalize(self, folder.remove)
        self.token = uuid.uuid4().hex
        self._path = str(folder.path / "model")
        self._digest = save_record(Path(self._path), record)
        self._trusted = serialization.function_paths(record.model.kernel)

    def __reduce__(self) -> tuple[type["_Opened"], tuple[str, str, tuple[str, ...]]]:
        # A copy on a worker must not remove the files when it goes, and may outlive what is here.
        self._remove.detach()
        return _Opened, (self._path, self._digest, self._trusted)

    def scorer(self) -> Scorer:
        """Return the prepared model, read once per process."""
        return get_saved_scorer(self._path, self._digest, self._trusted)


class _Opened:
    """A spilled model as a worker knows it: a path, a digest, and the user's functions in its kernel."""

    def __init__(self, path: str, digest: str, trusted: tuple[str, ...]) -> None:
        self._path, self._digest, self._trusted = path, digest, trusted

    def scorer(self) -> Scorer:
        """Return the prepared model, read once per process."""
        return get_saved_scorer(self._path, self._digest, self._trusted)


def model_for_graph(record: Record, workspace: str | Path | None) -> EmbeddedModel | StoredModel:
    """Return the model of a record in the form that suits its size, if its kernel can be written at all."""
    small = record.model.nbytes < SMALL_MODEL or not serialization.is_serializable(record.model.kernel)
    return EmbeddedModel(record.model) if small else StoredModel(record, workspace)


def transform_array(
    carried: EmbeddedModel | StoredModel, model: Model, name: str, Z: "da.Array", diagonal: object = None
) -> "da.Array":
    """Return one output of a model for a dask array of rows (n, d), as a lazy dask array (n, width).

    Row chunks stay as they are, unknown ones too. The rows of a block that is not finite raise when it is computed.
    `diagonal`, an array-like or dask array of shape (n,), holds k(z, z) where the kernel does not know it.
    """
    from dask.delayed import delayed

    _require_rows(Z, model.columns)
    shared = delayed(carried, name=f"dkfm-model-{carried.token}", traverse=False)
    known = () if diagonal is None else (_aligned(diagonal, Z)[:, np.newaxis],)
    scores: da.Array = Z.rechunk({1: -1}).map_blocks(
        _score_block,
        *known,
        carried=shared,
        head=name,
        chunks=(Z.chunks[0], (model.head(name).width,)),
        meta=np.empty((0, 0), model.head(name).dtype),
    )
    return scores


def transform_frame(
    carried: EmbeddedModel | StoredModel, model: Model, name: str, rows: "dd.DataFrame", columns: list[str]
) -> "dd.DataFrame":
    """Return one output of a model for a dask data frame of rows, lazily: `columns`, with its index and divisions."""
    import dask.dataframe as dd

    scores = transform_array(carried, model, name, rows.to_dask_array())
    frame: dd.DataFrame = dd.from_dask_array(scores, columns=columns, index=rows.index)
    return frame


def lazy_distances(kernel: Kernel, X: "da.Array", Y: Rows) -> "da.Array":
    """Return the `kernel_distances` between the rows of a dask array (n, d) and Y (m, d), lazily."""
    from dask.delayed import delayed

    _require_rows(X, Y.shape[1])
    shared = delayed((kernel, Y), name=f"dkfm-points-{uuid.uuid4().hex}", traverse=False)
    found: da.Array = X.rechunk({1: -1}).map_blocks(
        _block_distances,
        of=shared,
        dtype=np.float64,
        chunks=(X.chunks[0], (Y.shape[0],)),
        meta=np.empty((0, 0)),
    )
    return found


@dashboard_name("dkfm-distances")
def _block_distances(block: Array, *, of: tuple[Kernel, Rows]) -> Array:
    kernel, Y = of
    if block.shape[0] == 0:
        return np.empty((0, Y.shape[0]))
    with single_blas_thread():
        return kernel_distances(kernel, as_float64(as_rows(block, "a block of rows")), Y)


def _require_rows(X: "da.Array", d: int) -> None:
    if X.ndim != 2 or X.shape[1] != d:
        raise InvalidInputError(f"The dask array has shape {X.shape} and the model was fitted with {d} columns.")
    if X.dtype.kind not in "biuf":
        raise InvalidInputError(f"The dask array must hold real numbers, and its dtype is {X.dtype}.")


def _aligned(diagonal: object, Z: "da.Array") -> "da.Array":
    """Return k(z, z) of the rows of a dask array as a dask array (n,) with the same chunks."""
    import dask.array as da

    known = da.asarray(diagonal)
    if known.ndim != 1 or known.dtype.kind not in "biuf" or known.shape != Z.shape[:1]:
        raise InvalidInputError(f"diag must hold k(z, z), of shape {Z.shape[:1]}, and its shape is {known.shape}.")
    chunked: da.Array = known.rechunk(Z.chunks[:1])
    return chunked


@dashboard_name("dkfm-transform")
def _score_block(
    block: Array, diagonal: Array | None = None, *, carried: EmbeddedModel | StoredModel, head: str
) -> Array:
    what, scorer = "a block of rows", carried.scorer()
    if block.shape[0] == 0:
        found = scorer.model.head(head)
        return np.empty((0, found.width), found.dtype)
    rows = as_float64(as_rows(block, what))
    known = None if diagonal is None else diagonal[:, 0]
    with single_blas_thread():
        return compute_finite_scores(scorer, head, rows, what, diagonal=known)
