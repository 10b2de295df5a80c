"""Every exception and warning of dkfm. Each message is a sentence: what was expected, what came, what to do."""

import reprlib

__all__ = [
    "BudgetError",
    "CertificateError",
    "ClusterError",
    "ConvergenceError",
    "DamagedStoreError",
    "DisagreementError",
    "DkfmError",
    "DkfmWarning",
    "IncompleteStoreError",
    "InvalidInputError",
    "InvalidTypeError",
    "KernelError",
    "MissingExtraError",
    "NotPSDError",
    "NotSupportedError",
    "OutputError",
    "ResourceError",
    "StalledError",
    "StoreError",
    "StoreExistsError",
    "TemporaryStoreWarning",
    "UnfitWorkerError",
    "UnreachableError",
    "UnsupportedStoreError",
    "UntrustedError",
    "WorkerDiedError",
    "reason",
    "shortened",
    "shown",
]

_MAX_MESSAGE = 2000
"""Characters of a message, however long the values are that it repeats."""


def reason(error: BaseException) -> str:
    r"""Return what an error of another library says, as a part of a sentence.

    >>> reason(ValueError("two lines.\nof text"))
    'two lines'
    """
    lines = str(error).strip().splitlines()
    said = lines[0][:300].rstrip(". ") if lines else ""
    return said or type(error).__name__


def shortened(text: str, most: int = 100) -> str:
    """Return a text of at most so many characters: the middle of a longer one is left out.

    >>> shortened("0123456789" * 100, 25)
    '0123456789 ... 0123456789'
    """
    if len(text) <= most:
        return text
    each = (most - 5) // 2
    return f"{text[:each]} ... {text[len(text) - each :]}"


def shown(value: object, most: int = 100) -> str:
    """Return the representation of a value, which a file may hold, in at most so many characters.

    >>> shown(list(range(10**6)))
    '[0, 1, 2, 3, 4, 5, ...]'
    """
    short = reprlib.Repr()
    short.maxlevel, short.maxstring, short.maxlong, short.maxother = 3, most, most, most
    return shortened(short.repr(value), most)


class DkfmError(Exception):
    """Base of every error that dkfm raises on purpose; its message is short, whatever a file holds."""

    def __str__(self) -> str:
        return shortened(super().__str__(), _MAX_MESSAGE)


class InvalidInputError(DkfmError, ValueError):
    """Rows, parameters or a source that cannot be used as they are."""


class InvalidTypeError(InvalidInputError, TypeError):
    """Rows that hold something else than numbers."""


class NotSupportedError(InvalidInputError):
    """What is asked of rows or a kernel that cannot give it."""


class KernelError(DkfmError, ValueError):
    """A kernel with impossible parameters, or one that returned something that is not a kernel block."""


class NotPSDError(KernelError):
    """A Gram matrix with an eigenvalue more negative than rounding explains."""


class BudgetError(DkfmError, MemoryError):
    """Work refused before it starts, because it would not fit; the message has both numbers."""


class StoreError(DkfmError):
    """A Gram, model or output on disk that cannot be used."""


class StoreExistsError(StoreError, FileExistsError):
    """A path that holds something already; it was left untouched."""


class IncompleteStoreError(StoreError):
    """A store without its completion marker."""


class DamagedStoreError(StoreError):
    """A store whose bytes are not the bytes that dkfm wrote."""


class UnsupportedStoreError(StoreError):
    """A store that this version does not read: newer, of another kind, or not of dkfm's format."""


class UnreachableError(StoreError):
    """A store that did not answer, or answered with an error of its own; trying again may help."""


class UntrustedError(StoreError):
    """A store whose kernel is a function that the reader has not said to trust, or that has changed."""


class ClusterError(DkfmError, RuntimeError):
    """A cluster that did not do all the work, or cannot."""


class UnfitWorkerError(ClusterError):
    """A worker that cannot do its part: it sees another disk, or has other versions, or too little memory.

    Attributes
    ----------
    worker : str
        Its address.
    """

    def __init__(self, worker: str, fault: str) -> None:
        super().__init__(worker, fault)
        self.worker = worker

    def __str__(self) -> str:
        return shortened("The worker {} {}".format(*self.args), _MAX_MESSAGE)


class StalledError(ClusterError):
    """Work of which nothing was heard for too long; threads of this process may still be at it."""


class WorkerDiedError(ClusterError):
    """A task whose workers died, every one of them."""


class ConvergenceError(DkfmError, RuntimeError):
    """An iteration that did not come to its end within the steps it had."""


class CertificateError(DkfmError):
    """A model that no longer does what it did when it was fitted."""


class OutputError(DkfmError, OSError):
    """Standard output that takes no more text: its disk is full, it is closed, or nobody reads it."""


class ResourceError(DkfmError, OSError):
    """What the system refuses a command: a file, memory, a thread or a process."""


class DisagreementError(DkfmError):
    """Rivals of a benchmark that do not compute the same, so that their times say nothing."""


class MissingExtraError(DkfmError, ImportError):
    """An optional dependency that is not installed; the message names the extra."""


class DkfmWarning(UserWarning):
    """Something was dropped or changed in a way the result shows."""


class TemporaryStoreWarning(UserWarning):
    """A temporary store of more than 1 GB is about to be written; the message has its size and its place."""
