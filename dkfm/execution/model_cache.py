"""Cache prepared models in a process that runs tasks; its threads share them."""

from collections.abc import Callable, Collection

from dkfm.core import budget
from dkfm.core.lru_cache import LruCache
from dkfm.core.rows import estimate_float64s_per_row
from dkfm.execution import memory
from dkfm.execution.clusters.current_client import is_inside_worker, nanny_local_directory, worker_memory_limit
from dkfm.kernels.pairwise.block_operations import find_exponential
from dkfm.numerics.scorer import Scorer, prepare_compact_scorer
from dkfm.storage.model_store import load_record
from dkfm.storage.remote_stores import get_cached_model_folder, open_model_folder

_FREE_SHARE = 1 / 4
"""Largest share of the free memory of a process that models keep after a job on its threads."""

_STREAMED_SEPARATOR = " from "
"""Separates digest and path in the key of a streamed model."""


_KEPT_WITHOUT_LIMIT = 2**28
"""Bytes of models that stay in a worker without a memory limit; its machine may run any number of other workers."""


def _cache_limit_bytes() -> int:
    """Return the bytes of models that may stay in the cache when another model is prepared."""
    limit = worker_memory_limit()
    if limit is None and is_inside_worker():
        return _KEPT_WITHOUT_LIMIT
    return memory.cache_bytes(limit or memory.memory_limit())


def _prepared_bytes(scorer: Scorer) -> int:
    """Return the bytes of a prepared model, as plans predict them."""
    model = scorer.model
    n, values = model.landmarks.shape[0], estimate_float64s_per_row(model.landmarks)
    weights = model.n_head_elements - model.n_stored_head_elements
    return budget.model_bytes(n, values, weights, model.landmark_copies, model.dtype.itemsize)


_scorers: LruCache[Scorer] = LruCache(_cache_limit_bytes, _prepared_bytes)
memory.register_cache(_scorers.clear_unless_busy)


def import_and_measure_peak_memory() -> int:
    """Return the peak resident size of this process, in bytes, once SciPy and this module's imports are loaded.

    On some processors the exponential is compiled, by a library of fifty megabytes. Code that is compiled only for
    certain kernels (of histograms or of few columns) is not included.
    """
    import scipy.linalg  # noqa: F401

    find_exponential()
    return memory.peak_memory()


def get_scorer(digest: str, make: Callable[[], Scorer]) -> Scorer:
    """Return the prepared model with a digest; `make` prepares it once per process, and threads share it."""
    return _scorers.get_or_compute(digest, make)


def get_saved_scorer(path: str, digest: str, trusted: Collection[str] = (), stream_weights: bool = False) -> Scorer:
    """Read the model of a store, check its digest and its user functions, and prepare it, once per process.

    With `stream_weights` the weights of the model stay in the store and are read block by block.
    """

    def read() -> Scorer:
        within = nanny_local_directory()
        if stream_weights:
            folder = get_cached_model_folder(path, digest, within)
            return prepare_compact_scorer(load_record(folder, digest, trusted, streamed=True).model)
        with open_model_folder(path, digest, within) as folder:
            return prepare_compact_scorer(load_record(folder, digest, trusted).model)

    # A streamed model is read from its path repeatedly, so the key has the path; a copy elsewhere may exist longer.
    return get_scorer(f"{digest}{_STREAMED_SEPARATOR}{path}" if stream_weights else digest, read)


def holds_model(digest: str) -> bool:
    """Return whether a model is in the cache with its weights in memory."""
    return digest in _scorers


def remove_model(digest: str) -> None:
    """Drop a model from the cache, unless a thread is reading or using one."""
    _scorers.clear_unless_busy(lambda key: str(key).partition(_STREAMED_SEPARATOR)[0] == digest)


def shrink_to_free_memory() -> None:
    """Drop the least recently used models until the rest takes a small share of the free memory of this process.

    Drop none if a thread is reading or using one.
    """
    _scorers.shrink_unless_busy(min(_cache_limit_bytes(), int(_FREE_SHARE * memory.measure_free_memory())))
