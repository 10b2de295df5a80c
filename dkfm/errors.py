"""Every exception and warning of dkfm. Each message is a sentence: what was expected, what came, what to do."""

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
    "StalledError",
    "StoreError",
    "StoreExistsError",
    "UnfitWorkerError",
    "UnreachableError",
    "UnsupportedStoreError",
    "UntrustedError",
    "WorkerDiedError",
    "reason",
]


def reason(error: BaseException) -> str:
    r"""Return what an error of another library says, as a part of a sentence.

    >>> reason(ValueError("two lines.\nof text"))
    'two lines'
    """
    lines = str(error).strip().splitlines()
    said = lines[0][:300].rstrip(". ") if lines else ""
    return said or type(error).__name__


class DkfmError(Exception):
    """Base of every error that dkfm raises on purpose."""


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
        return "The worker {} {}".format(*self.args)


class StalledError(ClusterError):
    """Work of which nothing was heard for too long; threads of this process may still be at it."""


class WorkerDiedError(ClusterError):
    """A task whose workers died, every one of them."""


class ConvergenceError(DkfmError, RuntimeError):
    """An iteration that did not come to its end within the steps it had."""


class CertificateError(DkfmError):
    """A model that no longer does what it did when it was fitted."""


class DisagreementError(DkfmError):
    """Rivals of a benchmark that do not compute the same, so that their times say nothing."""


class MissingExtraError(DkfmError, ImportError):
    """An optional dependency that is not installed; the message names the extra."""


class DkfmWarning(UserWarning):
    """Something was dropped or changed in a way the result shows."""
