"""Which rows a map is built on, and their root: all of them, the user's, or those that a selector picks."""

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from sklearn.utils import check_random_state

from dkfm.core import budget
from dkfm.core.chunking import require_count
from dkfm.core.rows import Array, as_float64, as_rows
from dkfm.errors import BudgetError, DkfmWarning, InvalidInputError
from dkfm.estimators.fitting.training_data import TrainingData, TrainingRows
from dkfm.execution import memory, progress
from dkfm.kernels import Definiteness
from dkfm.kernels.base import Kernel
from dkfm.numerics import pivoted_cholesky, roots
from dkfm.numerics.roots import Root, remaining_after_eigenvectors

if TYPE_CHECKING:
    from typing import Never

    from tqdm import tqdm

SELECTORS = ("uniform", "kmeans", "pivots", "random_pivots")
BUILDS = ("auto", "gram", "columns")


@dataclass(frozen=True)
class MapOptions:
    """How a map is made: the parameters of `ExactFeatureMap` of these names."""

    basis: str
    dtype: str
    build: str
    tol: float | None
    rcond: float | None
    on_indefinite: str
    tile_rows: int | None
    workspace: str | Path | None
    progress: bool


@dataclass(frozen=True, eq=False)
class ChosenLandmarks:
    """Landmarks, and what finding them has told.

    Attributes
    ----------
    landmarks : Training
    whole : bool
        Whether they are all training rows.
    pivots : Pivots, optional
        Where they were found as pivots of the training rows.
    """

    landmarks: TrainingData
    whole: bool = False
    pivots: pivoted_cholesky.Pivots | None = None


def choose_landmarks(
    given: TrainingData, landmarks: object, n_landmarks: int | None, random_state: object, settings: MapOptions
) -> ChosenLandmarks:
    """Return the landmarks that are meant: see `ExactFeatureMap`.

    Raises
    ------
    InvalidInputError
        A selector that does not exist, numbers that are no rows, or too many or too few of them.
    """
    n = given.landmarks.shape[0]
    if isinstance(landmarks, int | np.integer):
        raise InvalidInputError("landmarks= takes landmarks themselves, or a selector; their number is n_landmarks.")
    if landmarks is None:
        if n_landmarks is not None:
            raise InvalidInputError(f"n_landmarks needs landmarks=, one of {', '.join(SELECTORS)}.")
        return ChosenLandmarks(given, whole=True)
    if not isinstance(landmarks, str):
        if n_landmarks is not None:
            raise InvalidInputError("n_landmarks belongs to a selector; the landmarks that are given are all taken.")
        return ChosenLandmarks(_given_landmarks(given, landmarks))
    if landmarks not in SELECTORS:
        raise InvalidInputError(
            f"landmarks must be numbers of rows, points, or one of {', '.join(SELECTORS)}, and is {landmarks!r}."
        )
    if n_landmarks is None and landmarks != "pivots":
        raise InvalidInputError(f'landmarks="{landmarks}" needs n_landmarks.')
    count = n if n_landmarks is None else require_count(n_landmarks, "n_landmarks")
    if count > n:
        warnings.warn(f"n_landmarks is {count} and there are {n} rows, which are taken.", DkfmWarning, stacklevel=3)
        count = n
    try:
        rng = check_random_state(random_state)
    except ValueError as error:
        raise InvalidInputError(f"random_state: {error}.") from None
    if landmarks == "uniform":
        return ChosenLandmarks(given.subset(np.sort(rng.choice(n, count, replace=False))))
    if landmarks == "kmeans":
        return ChosenLandmarks(_centres(given, count, rng))
    random = landmarks == "random_pivots"
    found = _pivots(given, settings, count, _by_chance(rng) if random else pivoted_cholesky.choose_largest, random)
    return ChosenLandmarks(_subset(given, found), pivots=found)


def _given_landmarks(given: TrainingData, landmarks: object) -> TrainingData:
    array = np.asarray(landmarks) if not hasattr(landmarks, "tocsr") else None
    if array is not None and array.ndim == 1 and given.numbers is not None:
        array = np.flatnonzero(array) if array.dtype == np.bool_ else array
        if array.dtype.kind not in "iu" or not len(array):
            raise InvalidInputError("landmarks in one dimension are the numbers of training rows: some integers.")
        # Rows of weight 0 are left out, and the others keep their numbers.
        if not np.isin(array, given.numbers).all() or len(np.unique(array)) != len(array):
            last = int(given.numbers[-1])
            raise InvalidInputError(f"landmarks must be different numbers of rows of some weight, from 0 to {last}.")
        return given.subset(np.searchsorted(given.numbers, array))
    if not isinstance(given, TrainingRows):
        raise InvalidInputError("The landmarks of a precomputed kernel are numbers of rows, for it has no points.")
    rows = as_float64(as_rows(landmarks, "landmarks"))
    if rows.shape[1] != given.landmarks.shape[1]:
        raise InvalidInputError(f"landmarks have {rows.shape[1]} columns and X has {given.landmarks.shape[1]}.")
    return TrainingRows(given.kernel, rows.copy(), given.width)


def _centres(given: TrainingData, count: int, rng: np.random.RandomState) -> TrainingData:
    from sklearn.cluster import KMeans

    if not isinstance(given, TrainingRows):
        raise InvalidInputError('landmarks="kmeans" needs points, and a precomputed kernel has none.')
    centres = KMeans(count, n_init=1, random_state=rng).fit(given.landmarks).cluster_centers_
    return TrainingRows(given.kernel, np.ascontiguousarray(centres, dtype=np.float64), centres.shape[1])


def _by_chance(rng: np.random.RandomState) -> pivoted_cholesky.Choose:
    """Choose rows with a chance that grows with what the pivots do not explain of them (randomly pivoted Cholesky)."""

    def choose(left: Array) -> int:
        sums = np.cumsum(np.maximum(left, 0.0))
        return min(len(sums) - 1, int(np.searchsorted(sums, rng.uniform(high=sums[-1]), side="right")))

    return choose


def factor_landmarks(chosen: ChosenLandmarks, settings: MapOptions) -> tuple[TrainingData, Root, Array | None]:
    """Return the landmarks of a map, their root, and what it leaves of training rows, (r + 1,), where that is known.

    In the cholesky basis the landmarks are the pivots alone.

    Raises
    ------
    NotPSDError, BudgetError
    """
    landmarks, found = chosen.landmarks, chosen.pivots
    if settings.basis == "cholesky":
        if found is not None:
            return landmarks, _of(found), found.remaining
        # Of some rows a tolerance is one of all rows, which are looked at later.
        found = _pivots(
            landmarks, settings if chosen.whole else replace(settings, tol=None), None, pivoted_cholesky.choose_largest
        )
        return _subset(landmarks, found), _of(found), found.remaining if chosen.whole else None
    _require_square(landmarks, budget.EIGENVECTOR_SQUARES)
    # Popped, so that nothing here keeps N^2 values.
    held = [landmarks.gram(settings.tile_rows, settings.workspace, settings.progress)]
    what = _gram_of(landmarks.kernel)
    with progress.call_bar(
        "dkfm-root", budget.eigendecomposition_seconds(landmarks.landmarks.shape[0]), settings.progress
    ):
        root = roots.inverse_root(held.pop(), settings.rcond, settings.on_indefinite, what)
    return landmarks, root, remaining_after_eigenvectors(root, landmarks.diagonal()) if chosen.whole else None


def _subset(given: TrainingData, found: pivoted_cholesky.Pivots) -> TrainingData:
    """Return the rows that are pivots; where the kernel is zero there are none, and a model still needs a landmark."""
    return given.subset(found.numbers if len(found.numbers) else np.zeros(1, np.intp))


def _of(found: pivoted_cholesky.Pivots) -> Root:
    nothing = Root(np.zeros((1, 0)), found.root.values, found.root.dropped)
    return found.root if len(found.numbers) else nothing


def _pivots(
    given: TrainingData,
    settings: MapOptions,
    limit: int | None,
    choose: pivoted_cholesky.Choose,
    by_chance: bool = False,
) -> pivoted_cholesky.Pivots:
    """Find pivots in the Gram matrix or column by column, whichever was asked for or is predicted to cost less."""
    n, d, build = given.landmarks.shape[0], given.width, settings.build
    most = limit or n
    if by_chance and build == "gram":
        raise InvalidInputError('build="gram" takes the largest pivots; random ones are taken by columns.')
    if by_chance:
        build = "columns"
        if given.kernel.is_precomputed:
            _require_square(given, budget.PIVOT_SQUARES)
    elif given.kernel.is_precomputed:
        build = "gram"  # which is there
    elif build == "auto" and budget.pivots_seconds(n, d, most) <= budget.pivot_columns_seconds(
        n, d, min(most, pivoted_cholesky.BLOCK_COLUMNS)
    ):
        build = "gram"
    if build != "gram":
        diagonal = given.diagonal()
        with progress.step_bar("dkfm-root", None, "pivot", settings.progress) as bar:
            go_on = _Columns(
                given, pivoted_cholesky.pivot_threshold(diagonal, settings.tol), most, build == "columns", bar
            )
            found = pivoted_cholesky.factor_columns(diagonal, given.columns(), settings.tol, limit, choose, go_on)
            bar.total = bar.n if found is None else len(found.numbers)
            bar.update(bar.total - bar.n)
        if found is not None:
            return found
    _require_square(given, budget.PIVOT_SQUARES)
    held = [given.gram(settings.tile_rows, settings.workspace, settings.progress)]
    with progress.call_bar("dkfm-root", budget.pivots_seconds(n, 0, n), settings.progress):
        return pivoted_cholesky.factor_gram(held.pop(), settings.tol, limit)


@dataclass(frozen=True)
class _Columns:
    """Whether to go on column by column: while memory lasts, and the Gram matrix would not cost less.

    It is asked every some columns, and moves the bar.
    """

    given: TrainingData
    stop: float
    limit: int
    forced: bool
    bar: "tqdm[Never]"

    def __call__(self, taken: int, remaining: Array) -> bool:
        n, d, copies = self.given.landmarks.shape[0], self.given.width, self.given.kernel.landmark_copies
        rank = min(self.limit, forecast_rank(remaining, self.stop, n))
        self.bar.total = rank if taken else None
        self.bar.update(taken - self.bar.n)
        have = memory.available_memory() + 8 * n * taken
        more_columns = min(self.limit, taken + pivoted_cholesky.BLOCK_COLUMNS)
        need = budget.pivot_columns_bytes(n, d, more_columns, copies)
        if taken and not self.forced and self._square_fits():
            more = budget.pivot_columns_seconds(n, d, rank) - budget.pivot_columns_seconds(n, d, taken)
            if more > budget.pivots_seconds(n, d, rank) or need > have:
                return False
        reached = float(np.sqrt(remaining[-1] / remaining[0])) if remaining[0] > 0 else 0.0
        remedy = f"after {taken} of them the error bound is {reached:.1e}: use tol= or n_landmarks=, or fewer rows"
        budget.require_fits(need, have, f"A root of {more_columns} pivots of N = {n} rows", remedy)
        return True

    def _square_fits(self) -> bool:
        try:
            _require_square(self.given, budget.PIVOT_SQUARES)
        except BudgetError:
            return False
        return True


def forecast_rank(remaining: Array, stop: float, n: int) -> int:
    """Forecast the rank: what remains after 0, 1, .. r pivots goes on falling as it did from r / 2 to r.

    >>> forecast_rank(np.array([1.0, 1e-1, 1e-2]), 1e-6, 100)
    6
    """
    r = len(remaining) - 1
    half = r // 2
    if r == 0 or remaining[-1] <= stop:
        return n if r == 0 else r
    fall = np.log(remaining[half] / remaining[-1]) / (r - half)
    return n if fall <= 0 else min(n, int(np.ceil(r + np.log(remaining[-1] / stop) / fall - 1e-9)))


def _require_square(given: TrainingData, squares: int) -> None:
    n, kernel = given.landmarks.shape[0], given.kernel
    memory.require_driver_memory(n, given.width, kernel.peak_blocks, kernel.landmark_copies, squares)


def _gram_of(kernel: Kernel) -> str:
    """Say what is decomposed, and of a kernel that is not known to have a root what has one."""
    if kernel.definiteness is Definiteness.CONDITIONAL:
        return f"The Gram matrix of {kernel!r} (only conditionally so: KernelPCA takes it, and Exp(k) has a map)"
    return f"The Gram matrix of {kernel!r}"
