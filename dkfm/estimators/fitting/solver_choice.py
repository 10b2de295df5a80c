"""Choose the solver of the linear systems of a regression or of discriminants: in memory, on disk, or iterative."""

from dkfm.core import budget
from dkfm.errors import InvalidInputError, NotSupportedError
from dkfm.execution import memory
from dkfm.gram.training_data import TrainingData, TrainingRows
from dkfm.kernels.base import Kernel

SOLVERS = ("auto", "dense", "tiled", "cg")
"""Valid values of `solver`."""


def choose_solver(data: TrainingData, solver: str, reason: str, estimator: str, *, decomposes: bool = True) -> str:
    """Return the solver of a fit; raise if it is unsuitable, or does not fit in memory.

    "auto" becomes "dense" if the Gram matrix fits in memory; otherwise it stays "auto", and `SystemSolver` chooses.

    Parameters
    ----------
    data : TrainingData
        Training rows.
    solver : str
        Parameter of the estimator.
    reason : str
        Reason why the fit needs the Gram matrix in memory; empty if it does not.
    estimator : str
        Name of the estimator, for messages.
    decomposes : bool
        Whether a fit with such a reason computes all eigenvectors.
    """
    n, d, kernel = data.indexable_rows.shape[0], data.float64s_per_row, data.kernel
    needs = reason or ("" if isinstance(data, TrainingRows) else "a precomputed kernel has no rows")
    require_supported_solver(solver, needs)
    if solver in ("tiled", "cg") or (solver == "auto" and not needs and not has_gram_memory(n, d, kernel)):
        return solver
    squares = budget.EIGENVECTOR_SQUARES if reason and decomposes else 1
    memory.require_gram_memory(n, d, kernel.peak_blocks, kernel.landmark_copies, squares, estimator)
    return "dense"


def require_supported_solver(solver: str, reason: str) -> None:
    """Raise if `solver` is unknown, or has no Gram matrix in memory although the fit needs it for a `reason`."""
    if solver not in SOLVERS:
        raise InvalidInputError(f"solver must be one of {', '.join(SOLVERS)}, and is {solver!r}.")
    if solver in ("tiled", "cg") and reason:
        raise NotSupportedError(f'solver="{solver}" has no Gram matrix in memory, and {reason}; use solver="dense".')


def has_gram_memory(n: int, d: int, kernel: Kernel) -> bool:
    """Return whether this process can hold the Gram matrix, which a factor overwrites."""
    return (
        budget.fit_bytes(n, d, kernel.peak_blocks, kernel.landmark_copies, 1)
        <= memory.clear_caches_and_measure_memory()
    )
