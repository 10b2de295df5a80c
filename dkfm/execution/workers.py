"""What a process that runs tasks shares among its threads: the BLAS thread limit and the models it has opened.

Tasks compute with one BLAS thread each: the same bits wherever they run, and never more threads than cores.
"""

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

from threadpoolctl import OpenBLASController, ThreadpoolController, threadpool_limits

from dkfm.execution.clusters.client import inside_worker
from dkfm.execution.memory import peak_memory
from dkfm.kernels.pairwise import columnwise_sums
from dkfm.numerics.scorer import Scorer, prepare_compact_scorer
from dkfm.storage.model_store import load_record
from dkfm.storage.model_transfer import local_copy

__all__ = [
    "blas_processor",
    "blas_threads",
    "blas_version",
    "cached_scorer",
    "forget",
    "process_bytes",
    "saved_scorer",
    "single_blas_thread",
    "threads_of_a_task",
]

_KEPT_BYTES = 2**28
"""Models stay when another one comes, while all of them together are below this."""

_STREAMED = " from "

_BUNDLED = re.compile(r"/(numpy|scipy)(\.libs|/\.dylibs)/")
"""In the path of a library that NumPy or SciPy brings."""

_blas_lock, _cache_lock = threading.Lock(), threading.Lock()
_scorers: OrderedDict[str, Scorer] = OrderedDict()
_limits: threadpool_limits | None = None
_users = 0


@contextmanager
def single_blas_thread() -> Iterator[None]:
    """Give BLAS one thread while any thread of this process is inside, and the former number after the last.

    The limit is one of the process, so it is counted: limits nested in threads would restore the wrong number.
    """
    _keep_compilations()
    with _limited():
        yield


@contextmanager
def _limited() -> Iterator[None]:
    global _users, _limits  # noqa: PLW0603  # one limit a process is what BLAS has
    with _blas_lock:
        if _users == 0:
            _limits = _limit_to_one()
        _users += 1
    try:
        yield
    finally:
        with _blas_lock:
            _users -= 1
            if _users == 0 and _limits is not None:
                with _control():
                    _limits.restore_original_limits()


def threads_of_a_task() -> AbstractContextManager[None]:
    """Give BLAS one thread inside a task of a worker, whose other threads have the other cores; else all it has."""
    return single_blas_thread() if inside_worker() else nullcontext()


def blas_threads() -> int:
    """Return how many threads BLAS has in a task: more than one where it does not do as it is told."""
    with _limited():
        return max((info["num_threads"] for info in ThreadpoolController().select(user_api="blas").info()), default=1)


def blas_version() -> str:
    """Return the libraries, with their versions, that NumPy's and SciPy's matrix products are computed by."""
    return ", ".join(sorted({f"{info['internal_api']} {info['version']}" for info in _blas()}))


def blas_processor() -> str:
    """Return the processors that these libraries compute for: the bits of a product differ between them."""
    return ", ".join(sorted({str(info.get("architecture")) for info in _blas()}))


@cache
def _blas() -> tuple[Mapping[str, Any], ...]:
    """Return what is known of the BLAS of NumPy and SciPy; other packages may have brought more of them."""
    import scipy.linalg  # noqa: F401  # SciPy brings a BLAS of its own, which must be loaded to be found

    found = ThreadpoolController().select(user_api="blas").info()
    bundled = [info for info in found if _BUNDLED.search(info["filepath"])]
    return tuple(bundled or found)


def process_bytes() -> int:
    """Return the largest size that this process has had, with SciPy and what this module imports loaded.

    What a compiled kernel adds, numba's code, is not in it.
    """
    import scipy.linalg  # noqa: F401

    return peak_memory()


@cache
def _keep_compilations() -> None:
    """Let what a task compiles be kept in the scratch directory of its worker, if that has this process to itself."""
    scratch = _scratch()
    if scratch is not None:
        folder = scratch / "dkfm-compiled"
        folder.mkdir(mode=0o700, exist_ok=True)
        columnwise_sums.keep_in(folder)


def _scratch() -> Path | None:
    """Return the directory that the nanny of this worker process clears after it; None elsewhere."""
    from distributed import get_worker

    try:
        worker = get_worker()
    except ValueError:
        return None
    return Path(worker.local_directory) if worker.nanny else None


def _limit_to_one() -> threadpool_limits:
    import scipy.linalg  # noqa: F401  # SciPy brings a BLAS of its own, which a limit must find loaded

    with _control():
        return ThreadpoolController().select(user_api="blas").limit(limits=1)


@contextmanager
def _control() -> Iterator[None]:
    """Let this thread set the limits: from threadpoolctl 3.8 on, any but the first that did is silently ignored."""
    release = getattr(OpenBLASController, "clear_controlling_thread", lambda force: None)
    release(force=True)
    try:
        yield
    finally:
        release(force=True)


def cached_scorer(digest: str, make: Callable[[], Scorer]) -> Scorer:
    """Return the prepared model of a digest, made once per process and shared by its threads."""
    with _cache_lock:
        if digest not in _scorers:
            while sum(scorer.model.nbytes for scorer in _scorers.values()) > _KEPT_BYTES:
                _scorers.popitem(last=False)  # before the next one is read, not after
            _scorers[digest] = make()
        _scorers.move_to_end(digest)
        return _scorers[digest]


def saved_scorer(path: str, digest: str, trusted: Collection[str] = (), streamed: bool = False) -> Scorer:
    """Return the prepared model of a store, checked against its digest, its functions against those trusted.

    The weights of a streamed one stay in the store.
    """

    def read() -> Scorer:
        return prepare_compact_scorer(
            load_record(local_copy(path, digest, _scratch()), digest, trusted, streamed=streamed).model
        )

    # What is read again and again is of one place: the same model elsewhere may outlive it.
    return cached_scorer(f"{digest}{_STREAMED}{path}" if streamed else digest, read)


def forget(digest: str) -> None:
    """Let a model go."""
    with _cache_lock:
        for key in [key for key in _scorers if key.partition(_STREAMED)[0] == digest]:
            del _scorers[key]
