"""Choose how the linear systems of a regression or of discriminants are solved: in memory, on disk, or by products."""

from dkfm.core import budget
from dkfm.errors import InvalidInputError, NotSupportedError
from dkfm.execution import memory
from dkfm.gram.training_data import TrainingData, TrainingRows
from dkfm.kernels.base import Kernel

SOLVERS = ("auto", "dense", "tiled", "cg")
"""Valid values of `solver`."""


def choose_solver(data: TrainingData, solver: str, by_eigenvalues: bool, estimator: str) -> str:
    """Return the solver of a fit; raise if it does not serve, or does not fit in memory.

    "auto" is "dense" where the Gram matrix fits in memory, and else stays "auto", which `SystemSolver` takes.

    Parameters
    ----------
    data : TrainingData
        Training rows.
    solver : str
        Parameter of the estimator.
    by_eigenvalues : bool
        Whether the fit needs an eigendecomposition of the Gram matrix.
    estimator : str
        Name of the estimator, for messages.
    """
    if solver not in SOLVERS:
        raise InvalidInputError(f"solver must be one of {', '.join(SOLVERS)}, and is {solver!r}.")
    n, d, kernel = data.rows_as_landmarks.shape[0], data.mean_values_per_row, data.kernel
    serves = isinstance(data, TrainingRows) and not by_eigenvalues
    if solver in ("tiled", "cg") and not serves:
        raise NotSupportedError(
            f'solver="{solver}" is for the Gram matrix of rows: it does not serve for a precomputed kernel, nor for '
            'parameters that need eigenvalues, as "loo", "auto", "clip", many penalties, or one that is nothing beside '
            'rounding; use solver="dense".'
        )
    if solver in ("tiled", "cg") or (serves and solver == "auto" and not has_gram_memory(n, d, kernel)):
        return solver
    squares = budget.EIGENVECTOR_SQUARES if by_eigenvalues else 1
    memory.require_gram_memory(n, d, kernel.peak_blocks, kernel.landmark_copies, squares, estimator)
    return "dense"


def has_gram_memory(n: int, d: int, kernel: Kernel) -> bool:
    """Return whether this process can hold the Gram matrix, which a factor overwrites."""
    return budget.fit_bytes(n, d, kernel.peak_blocks, kernel.landmark_copies, 1) <= memory.available_memory()
