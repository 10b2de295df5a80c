"""Define the exceptions and warnings of dkfm; a message states the expected value, the actual value and the remedy."""

import reprlib
import sys
import warnings
from collections.abc import Iterable

_MAX_MESSAGE = 2000
"""Longest message, in characters, even if it repeats long values."""


_MIN_SIMILARITY = 0.75
"""Smallest similarity, by difflib, of names that differ by a typing error."""

_MIN_PREFIX = 3
"""Smallest number of leading characters that suggest a name."""


def extract_reason(error: BaseException) -> str:
    r"""Return the first line of another library's error message, for use in a sentence.

    >>> extract_reason(ValueError("two lines.\nof text"))
    'two lines'
    """
    lines = str(error).strip().splitlines()
    message = lines[0][:300].rstrip(". ") if lines else ""
    return message or type(error).__name__


def find_similar_names(name: str, known: Iterable[str]) -> list[str]:
    """Return known names for which a wrong name was probably meant; empty if none is related.

    Related names differ by a typing error, begin with the wrong name, or contain its words.

    >>> find_similar_names("gausian", ["gaussian", "laplacian"]), find_similar_names("spline", ["cosine", "linear"])
    (['gaussian'], [])
    >>> find_similar_names("--rows", ["--chunk-rows", "--progress"])
    ['--chunk-rows']
    """
    from difflib import SequenceMatcher

    def simplify(text: str) -> str:
        return text.lower().replace("_", "-").strip("-")

    def rank(other: str) -> float:
        theirs = simplify(other)
        if (len(plain) >= _MIN_PREFIX and theirs.startswith(plain)) or words <= set(theirs.split("-")):
            return 1.0
        return SequenceMatcher(None, plain, theirs).ratio()

    plain = simplify(name)
    words = set(plain.split("-"))
    ranks = {other: rank(other) for other in known}
    return sorted((other for other in ranks if ranks[other] >= _MIN_SIMILARITY), key=lambda other: -ranks[other])[:3]


def shorten(text: str, most: int = 100) -> str:
    """Return a text of at most `most` characters; leave out the middle of a longer one.

    >>> shorten("0123456789" * 100, 25)
    '0123456789 ... 0123456789'
    """
    if len(text) <= most:
        return text
    half = (most - 5) // 2
    return f"{text[:half]} ... {text[len(text) - half :]}"


def format_value(value: object, most: int = 100) -> str:
    """Return the representation of a value in at most `most` characters; the value may come from a file.

    >>> format_value(list(range(10**6)))
    '[0, 1, 2, 3, 4, 5, ...]'
    """
    short = reprlib.Repr()
    short.maxlevel, short.maxstring, short.maxlong, short.maxother = 3, most, most, most
    return shorten(short.repr(value), most)


class DkfmError(Exception):
    """Base of all errors that dkfm raises; the length of its message is bounded."""

    def __str__(self) -> str:
        return shorten(super().__str__(), _MAX_MESSAGE)


class InvalidInputError(DkfmError, ValueError):
    """Rows, parameters or a source that cannot be used as they are."""


class InvalidTypeError(InvalidInputError, TypeError):
    """Rows that contain values other than numbers."""


class NotSupportedError(InvalidInputError):
    """An operation that these rows or this kernel do not support."""


class KernelError(DkfmError, ValueError):
    """A kernel with invalid parameters, or one that returned a wrong shape, NaN or infinity."""


class NotPSDError(KernelError):
    """A Gram matrix with an eigenvalue more negative than rounding explains."""


class BudgetError(DkfmError, MemoryError):
    """Work that does not fit into memory or disk, raised before it starts; the message has both numbers."""


class StoreError(DkfmError):
    """A Gram matrix, model or output in a store that cannot be used."""


class StoreExistsError(StoreError, FileExistsError):
    """A path at which something exists already; it was left untouched."""


class IncompleteStoreError(StoreError):
    """A store without its completion marker."""


class DamagedStoreError(StoreError):
    """A store whose bytes differ from those that dkfm wrote."""


class UnsupportedStoreError(StoreError):
    """A store that this version cannot read: newer, of another kind or format, or with content that is not dkfm's."""


class UnreachableError(StoreError):
    """A store that did not answer, or answered with a transient error; a retry may succeed."""


class UntrustedError(StoreError):
    """A store whose kernel is a user function that the reader does not trust, or that has changed."""


class ClusterError(DkfmError, RuntimeError):
    """A cluster that cannot run the work, or did not finish it."""


class SchedulerNameError(ClusterError, InvalidInputError):
    """A name of a scheduler in none of the forms that `--scheduler` takes."""


class UnfitWorkerError(ClusterError):
    """A worker that sees other files, or has other versions, too little memory, or several BLAS threads.

    Attributes
    ----------
    worker : str
        Address of the worker.
    """

    def __init__(self, worker: str, fault: str) -> None:
        super().__init__(worker, fault)
        self.worker = worker

    def __str__(self) -> str:
        return shorten("The worker {} {}".format(*self.args), _MAX_MESSAGE)


class StalledError(ClusterError):
    """Work without a result for too long; threads of this process may still be running."""


class WorkerDiedError(ClusterError):
    """A task whose workers all died."""


class PartialOutputError(ClusterError):
    """A job with failed chunks, because every worker that scored them died; all other chunks are complete."""


class ConvergenceError(DkfmError, RuntimeError):
    """An iteration that did not converge within its maximum number of steps."""


class CertificateError(DkfmError):
    """A model whose errors have grown since its fit, or an output that differs from its model or its input."""


class OutputError(DkfmError, OSError):
    """Standard output of a command, not an output store, that cannot be written: disk full, closed, or reader gone."""


class ResourceError(DkfmError, OSError):
    """A resource that the system denies to a command: a file, memory, a thread or a process."""


class DisagreementError(DkfmError):
    """Libraries in a benchmark that computed different results, so that their times cannot be compared."""


class MissingExtraError(DkfmError, ImportError):
    """An optional dependency that is not installed, or cannot be loaded; the message names the extra."""


class DkfmWarning(UserWarning):
    """A result that is less accurate than expected, or for which something was dropped or changed."""


class TemporaryStoreWarning(UserWarning):
    """A temporary store of more than 1 GB will be written; the message has its size and its path."""


_FOLLOWED_PACKAGES = ("dkfm", "contextlib", "functools", "sklearn")
"""Packages whose frames are skipped to find the line that a warning names."""


def warn_caller(message: str, category: type[Warning] = DkfmWarning) -> None:
    """Issue a warning at the nearest line of the call stack that is not in dkfm or scikit-learn."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _FOLLOWED_PACKAGES:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
