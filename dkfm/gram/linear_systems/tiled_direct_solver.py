"""Solve ``(S K S + alpha) c = b`` by a tiled factor, and refine the solution by products with kernel values."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dkfm.core.rows import Array, Rows
from dkfm.errors import DamagedStoreError
from dkfm.execution.stage_log import log_stage
from dkfm.gram.linear_systems import tiled_solves
from dkfm.gram.linear_systems.tile_store import TileStore
from dkfm.gram.linear_systems.tiled_cholesky import open_tiled_factor
from dkfm.gram.matrix_free import open_matrix_free
from dkfm.kernels.base import Kernel
from dkfm.kernels.serialization import is_code_free
from dkfm.numerics.roots import EPS

_TOLERANCE = 1e-13
"""Relative residual below which no further refinement is tried."""

_MAX_BACKWARD_ERROR = 1000 * EPS
"""``|A c - b|``, relative to ``tr(A) |c|``, above which a factor is that of another matrix: its own leave 0.4 eps."""

_MAX_REFINEMENTS = 3
"""Largest number of refinements; refinement also ends when the residual is not halved."""


@dataclass(frozen=True)
class SystemOptions:
    """Options of the solution of linear systems."""

    tile_rows: int | None = None
    """Rows of a tile of the factor."""
    workspace: str | Path | None = None
    """Folder in which the factor is kept."""
    progress: bool = False
    """Whether progress is shown."""
    tol: float = 1e-10
    """Residual, relative to the right side, at which conjugate gradients stop."""


@dataclass(frozen=True, eq=False)
class SystemSolution:
    """Solution of systems with a matrix A (N, N)."""

    values: Array
    """``A^(-1) b``. Shape (N, q)."""
    residuals: Array
    """``|A c - b| / |b|`` of each right side, with newly computed kernel values; 0 if b is 0. Shape (q,)."""
    inverse_diagonal: Array | None
    """Diagonal of ``A^(-1)``, if requested. Shape (N,)."""


def solve_system(
    kernel: Kernel,
    X: Rows,
    alpha: float,
    weights: Array,
    right: Array,
    options: SystemOptions,
    *,
    inverse_diagonal: bool = False,
) -> SystemSolution:
    """Solve ``(S K S + alpha) c = b`` for right sides b (N, q), with S the square roots of the weights (N,).

    The tasks run on the current Dask client, or on threads of this process.

    Raises
    ------
    NotPSDError
        The matrix is not positive definite.
    BudgetError
        A tile does not fit in memory, or the factor on the disk.
    DamagedStoreError
        The factor that was kept in the workspace is not that of this matrix.
    """
    workspace, progress, roots = options.workspace, options.progress, np.sqrt(weights)[:, np.newaxis]
    with open_tiled_factor(
        kernel, X, alpha, np.sqrt(weights), tile_rows=options.tile_rows, workspace=workspace, progress=progress
    ) as factor:
        values = tiled_solves.solve(factor, right)
        with open_matrix_free(kernel, X, right.shape[1], workspace=workspace, progress=progress) as gram:

            def measure(values: Array) -> tuple[Array, Array]:
                rest = right - roots * (gram @ (roots * values)) - alpha * values
                return rest, _relative_norms(rest, right)

            rest, residuals = measure(values)
            if workspace is not None and is_code_free(kernel):  # functions may return other values each time
                trace = float((weights * kernel.evaluate_diagonal(X)).sum()) + len(weights) * alpha
                _require_factor_of_matrix(factor, rest, values, trace)
            for _ in range(_MAX_REFINEMENTS):
                if residuals.max(initial=0.0) <= _TOLERANCE:
                    break
                refined = values + tiled_solves.solve(factor, rest)
                rest, found = measure(refined)
                is_better, is_slow = found.max() < residuals.max(), not found.max() < residuals.max() / 2
                if is_better:
                    values, residuals = refined, found
                if is_slow:
                    break
        worst = float(residuals.max(initial=0.0))
        log_stage("solve", f"residual of the system {worst:.1e} of its right side", rows=len(right), residual=worst)
        diagonal = tiled_solves.compute_inverse_diagonal(factor, progress=progress) if inverse_diagonal else None
    return SystemSolution(values, residuals, diagonal)


def _require_factor_of_matrix(factor: TileStore, rest: Array, values: Array, trace: float) -> None:
    """Raise a DamagedStoreError unless the residuals of first solutions are those of a factor of the matrix.

    It has the `trace`. Tiles have checksums, which those of another factor have, too.
    """
    from scipy.linalg import blas

    # These norms neither overflow nor underflow where their squares would.
    norms, sizes = (np.array([blas.dnrm2(column) for column in columns.T]) for columns in (rest, values))
    if (norms > _MAX_BACKWARD_ERROR * (trace * sizes)).any():
        raise DamagedStoreError(f"{factor.root} does not hold the factor of this matrix; delete it and fit again.")


def _relative_norms(rest: Array, right: Array) -> Array:
    norms, sizes = (np.linalg.norm(columns, axis=0) for columns in (rest, right))
    relative: Array = np.divide(norms, sizes, out=np.zeros_like(norms), where=sizes > 0)
    return relative
