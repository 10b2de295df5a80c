"""The models that a process which runs tasks has opened, shared by its threads."""

from collections.abc import Callable, Collection

from dkfm.core.lru_cache import LruCache
from dkfm.execution.clusters.client import worker_folder
from dkfm.execution.memory import peak_memory
from dkfm.numerics.scorer import Scorer, prepare_compact_scorer
from dkfm.storage.model_store import load_record
from dkfm.storage.model_transfer import local_copy

_KEPT_BYTES = 2**28
"""Models stay when another one comes, while all of them together are below this."""

_STREAMED = " from "
_scorers: LruCache[Scorer] = LruCache(_KEPT_BYTES, lambda scorer: scorer.model.nbytes)


def baseline_memory() -> int:
    """Return the largest size that this process has had, with SciPy and what this module imports loaded.

    What a compiled kernel adds, numba's code, is not in it.
    """
    import scipy.linalg  # noqa: F401

    return peak_memory()


def get_scorer(digest: str, make: Callable[[], Scorer]) -> Scorer:
    """Return the prepared model of a digest, made once per process and shared by its threads."""
    return _scorers.get(digest, make)


def get_saved_scorer(path: str, digest: str, trusted: Collection[str] = (), streamed: bool = False) -> Scorer:
    """Return the prepared model of a store, checked against its digest, its functions against those trusted.

    The weights of a streamed one stay in the store.
    """

    def read() -> Scorer:
        return prepare_compact_scorer(
            load_record(local_copy(path, digest, worker_folder()), digest, trusted, streamed=streamed).model
        )

    # What is read again and again is of one place: the same model elsewhere may outlive it.
    return get_scorer(f"{digest}{_STREAMED}{path}" if streamed else digest, read)


def remove_model(digest: str) -> None:
    """Let a model go."""
    _scorers.remove(lambda key: str(key).partition(_STREAMED)[0] == digest)
