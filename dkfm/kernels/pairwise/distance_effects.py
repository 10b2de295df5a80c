"""Find the squared distances at which errors change kernel values, and those beyond which a kernel vanishes."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from dkfm.core.chunking import row_slices
from dkfm.core.rows import Array
from dkfm.kernels.pairwise.block_operations import is_far_above_subnormals, lower_exponents_below

FLOAT32_LIMIT = 1e-5
"""Largest error of a kernel value in float32, relative to the value at distance 0; beyond it, float64 is used."""

VALUE_ERRORS = {np.dtype(np.float64): 5e-16, np.dtype(np.float32): FLOAT32_LIMIT}
"""Largest error of a kernel value, relative to the value at distance 0, that a matrix product may cause. In float64, it
matters for rows of large norms."""

_SQUARES: Array = np.geomspace(1e-6, 1e12, 1200)
"""Squared distances at which kernel values are examined."""

_NEAREST_VANISHING_SQUARE = 16.0
"""Squared distance up to which pairs are not searched, because hardly any kernel vanishes at such short distances."""

_REFINED_STEPS = 1000
"""Parts into which a step between two of these distances is divided, twice."""

_ROUNDING = 1e-3
"""Share by which the bounds of distances are widened, so that rounding does not exceed them. A row whose bound is below
the limit then has no pair above it, so its values do not depend on other rows of the block."""

_SMALLEST_SUBNORMAL = float(np.finfo(np.float64).smallest_subnormal)

_ROWS_AT_ONCE = 16

MapValues = Callable[[Array], Array]
"""Function from minus squared distances, which it may overwrite, to kernel values."""

Effects = tuple[tuple[MapValues, float], ...]
"""Kernels that determine up to which distance errors matter, and factors of the minus squared distances they take."""


def scale_effect(effect: MapValues, share: float) -> MapValues:
    """Return a kernel divided by a number, so that errors above this share of the limit count."""
    return lambda negative_squares: effect(negative_squares) / share


def find_squared_cutoff(effect: MapValues, error: float, dtype: np.dtype[np.floating]) -> float:
    """Return the largest computed squared distance at which an error of it changes a kernel's value."""
    values = effect(-_SQUARES), effect(-(_SQUARES + error))
    matters = _SQUARES[np.abs(values[0] - values[1]) > VALUE_ERRORS[dtype]]
    # A computed distance is less than an error above the true one.
    return float(matters.max() + error) if len(matters) else 0.0


def find_vanishing_square(map_values: MapValues, dtype: np.dtype[np.floating], least: float | None = None) -> float:
    """Return the squared distance beyond which a kernel is less than the normal numbers of a dtype, or than `least`.

    It is infinite if there is none, or if these numbers are not far below the kernel's value at distance 0.

    >>> round(find_vanishing_square(np.exp, np.dtype(np.float32)), 2)  # log(2^126)
    87.34
    """
    squares = np.concatenate([np.zeros(1), _SQUARES])
    least = float(np.finfo(dtype).tiny) if least is None else least
    if not is_far_above_subnormals(float(map_values(np.zeros(1))[0]), dtype):
        return np.inf
    for _ in range(3):
        normal = np.flatnonzero(map_values(-squares) >= least)
        if normal[-1] + 1 == len(squares):  # at 0 the kernel is normal
            return np.inf
        squares = np.linspace(squares[normal[-1]], squares[normal[-1] + 1], _REFINED_STEPS + 1)
    return float(squares[0])


class VanishingPairs:
    """Replace distances at which a kernel is subnormal in its dtype by a distance at which it is 0.

    Arithmetic on subnormal numbers takes up to a hundred times as long.

    Parameters
    ----------
    map_values : callable or None
        The kernel; None if it does not vanish.
    """

    def __init__(self, map_values: MapValues | None) -> None:
        self._map_values = map_values
        self._limits: dict[np.dtype[np.floating], tuple[float, float]] = {}

    def overwrite(
        self,
        negative_squares: Array,
        largest_squares: npt.NDArray[np.floating],
        smallest_squares: npt.NDArray[np.floating] | float = 0.0,
    ) -> None:
        """Overwrite minus squared distances (n, m) in place; the others, (n,), are bounds on those of each row."""
        if self._map_values is None or largest_squares.max(initial=0.0) <= _NEAREST_VANISHING_SQUARE:
            return
        dtype = negative_squares.dtype
        if dtype not in self._limits:  # threads may compute it twice
            rounded_to_0 = max(float(np.finfo(dtype).smallest_subnormal) / 2, _SMALLEST_SUBNORMAL)
            self._limits[dtype] = (
                max(find_vanishing_square(self._map_values, dtype), _NEAREST_VANISHING_SQUARE),
                find_vanishing_square(self._map_values, dtype, rounded_to_0),
            )
        limit, zero = self._limits[dtype]
        # Rows whose values are all 0 need no change.
        may_vanish = (largest_squares * (1 + _ROUNDING) > limit) & (smallest_squares <= zero)
        if may_vanish.all():
            lower_exponents_below(-limit, negative_squares)
            return
        for part in row_slices(len(negative_squares), _ROWS_AT_ONCE):
            if may_vanish[part].any():
                lower_exponents_below(-limit, negative_squares[part])
