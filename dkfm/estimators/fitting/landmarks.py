"""Choose the landmarks of a map (all rows, given landmarks, or selected ones), and compute their root."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.random import RandomState
from sklearn.utils import check_random_state
from sklearn.utils.random import sample_without_replacement

from dkfm.core import budget
from dkfm.core.chunking import require_count
from dkfm.core.rows import Array, as_float64, as_rows, require_rows_container
from dkfm.errors import InvalidInputError, warn_caller
from dkfm.estimators.fitting import out_of_core_rows
from dkfm.execution import memory, progress
from dkfm.execution.stage_log import log_stage
from dkfm.gram.linear_systems.tiled_inverse_factor import compute_tiled_root
from dkfm.gram.streamed_rows import StreamedRows
from dkfm.gram.training_data import TrainingData, TrainingRows
from dkfm.kernels.base import Definiteness, Kernel
from dkfm.numerics import pivoted_cholesky, roots
from dkfm.numerics.map_error_bounds import Residuals, bound_landmark_residuals
from dkfm.numerics.pivoted_cholesky import Pivots
from dkfm.numerics.roots import Root, row_lengths

SELECTORS = ("uniform", "kmeans", "pivots", "random_pivots")
BUILDS = ("auto", "gram", "columns", "rounds", "tiled")
CERTIFIED_ROWS = ("all", "sample")

SAMPLED_ROWS = 1024
"""Number of training rows, drawn at random, that `certify="sample"` visits.

With a probability of 95 %, at most 0.3 % of all rows have a larger residual than the largest of the sample.
"""


@dataclass(frozen=True)
class MapOptions:
    """The parameters of `ExactFeatureMap` of the same names."""

    basis: str
    dtype: str
    build: str
    tol: float | None
    rcond: float | None
    on_indefinite: str
    certify: str
    tile_rows: int | None
    workspace: str | Path | None
    progress: bool

    def require_valid(self, landmarks: object) -> None:
        """Raise an InvalidInputError if a parameter is unknown, or contradicts another one."""
        roots.require_parameters(self.basis, self.rcond, self.tol)
        for name, known in (("build", BUILDS), ("certify", CERTIFIED_ROWS)):
            if (value := getattr(self, name)) not in known:
                raise InvalidInputError(f"{name} must be one of {', '.join(known)}, and is {value!r}.")
        if self.basis == "cholesky" and self.on_indefinite == "clip":
            raise InvalidInputError(
                'on_indefinite="clip" drops eigenvalues, and the cholesky basis has pivots; use basis="spectral".'
            )
        if self.build == "tiled":
            right = {"basis": self.basis == "cholesky", "dtype": self.dtype == "float64", "tol": self.tol is None}
            right |= {"landmarks": landmarks is None}
            if wrong := [name for name, is_right in right.items() if not is_right]:
                what = "all features of all rows, in float64 and the cholesky basis"
                raise InvalidInputError(f'build="tiled" keeps {what}: change {", ".join(wrong)}.')
            if self.workspace is None:
                raise InvalidInputError('build="tiled" leaves the weights on disk: name a folder, workspace=.')
        if self.certify == "sample" and (self.tol is not None or self.on_indefinite == "clip"):
            name = "tol=" if self.tol is not None else 'on_indefinite="clip"'
            raise InvalidInputError(f'{name} needs the errors of all training rows; use certify="all".')


@dataclass(frozen=True, eq=False)
class ChosenLandmarks:
    """Landmarks, and how they were chosen."""

    landmarks: TrainingData
    all_rows: bool = False
    """Whether the landmarks are all training rows."""
    pivots: Pivots | None = None
    """Pivots of the training rows, if a selector of pivots chose the landmarks."""
    certified_rows: TrainingData | None = None
    """Training rows that the certificate visits; None is all of them."""


def count_largest_matrix_rows(n: int, n_landmarks: object, certify: str) -> int:
    """Return the number of rows of the largest matrices that a fit to n rows multiplies or decomposes."""
    if certify == "all" or not isinstance(n_landmarks, int):
        return n
    return min(n, max(n_landmarks, SAMPLED_ROWS))


def choose_landmarks(
    data: TrainingData, landmarks: object, n_landmarks: int | None, random_state: object, options: MapOptions
) -> ChosenLandmarks:
    """Return the landmarks that the parameters of `ExactFeatureMap` specify, and the rows that are to be certified.

    Raises
    ------
    InvalidInputError
        The selector is unknown, an index is not that of a row, or there are too many or too few landmarks.
    """
    try:
        rng = check_random_state(random_state)
    except ValueError as error:
        raise InvalidInputError(f"random_state: {error}.") from None
    chosen = _choose(data, landmarks, n_landmarks, rng, options)
    # Landmarks are drawn first: they do not depend on `certify`.
    return replace(chosen, certified_rows=_draw_certified_rows(data, chosen, rng, options))


def _choose(
    data: TrainingData, landmarks: object, n_landmarks: int | None, rng: RandomState, options: MapOptions
) -> ChosenLandmarks:
    n = data.indexable_rows.shape[0]
    if isinstance(landmarks, int | np.integer):
        raise InvalidInputError("landmarks= takes landmarks themselves, or a selector; their number is n_landmarks.")
    if landmarks is None:
        if n_landmarks is not None:
            raise InvalidInputError(f"n_landmarks needs landmarks=, one of {', '.join(SELECTORS)}.")
        return ChosenLandmarks(data, all_rows=True)
    if not isinstance(landmarks, str):
        if n_landmarks is not None:
            raise InvalidInputError("n_landmarks belongs to a selector; the landmarks that are given are all taken.")
        return ChosenLandmarks(_use_given(data, landmarks))
    if landmarks not in SELECTORS:
        raise InvalidInputError(
            f"landmarks must be numbers of rows, points, or one of {', '.join(SELECTORS)}, and is {landmarks!r}."
        )
    if n_landmarks is None and landmarks != "pivots":
        raise InvalidInputError(f'landmarks="{landmarks}" needs n_landmarks.')
    count = n if n_landmarks is None else require_count(n_landmarks, "n_landmarks")
    if count > n:
        warn_caller(f"n_landmarks is {count} and there are {n} rows, which are taken.")
        count = n
    if landmarks == "uniform":
        return ChosenLandmarks(data.subset(np.sort(rng.choice(n, count, replace=False))))
    if landmarks == "kmeans":
        return ChosenLandmarks(_find_centres(data, count, rng))
    pivots = _find_pivots(data, options, count, rng if landmarks == "random_pivots" else None)
    return ChosenLandmarks(_select_pivot_rows(data, pivots), pivots=pivots)


def _draw_certified_rows(
    data: TrainingData, chosen: ChosenLandmarks, rng: RandomState, options: MapOptions
) -> TrainingData | None:
    """Draw the rows that `certify="sample"` visits; None if all rows are visited."""
    n = data.indexable_rows.shape[0]
    knows_residuals = chosen.pivots is not None and options.basis == "cholesky"
    if options.certify == "all" or knows_residuals or n <= SAMPLED_ROWS or uses_all_rows(chosen.landmarks, data):
        return None
    return data.subset(np.sort(sample_without_replacement(n, SAMPLED_ROWS, random_state=rng)))


def uses_all_rows(landmarks: TrainingData, data: TrainingData) -> bool:
    """Return whether the landmarks are all training rows, in any order."""
    are_rows = landmarks is data or landmarks.original_row_indices is not None
    return are_rows and landmarks.indexable_rows.shape[0] == data.indexable_rows.shape[0]


def _use_given(data: TrainingData, landmarks: object) -> TrainingData:
    require_rows_container(landmarks)
    indices = np.asarray(landmarks) if not hasattr(landmarks, "tocsr") else None
    if indices is not None and indices.ndim == 1:
        n, known = data.indexable_rows.shape[0], data.original_row_indices
        known = np.arange(n) if known is None else known
        if indices.dtype == np.bool_:
            if len(indices) <= known[-1]:
                raise InvalidInputError(
                    f"landmarks are a mask of {len(indices)} rows, and X has {known[-1] + 1} at least."
                )
            indices = np.flatnonzero(indices)
        if indices.dtype.kind not in "iu" or not len(indices):
            raise InvalidInputError("landmarks in one dimension are the numbers of training rows: some integers.")
        # Rows of weight 0 were removed, but users pass the original indices.
        if not np.isin(indices, known).all() or len(np.unique(indices)) != len(indices):
            last = int(known[-1])
            raise InvalidInputError(f"landmarks must be different numbers of rows of some weight, from 0 to {last}.")
        return data.subset(np.searchsorted(known, indices))
    if data.kernel.is_precomputed:
        raise InvalidInputError("The landmarks of a precomputed kernel are numbers of rows, for it has no points.")
    rows = as_float64(as_rows(landmarks, "landmarks"))
    if rows.shape[1] != data.indexable_rows.shape[1]:
        raise InvalidInputError(f"landmarks have {rows.shape[1]} columns and X has {data.indexable_rows.shape[1]}.")
    return TrainingRows(data.kernel, rows.copy(), data.float64s_per_row)


def _find_centres(data: TrainingData, count: int, rng: RandomState) -> TrainingData:
    from sklearn.cluster import KMeans

    if not isinstance(data, TrainingRows):
        raise InvalidInputError('landmarks="kmeans" needs points, and a precomputed kernel has none.')
    n = data.indexable_rows.shape[0]
    log_stage("landmarks", f"{count:,} centres of {n:,} rows in this process", rows=n, landmarks=count)
    centres = KMeans(count, n_init=1, random_state=rng).fit(data.indexable_rows).cluster_centers_
    return TrainingRows(data.kernel, np.ascontiguousarray(centres, dtype=np.float64), centres.shape[1])


def factor_landmarks(chosen: ChosenLandmarks, options: MapOptions) -> tuple[TrainingData, Root, Residuals | None]:
    """Return the landmarks of a map, their root, and the residuals of all training rows if they are known.

    In the cholesky basis the pivots are the landmarks.

    Raises
    ------
    NotPSDError
        The Gram matrix of the landmarks is not positive semi-definite, and `on_indefinite` is "raise".
    BudgetError
        The Gram matrix or its root does not fit in memory.
    """
    landmarks, pivots = chosen.landmarks, chosen.pivots
    if options.build == "tiled":
        return landmarks, *compute_tiled_root(landmarks, options.tile_rows, options.workspace, options.progress)
    if options.basis == "cholesky":
        if pivots is not None:
            return landmarks, _root_of_pivots(pivots), pivots.residual_summary
        # `tol` bounds the error of all training rows; with only some of them here, `fit_map` applies it.
        options = options if chosen.all_rows else replace(options, tol=None)
        pivots = _find_pivots(landmarks, options, None)
        residuals = pivots.residual_summary if chosen.all_rows else None
        return _select_pivot_rows(landmarks, pivots), _root_of_pivots(pivots), residuals
    return landmarks, *_decompose_gram(landmarks, chosen.all_rows, options)


def _decompose_gram(landmarks: TrainingData, are_all_rows: bool, options: MapOptions) -> tuple[Root, Residuals | None]:
    """Return the root of the landmarks from the eigenvectors of their Gram matrix, and residuals if they are known."""
    _require_gram_memory(landmarks, budget.EIGENVECTOR_SQUARES)
    # `pop` drops the last reference in this frame, so that the solver can free the N^2 values.
    gram_holder = [landmarks.compute_gram(options.tile_rows, options.workspace, options.progress)]
    n, what = landmarks.indexable_rows.shape[0], _describe_gram(landmarks.kernel)
    seconds = budget.eigendecomposition_seconds(n)
    lengths = row_lengths(gram_holder[0].diagonal())
    log_stage("root", f"eigenvectors of {n:,} x {n:,} kernel values in this process", seconds=seconds, rows=n)
    with progress.show_elapsed_bar(seconds, options.progress):
        rotated_rank = _choose_rotation_rank(gram_holder[0], lengths, options, landmarks)
        scales = lengths if rotated_rank or (options.basis == "spectral" and options.on_indefinite != "clip") else None
        root = roots.inverse_root(gram_holder.pop(), options.rcond, options.on_indefinite, what, scales)
        if rotated_rank:  # eigenvalues beyond this rank are rounding; a rotation would spread them over all features
            root = roots.add_rotation(root.truncate(min(rotated_rank, len(root.values))))
    # In other units, the rounding of the root would hide the residuals of short rows: they are measured with features.
    known = are_all_rows and (root.is_scaled(lengths) or landmarks.kernel.is_precomputed)
    return root, bound_landmark_residuals(root, lengths) if known else None


def _choose_rotation_rank(K: Array, lengths: Array, options: MapOptions, landmarks: TrainingData) -> int:
    """Return the rank of a symmetric root with a rotation; 0 if a rotation is not used, or does not fit in memory."""
    if options.basis != "symmetric" or options.on_indefinite == "clip":
        return 0
    return roots.choose_rank_for_rotation(K, lengths) if _has_gram_memory(landmarks, budget.ROTATION_SQUARES) else 0


def _select_pivot_rows(data: TrainingData, pivots: Pivots) -> TrainingData:
    """Return the pivots as landmarks, or the first row if there are none, because a model needs a landmark."""
    return data.subset(pivots.row_indices if len(pivots.row_indices) else np.zeros(1, np.intp))


def _root_of_pivots(pivots: Pivots) -> Root:
    """Return the root of the pivots, or a root of rank 0 for one landmark if there are none."""
    empty = Root(np.zeros((1, 0)), pivots.root.values, pivots.root.dropped_values, np.ones(1))
    return pivots.root if len(pivots.row_indices) else empty


def _find_pivots(data: TrainingData, options: MapOptions, limit: int | None, rng: RandomState | None = None) -> Pivots:
    """Find pivots in the Gram matrix, column by column or in rounds, as requested or by the fastest prediction.

    With `rng`, a row is drawn with a probability proportional to its residual; else the largest residual is first.
    """
    build = _choose_pivot_build(data, options, limit, rng)
    if build == "rounds":
        return _find_pivots_in_rounds(data, options, limit, rng)
    may_take_rounds = options.build == "auto" and not data.kernel.is_precomputed
    if build != "gram":
        pivots = _find_pivots_by_columns(data, options, limit, rng, build == "columns", may_take_rounds)
        if pivots is not None:
            return pivots
    if may_take_rounds and (build == "columns" or not _has_gram_memory(data, budget.PIVOT_SQUARES)):
        return _find_pivots_in_rounds(data, options, limit, rng)
    return _find_pivots_in_gram(data, options, limit)


def _choose_pivot_build(data: TrainingData, options: MapOptions, limit: int | None, rng: RandomState | None) -> str:
    """Return "gram", "columns" or "rounds"; or "auto" for columns until another way is predicted to be faster."""
    n, d, build = data.indexable_rows.shape[0], data.float64s_per_row, options.build
    if isinstance(data, StreamedRows) or build == "rounds":
        return "rounds"
    if rng is not None:
        if build == "gram":
            raise InvalidInputError('build="gram" takes the largest pivots; random ones are taken by columns.')
        return "columns"
    if data.kernel.is_precomputed:  # the matrix already exists
        return "gram"
    if build != "auto":
        return build
    max_pivots = limit or n
    by_gram = budget.gram_and_pivots_seconds(n, d, max_pivots)
    by_columns = budget.columnwise_pivots_seconds(n, d, min(max_pivots, pivoted_cholesky.BLOCK_COLUMNS))
    return "gram" if by_gram <= by_columns else "auto"


def _find_pivots_in_gram(data: TrainingData, options: MapOptions, limit: int | None) -> Pivots:
    """Find pivots with the whole Gram matrix in memory."""
    _require_gram_memory(data, budget.PIVOT_SQUARES)
    n = data.indexable_rows.shape[0]
    # As in `_decompose_gram`, the solver frees the N^2 values.
    gram_holder = [data.compute_gram(options.tile_rows, options.workspace, options.progress)]
    seconds = budget.gram_and_pivots_seconds(n, 0, n)
    log_stage("root", f"up to {limit or n:,} pivots of {n:,} rows in this process", seconds=seconds, rows=n)
    with progress.show_elapsed_bar(seconds, options.progress):
        return pivoted_cholesky.factor_gram(gram_holder.pop(), options.tol, limit)


def _find_pivots_by_columns(
    data: TrainingData,
    options: MapOptions,
    limit: int | None,
    rng: RandomState | None,
    is_columns_only: bool,
    may_take_rounds: bool,
) -> Pivots | None:
    """Find pivots column by column; return None where another way is predicted to be faster, or fits in memory."""
    if data.kernel.is_precomputed:  # its columns are those of the matrix in memory
        _require_gram_memory(data, budget.PIVOT_SQUARES)
    n = data.indexable_rows.shape[0]
    choose = pivoted_cholesky.choose_largest if rng is None else pivoted_cholesky.make_random_chooser(rng)
    max_pivots = limit or n
    log_stage("root", f"up to {max_pivots:,} pivots of {n:,} rows, column by column, in this process", rows=n)
    with progress.step_bar("dkfm-root", None, "pivot", options.progress) as bar:
        threshold = pivoted_cholesky.pivot_threshold(options.tol)
        monitor = _ColumnMonitor(data, threshold, max_pivots, is_columns_only, may_take_rounds, bar)
        evaluate = data.make_column_evaluator()
        pivots = pivoted_cholesky.factor_columns(data.diagonal(), evaluate, options.tol, limit, choose, monitor)
        bar.total = bar.n if pivots is None else len(pivots.row_indices)
        bar.update(bar.total - bar.n)
    return pivots


def _find_pivots_in_rounds(
    data: TrainingData, options: MapOptions, limit: int | None, rng: RandomState | None
) -> Pivots:
    if data.kernel.is_precomputed:
        raise InvalidInputError('build="rounds" needs points, and a precomputed kernel has none.')
    return out_of_core_rows.find_pivots(
        data, limit, rng, tol=options.tol, workspace=options.workspace, show_progress=options.progress
    )


@dataclass(frozen=True)
class _ColumnMonitor:
    """Decide whether to continue column by column: while memory suffices and the Gram matrix would not be faster.

    `factor_columns` calls it before each block of columns. It also updates the progress bar.
    """

    data: TrainingData
    residual_threshold: float
    max_pivots: int
    is_columns_only: bool
    may_take_rounds: bool
    bar: progress.Bar

    def __call__(self, count: int, remaining: Array) -> bool:
        n, d = self.data.indexable_rows.shape[0], self.data.float64s_per_row
        rank = min(self.max_pivots, pivoted_cholesky.forecast_rank(remaining, self.residual_threshold, n))
        self.bar.total = rank if count else None
        self.bar.update(count - self.bar.n)
        available = memory.clear_caches_and_measure_memory() + 8 * n * count
        next_columns = min(self.max_pivots, count + pivoted_cholesky.BLOCK_COLUMNS)
        need = budget.columnwise_pivots_bytes(n, d, next_columns, self.data.kernel.landmark_copies)
        gram_fits = not self.is_columns_only and _has_gram_memory(self.data, budget.PIVOT_SQUARES)
        if count and gram_fits:
            seconds_left = budget.columnwise_pivots_seconds(n, d, rank) - budget.columnwise_pivots_seconds(n, d, count)
            if seconds_left > budget.gram_and_pivots_seconds(n, d, rank) or need > available:
                return False
        if need > available and self.may_take_rounds and not gram_fits:
            return False
        error_bound = float(np.sqrt(remaining[-1]))
        remedy = f"after {count} of them the error bound is {error_bound:.1e}: use tol= or n_landmarks=, or fewer rows"
        budget.require_fits(need, available, f"A root of {next_columns} pivots of N = {n} rows", remedy)
        return True


def _has_gram_memory(data: TrainingData, squares: int) -> bool:
    n, d, kernel = data.indexable_rows.shape[0], data.float64s_per_row, data.kernel
    return memory.has_factorization_memory(n, d, kernel.peak_blocks, kernel.landmark_copies, squares)


def _require_gram_memory(data: TrainingData, squares: int) -> None:
    n, d, kernel = data.indexable_rows.shape[0], data.float64s_per_row, data.kernel
    memory.require_factorization_memory(n, d, kernel.peak_blocks, kernel.landmark_copies, squares)


def _describe_gram(kernel: Kernel) -> str:
    """Name the Gram matrix in error messages; for a conditionally definite kernel, also what supports it."""
    is_conditional = kernel.definiteness is Definiteness.CONDITIONAL
    hint = " (KernelPCA takes this kernel, and maps take Exp of it)" if is_conditional else ""
    return f"The Gram matrix of {kernel!r}{hint}"
