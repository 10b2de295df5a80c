"""Apply a model to Dask arrays and data frames lazily, with exact shape, chunks, dtype and index.

A small model is one key of the graph. A larger one is written to disk once, and workers open it by its path.
"""

import uuid
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np

from dkfm.core.rows import Array, Rows, as_float64, as_rows
from dkfm.errors import InvalidInputError
from dkfm.execution.blas_threads import single_blas_thread
from dkfm.execution.model_cache import get_saved_scorer, get_scorer
from dkfm.files import local, temporary_folders
from dkfm.kernels import serialization
from dkfm.kernels.base import Kernel
from dkfm.numerics.model import Model
from dkfm.numerics.scorer import Scorer, compute_finite_scores, kernel_distances, prepare_compact_scorer
from dkfm.storage.model_store import Record, save_record

if TYPE_CHECKING:
    import dask.array as da
    import dask.dataframe as dd
    import pandas as pd
    from dask.delayed import Delayed

SMALL_MODEL = 5_000_000
"""Bytes below which a model is part of the graph."""

SharedModel: TypeAlias = "EmbeddedModel | TemporaryModelStore"
"""Model of a graph, which its tasks share."""
F = TypeVar("F", bound=Callable[..., object])


def set_dashboard_name(name: str) -> Callable[[F], F]:
    """Decorate a function so that Dask's dashboard shows its tasks under `name`.

    Dask has a parameter for it, but its name depends on the version.
    """

    def rename(function: F) -> F:
        function.__name__ = name
        return function

    return rename


class EmbeddedModel:
    """Hold a model inside a graph.

    Attributes
    ----------
    token : str
        Unique name of the model.
    """

    def __init__(self, model: Model) -> None:
        self.token = uuid.uuid4().hex
        self._model = model

    def scorer(self) -> Scorer:
        """Return the prepared model; a process prepares it once."""
        return get_scorer(self.token, lambda: prepare_compact_scorer(self._model))


class _TemporaryModelReference:
    """Refer to a stored model on a worker by path, digest, and the user's functions that its kernel may import."""

    def __init__(self, path: str, digest: str, trusted: tuple[str, ...], streams_weights: bool) -> None:
        self._path, self._digest, self._trusted, self._streams_weights = path, digest, trusted, streams_weights

    def scorer(self) -> Scorer:
        """Return the prepared model; a process reads it once."""
        return get_saved_scorer(self._path, self._digest, self._trusted, self._streams_weights)


class TemporaryModelStore(_TemporaryModelReference):
    """Keep a model in a temporary store, for as long as an estimator or a graph refers to it.

    After it was sent to a worker, the store lives as long as this process, because results persisted on the cluster may
    need it although no graph in this process refers to it.

    Attributes
    ----------
    token : str
        Unique name of the model.
    """

    def __init__(self, record: Record, workspace: str | Path | None) -> None:
        root = None if workspace is None else local.make_folder(local.as_local_path(workspace))
        folder = temporary_folders.TemporarySubfolder(
            "model", root, need=record.model.total_nbytes, what="The model for Dask's workers"
        )
        self._remove = weakref.finalize(self, folder.remove)
        self.token = uuid.uuid4().hex
        path = folder.path / "model"
        super().__init__(
            str(path),
            save_record(path, record),
            serialization.function_paths(record.model.kernel),
            record.model.n_stored_head_elements > 0,  # stream weights that stayed on disk in this process too
        )

    def __reduce__(self) -> tuple[type[_TemporaryModelReference], tuple[str, str, tuple[str, ...], bool]]:
        # A copy on a worker may outlive this object, and must not remove the files when it is garbage collected.
        self._remove.detach()
        return _TemporaryModelReference, (self._path, self._digest, self._trusted, self._streams_weights)


def model_for_graph(record: Record, workspace: str | Path | None) -> SharedModel:
    """Return the model of a record for use in a graph: embedded if it is small or its kernel cannot be saved."""
    small = record.model.nbytes < SMALL_MODEL or not serialization.is_serializable(record.model.kernel)
    return EmbeddedModel(record.model) if small else TemporaryModelStore(record, workspace)


def score_array(
    shared_model: SharedModel, model: Model, output_name: str, Z: "da.Array", diagonal: object = None
) -> "da.Array":
    """Return one output of a model for a dask array of rows (n, d), as a lazy dask array (n, width).

    Row chunks stay the same, unknown ones too. A block with values that are not finite raises when it is computed.
    `diagonal`, an array-like or dask array of shape (n,), holds k(z, z) if the kernel cannot compute it.
    """
    _require_shape_and_dtype(Z, model.n_features_in)
    shared = _share_in_graph(shared_model)
    known = () if diagonal is None else (_rechunk_diagonal(diagonal, Z)[:, np.newaxis],)
    scores: da.Array = Z.rechunk({1: -1}).map_blocks(
        _score_block,
        *known,
        shared_model=shared,
        output_name=output_name,
        chunks=(Z.chunks[0], (model.head(output_name).width,)),
        meta=np.empty((0, 0), model.head(output_name).output_dtype),
    )
    return scores


def score_frame(
    shared_model: SharedModel, model: Model, output_name: str, rows: "dd.DataFrame", columns: list[str]
) -> "dd.DataFrame":
    """Return one output of a model for a dask data frame, as a lazy frame with `columns` and the same index."""
    import pandas as pd

    _require_numeric_columns(rows)
    dtype = model.head(output_name).output_dtype
    meta = pd.DataFrame(np.empty((0, len(columns)), dtype), rows._meta.index, columns)
    shared = _share_in_graph(shared_model)
    # Not through a dask array, because graph optimization may give its blocks and those of the index different numbers.
    frame: dd.DataFrame = rows.map_partitions(
        _score_partition, shared=shared, output_name=output_name, columns=columns, meta=meta, enforce_metadata=False
    )
    return frame


def _share_in_graph(shared_model: SharedModel) -> "Delayed":
    """Return one key of a graph that stands for a model in all its tasks.

    Its name sorts after those of the tasks, because `dask.optimize` takes the first keys for the partitions of a frame.
    """
    from dask.delayed import delayed

    shared: Delayed = delayed(shared_model, name=f"dkfm-transform-model-{shared_model.token}", traverse=False)
    return shared


def lazy_distances(kernel: Kernel, X: "da.Array", Y: Rows) -> "da.Array":
    """Return the `kernel_distances` between the rows of a dask array (n, d) and Y (m, d), lazily."""
    from dask.delayed import delayed

    _require_shape_and_dtype(X, Y.shape[1])
    shared = delayed((kernel, Y), name=f"dkfm-points-{uuid.uuid4().hex}", traverse=False)
    distances: da.Array = X.rechunk({1: -1}).map_blocks(
        _kernel_distances_of_block,
        kernel_and_rows=shared,
        dtype=np.float64,
        chunks=(X.chunks[0], (Y.shape[0],)),
        meta=np.empty((0, 0)),
    )
    return distances


@set_dashboard_name("dkfm-distances")
def _kernel_distances_of_block(block: Array, *, kernel_and_rows: tuple[Kernel, Rows]) -> Array:
    kernel, Y = kernel_and_rows
    if block.shape[0] == 0:
        return np.empty((0, Y.shape[0]))
    with single_blas_thread():
        return kernel_distances(kernel, as_float64(as_rows(block, "a block of rows")), Y)


def _require_shape_and_dtype(X: "da.Array", d: int) -> None:
    if X.ndim != 2 or X.shape[1] != d:
        raise InvalidInputError(f"The dask array has shape {X.shape} and the model was fitted with {d} columns.")
    if X.dtype.kind not in "biuf":
        raise InvalidInputError(f"The dask array must hold real numbers, and its dtype is {X.dtype}.")


def _require_numeric_columns(rows: "dd.DataFrame") -> None:
    for name, dtype in rows.dtypes.items():
        is_category = hasattr(dtype, "categories")  # which are seen in the partitions
        if dtype.kind not in "biuf" and not is_category:
            raise InvalidInputError(f"The data frame must hold real numbers, and its column {name!r} is {dtype}.")


def _rechunk_diagonal(diagonal: object, Z: "da.Array") -> "da.Array":
    """Return k(z, z) of the rows Z as a dask array (n,) with the row chunks of Z."""
    import dask.array as da

    known = da.asarray(diagonal)
    if known.ndim != 1 or known.dtype.kind not in "biuf" or known.shape != Z.shape[:1]:
        raise InvalidInputError(f"diag must hold k(z, z), of shape {Z.shape[:1]}, and its shape is {known.shape}.")
    chunked: da.Array = known.rechunk(Z.chunks[:1])
    return chunked


@set_dashboard_name("dkfm-transform")
def _score_partition(
    part: "pd.DataFrame", *, shared: "SharedModel | Delayed", output_name: str, columns: list[str]
) -> "pd.DataFrame":
    import pandas as pd
    from dask.delayed import Delayed

    # Dask before 2025.5 passes the delayed object itself instead of the model.
    shared_model = shared.compute(scheduler="synchronous") if isinstance(shared, Delayed) else shared
    first = part.index[0] if len(part) else ""
    label = ", ".join(map(str, first)) if isinstance(first, tuple) else str(first)
    what = f"the partition from index {label:.50} on"
    return pd.DataFrame(_score_rows(part, what, shared_model, output_name), part.index, columns)


@set_dashboard_name("dkfm-transform")
def _score_block(
    block: Array,
    diagonal: Array | None = None,
    *,
    shared_model: SharedModel,
    output_name: str,
    block_id: tuple[int, ...] = (),  # Dask's name for it
) -> Array:
    what = f"block {block_id[0]} of the dask array" if block_id else "a block"
    return _score_rows(block, what, shared_model, output_name, diagonal)


def _score_rows(
    block: "Array | pd.DataFrame",
    what: str,
    shared_model: SharedModel,
    output_name: str,
    diagonal: Array | None = None,
) -> Array:
    """Return an output for the rows of a block; raise an InvalidInputError that says `what` is not finite."""
    scorer = shared_model.scorer()
    if block.shape[0] == 0:
        output = scorer.model.head(output_name)
        return np.empty((0, output.width), output.output_dtype)
    rows = as_float64(as_rows(block, what))
    known = None if diagonal is None else diagonal[:, 0]
    with single_blas_thread():
        return compute_finite_scores(scorer, output_name, rows, what, diagonal=known)
