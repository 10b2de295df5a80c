"""The number of BLAS threads in a task, and what is known of the BLAS of this process.

Tasks compute with one BLAS thread each: the same bits wherever they run, and never more threads than cores.
"""

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

from threadpoolctl import OpenBLASController, ThreadpoolController, threadpool_limits

from dkfm.execution.clusters.client import is_inside_worker, worker_folder
from dkfm.kernels.pairwise import columnwise_sums

_BUNDLED = re.compile(r"/(numpy|scipy)(\.libs|/\.dylibs)/")
"""In the path of a library that NumPy or SciPy brings."""

_blas_lock = threading.Lock()
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


def limit_blas_threads_in_worker() -> AbstractContextManager[None]:
    """Give BLAS one thread inside a task of a worker, whose other threads have the other cores; else all it has."""
    return single_blas_thread() if is_inside_worker() else nullcontext()


def count_blas_threads() -> int:
    """Return how many threads BLAS has in a task: more than one where it does not do as it is told."""
    with _limited():
        return max((info["num_threads"] for info in ThreadpoolController().select(user_api="blas").info()), default=1)


def blas_libraries() -> str:
    """Return the libraries, with their versions, that NumPy's and SciPy's matrix products are computed by."""
    return ", ".join(sorted({f"{info['internal_api']} {info['version']}" for info in _blas()}))


def blas_processors() -> str:
    """Return the processors that these libraries compute for: the bits of a product differ between them."""
    return ", ".join(sorted({str(info.get("architecture")) for info in _blas()}))


@cache
def _blas() -> tuple[Mapping[str, Any], ...]:
    """Return what is known of the BLAS of NumPy and SciPy; other packages may have brought more of them."""
    import scipy.linalg  # noqa: F401  # SciPy brings a BLAS of its own, which must be loaded to be found

    found = ThreadpoolController().select(user_api="blas").info()
    bundled = [info for info in found if _BUNDLED.search(info["filepath"])]
    return tuple(bundled or found)


@cache
def _keep_compilations() -> None:
    """Let what a task compiles be kept in the scratch directory of its worker, if that has this process to itself."""
    scratch = worker_folder()
    if scratch is not None:
        folder = scratch / "dkfm-compiled"
        folder.mkdir(mode=0o700, exist_ok=True)
        columnwise_sums.set_compile_cache(folder)


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
