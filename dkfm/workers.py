"""What a process that runs tasks keeps: its BLAS thread limit and the models it has opened.

Tasks compute with one BLAS thread each: the same bits wherever they run, and never more threads than cores.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from threadpoolctl import OpenBLASController, ThreadpoolController, threadpool_limits

from dkfm import apply
from dkfm.record import load_record

__all__ = ["all_blas_threads", "cached_scorer", "limit_blas", "saved_scorer", "single_blas_thread"]

_KEPT_MODELS = 4
_lock = threading.RLock()
_scorers: OrderedDict[str, apply.Scorer] = OrderedDict()
_limits: threadpool_limits | None = None
_users = 0


def _limit_to_one() -> threadpool_limits:
    import scipy.linalg  # noqa: F401  # SciPy brings a BLAS of its own, which a limit must find loaded

    with _control():
        return ThreadpoolController().select(user_api="blas").limit(limits=1)


def _restore(limits: threadpool_limits) -> None:
    with _control():
        limits.restore_original_limits()


@contextmanager
def _control() -> Iterator[None]:
    """Let this thread set the limits: from threadpoolctl 3.8 on, any but the first that did is silently ignored."""
    release = getattr(OpenBLASController, "clear_controlling_thread", lambda force: None)
    release(force=True)
    try:
        yield
    finally:
        release(force=True)


def limit_blas() -> None:
    """Give BLAS one thread in this process from now on; a worker calls it at the start of each task."""
    global _limits  # noqa: PLW0603  # one limit a process is what BLAS has
    with _lock:
        if _limits is None:
            _limits = _limit_to_one()


@contextmanager
def single_blas_thread() -> Iterator[None]:
    """Give BLAS one thread while any thread of this process is inside, and the former number after the last."""
    global _users, _limits  # noqa: PLW0603  # counted: nested limits in threads restore the wrong number
    with _lock:
        counted = _users > 0 or _limits is None  # else a worker in this process has limited it for good
        if counted:
            limit_blas()
            _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= counted
            if counted and _users == 0 and _limits is not None:
                _restore(_limits)
                _limits = None


@contextmanager
def all_blas_threads() -> Iterator[None]:
    """Give the threads back that a worker inside this process took, for one large decomposition."""
    with _lock:
        limited = _limits
    if limited is None:
        yield
        return
    _restore(limited)
    try:
        yield
    finally:
        with _lock:
            if _limits is limited:
                _limit_to_one()


def cached_scorer(digest: str, make: Callable[[], apply.Scorer]) -> apply.Scorer:
    """Return the prepared model of a digest, made once per process and shared by its threads."""
    with _lock:
        if digest not in _scorers:
            _scorers[digest] = make()
            while len(_scorers) > _KEPT_MODELS:
                _scorers.popitem(last=False)
        _scorers.move_to_end(digest)
        return _scorers[digest]


def saved_scorer(path: str, digest: str) -> apply.Scorer:
    """Return the prepared model of a store, checked against its digest."""
    return cached_scorer(digest, lambda: apply.prepare(load_record(Path(path), digest).model))
