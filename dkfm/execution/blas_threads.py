"""Limit BLAS to one thread in tasks, and report which BLAS this process has loaded.

With one BLAS thread, the result of a task is bitwise equal wherever it runs, and there are never more threads than
cores.
"""

import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache, lru_cache
from typing import Any

from threadpoolctl import LibController, OpenBLASController, ThreadpoolController

from dkfm.execution.clusters.current_client import is_inside_worker, nanny_local_directory
from dkfm.kernels.pairwise import columnwise_sums

_BUNDLED_LIBRARY = re.compile(r"/(numpy|scipy)(\.libs|/\.dylibs)/")
"""Matches the path of a library that the wheels of NumPy or SciPy contain."""

_MAX_SINGLE_THREAD_ROWS = 1024
"""Largest number of training rows that are fitted with one BLAS thread.

NumPy and SciPy each have their own BLAS, whose threads busy-wait for a while after each product. A fit calls both in
turn, and below this size it loses more time by busy-waiting threads than a second thread saves.
"""

_blas_lock = threading.Lock()
_limits: list[list[tuple[LibController, int]]] = []
"""Libraries of each limit in force, the latest last, with the numbers of threads before it."""
_users_of_limit: list[object] = []
"""A token for each user of the limit. A list, because removing one needs no lock, for which a user might wait."""
_limits_reach_scipy = False


@contextmanager
def single_blas_thread(uses_scipy: bool = True) -> Iterator[None]:
    """Limit BLAS to one thread while any thread of this process is inside; restore the former number after the last.

    The limit belongs to the whole process, so its users are counted. Nested limits of several threads would restore the
    wrong number.

    Parameters
    ----------
    uses_scipy : bool, default=True
        Whether code inside may call SciPy's BLAS, which is not the same library as NumPy's. It is then loaded first,
        because a limit applies only to loaded libraries. Loading it takes longer than a small job.
    """
    _set_compile_cache_folder()
    with _shared_thread_limit(uses_scipy):
        yield


@contextmanager
def _shared_thread_limit(uses_scipy: bool) -> Iterator[None]:
    global _limits_reach_scipy  # noqa: PLW0603  # BLAS has one limit for the process
    if uses_scipy:
        import scipy.linalg  # noqa: F401

    user = object()
    try:
        with _blas_lock:
            if not _users_of_limit or (uses_scipy and not _limits_reach_scipy):
                _set_one_thread()
                _limits_reach_scipy = uses_scipy
            _users_of_limit.append(user)
        yield
    finally:
        with suppress(ValueError):  # it was interrupted before
            _users_of_limit.remove(user)
        with _blas_lock:
            if not _users_of_limit:
                _restore_threads()


def single_blas_thread_in_worker() -> AbstractContextManager[None]:
    """Limit BLAS to one thread in a worker, whose other threads use the other cores; elsewhere change nothing."""
    return single_blas_thread() if is_inside_worker() else nullcontext()


def single_blas_thread_for_fit(n_rows: int) -> AbstractContextManager[None]:
    """Limit BLAS to one thread in a worker, and for a fit to few rows, where more threads would be slower."""
    return single_blas_thread() if n_rows <= _MAX_SINGLE_THREAD_ROWS else single_blas_thread_in_worker()


def measure_task_blas_threads() -> int:
    """Return how many threads BLAS uses in a task: more than one if it ignores the limit."""
    with _shared_thread_limit(uses_scipy=True):
        return max((info["num_threads"] for info in ThreadpoolController().select(user_api="blas").info()), default=1)


def describe_blas_libraries() -> str:
    """Return the names and versions of the BLAS libraries that NumPy and SciPy call."""
    return ", ".join(sorted({f"{info['internal_api']} {info['version']}" for info in _blas_info()}))


def describe_blas_architectures() -> str:
    """Return the processor types whose code the loaded BLAS libraries run; the last bits of products depend on them."""
    return ", ".join(sorted({str(info.get("architecture")) for info in _blas_info()}))


@cache
def _blas_info() -> tuple[Mapping[str, Any], ...]:
    """Return threadpoolctl's facts on the BLAS of NumPy and SciPy; other packages may have loaded libraries too."""
    import scipy.linalg  # noqa: F401  # SciPy has its own BLAS, which is found only after it is loaded

    loaded = ThreadpoolController().select(user_api="blas").info()
    bundled = [info for info in loaded if _BUNDLED_LIBRARY.search(info["filepath"])]
    return tuple(bundled or loaded)


@cache
def _set_compile_cache_folder() -> None:
    """Cache compiled functions in the worker's scratch directory, if a nanny clears it after this process."""
    scratch = nanny_local_directory()
    if scratch is not None:
        folder = scratch / "dkfm-compiled"
        folder.mkdir(mode=0o700, exist_ok=True)
        columnwise_sums.set_compile_cache(folder)


def _set_one_thread() -> None:
    with _clear_controlling_thread():
        libraries = _find_blas_libraries(len(sys.modules)).lib_controllers
        _limits.append([(library, library.num_threads) for library in libraries])  # first: an interruption may follow
        for library in libraries:
            library.set_num_threads(1)


def _restore_threads() -> None:
    with _clear_controlling_thread():
        while _limits:  # the first limit holds the original numbers of threads
            for library, count in _limits[-1]:
                library.set_num_threads(count)
            _limits.pop()


@lru_cache(maxsize=1)
def _find_blas_libraries(n_modules: int) -> ThreadpoolController:  # part of the key of the cache
    """Return the BLAS libraries of this process; search again, which takes a millisecond, only after new imports."""
    return ThreadpoolController().select(user_api="blas")


@contextmanager
def _clear_controlling_thread() -> Iterator[None]:
    """Let this thread set limits; threadpoolctl 3.8 and later silently ignore limits of all threads but the first."""
    release = getattr(OpenBLASController, "clear_controlling_thread", lambda force: None)
    release(force=True)
    try:
        yield
    finally:
        release(force=True)
