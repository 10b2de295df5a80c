"""Measure the rounding error of a kernel's own values, in units of ``sqrt(k(x, x) k(z, z))``."""

from dataclasses import fields, is_dataclass, replace

import numpy as np
import numpy.typing as npt

from dkfm.core.rows import Array, Rows, squared_norms
from dkfm.errors import DkfmError
from dkfm.kernels.base import Kernel
from dkfm.kernels.serialization import is_code_free
from dkfm.kernels.transformed import Warped
from dkfm.numerics.map_error_bounds import MIN_KERNEL_ROUNDING
from dkfm.numerics.roots import EPS, replace_zero_lengths, row_lengths
from dkfm.numerics.scorer import Scorer

_JUMP = 1e-4
"""Change of a value above which the function has a jump, which is not rounding."""

_UNSEEN_PAIRS = 4.0
"""Factor by which the error of a pair outside the sample may exceed the largest error in the sample."""

_BETWEEN = 10.0 ** -np.arange(0.5, 8.5, 0.5)
"""Positions of points on lines between sampled rows; rows far apart would give no pairs at medium distances."""

_CHANGED_ROWS = 128
"""Number of sampled rows whose kernel values with the whole sample are computed twice, besides the extreme rows."""

_MAX_EXTREME_COLUMNS = 32
"""Number of columns whose rows of the largest and smallest numbers count as extreme rows."""

_EPS32 = float(np.finfo(np.float32).eps)

_MIN_FLOAT32_ROUNDING = 8 * _EPS32


def measure_in_float64(kernel: Kernel, rows: Rows) -> float:
    """Measure how far kernel values of rows (s, d) change if each number changes by its last bit.

    Kernel values of some of the rows, and of points between them, with all rows are compared. The signs of the changes
    are random, from a fixed seed. If the kernel maps rows first, as `Kernel.warp` does, the numbers of the mapped rows
    are changed too, because a map may have larger rounding errors than the last bits of its rows explain. Values of a
    precomputed kernel are exact.
    """
    if kernel.is_precomputed:
        return MIN_KERNEL_ROUNDING
    diagonal, has_code = kernel.evaluate_diagonal(rows), not is_code_free(kernel)
    evaluate, lengths = kernel.make_evaluator(rows), replace_zero_lengths(row_lengths(diagonal))
    mapped_otherwise = _perturb_warp_maps(kernel)
    maps_differ = isinstance(rows, np.ndarray) and mapped_otherwise is not kernel
    extreme = find_rounding_probe_rows(rows, diagonal)
    some = rows[np.union1d(extreme, np.arange(0, len(diagonal), max(1, len(diagonal) // _CHANGED_ROWS)))]
    points, largest = [some], MIN_KERNEL_ROUNDING
    if maps_differ or not has_code:
        points.append(_make_points_between_rows(rows, extreme))
    with np.errstate(over="ignore", invalid="ignore"):  # non-finite values raise elsewhere
        for z in points:
            try:
                own, values = replace_zero_lengths(row_lengths(kernel.evaluate_diagonal(z))), evaluate(z)
                blocks = [evaluate(_change_last_bits(z)) - values] if z is some or not has_code else []
                blocks += [mapped_otherwise.make_evaluator(rows)(z) - values] if maps_differ else []
            except DkfmError:
                if not has_code:
                    raise
                continue  # a user function may reject such numbers, for example codes that must be integers
            for errors in blocks:
                _make_errors_relative_in_place(errors, own, lengths)
                if has_code:
                    errors[errors > _JUMP] = 0.0  # for example a function that compares numbers for equality
                largest = max(largest, _UNSEEN_PAIRS * float(np.nan_to_num(errors, posinf=0.0).max(initial=0.0)))
    return largest


def _perturb_warp_maps(kernel: Kernel) -> Kernel:
    """Return a kernel with the last bits of mapped rows changed, or the kernel itself if it maps no rows."""
    changes: dict[str, object] = {}
    names: list[str] = [field.name for field in fields(kernel)] if is_dataclass(kernel) else []
    for name in names:
        value = getattr(kernel, name)
        if isinstance(value, Kernel) and (inner := _perturb_warp_maps(value)) is not value:
            changes[name] = inner
        elif isinstance(value, tuple) and all(isinstance(part, Kernel) for part in value):
            parts = tuple(map(_perturb_warp_maps, value))
            changes |= {name: parts} if any(a is not b for a, b in zip(parts, value, strict=True)) else {}
    if isinstance(kernel, Warped):
        h = kernel.h
        changes["h"] = lambda X: _change_last_bits(np.array(h(X), np.float64))
    return replace(kernel, **changes) if changes else kernel  # type: ignore[type-var]  # a dataclass


def find_rounding_probe_rows(rows: Rows, diagonal: Array) -> npt.NDArray[np.intp]:
    """Return the indices of the rows with the largest rounding errors: those of extreme numbers or extreme k(x, x).

    `diagonal` (n,) holds the k(x, x) of the rows (n, d). An even sample could miss a few rows that are far from all
    others.
    """
    found = [int(diagonal.argmax()), int(diagonal.argmin())]
    if isinstance(rows, np.ndarray):
        columns = rows[:, :: -(-rows.shape[1] // _MAX_EXTREME_COLUMNS)]
        found += [*columns.argmax(axis=0), *columns.argmin(axis=0)]
    else:
        found.append(int(squared_norms(rows).argmax()))
    return np.unique(np.array(found, np.intp))


def _make_points_between_rows(rows: Rows, extreme: npt.NDArray[np.intp]) -> Rows:
    """Return points on lines from some rows, including the extreme rows, to others, at small and large distances."""
    rng = np.random.default_rng(0)
    first, second = rng.integers(rows.shape[0], size=(2, min(16, rows.shape[0]), len(_BETWEEN)))
    first = np.concatenate([first, np.broadcast_to(extreme[:, np.newaxis], (len(extreme), len(_BETWEEN)))])
    second = np.concatenate([second, rng.integers(rows.shape[0], size=(len(extreme), len(_BETWEEN)))])
    share = np.broadcast_to(_BETWEEN, first.shape).reshape(-1, 1)
    left, right = rows[first.ravel()], rows[second.ravel()]
    if isinstance(left, np.ndarray):
        between: Array = left * (1 - share) + right * share
        return between
    from scipy.sparse import csr_array

    return csr_array(left.multiply(1 - share) + right.multiply(share))


def measure_in_float32(cast_scorer: Scorer, scorer: Scorer, rows: Rows, lengths: Array) -> float:
    """Measure the errors of the kernel values of a float32 model, from arithmetic and from rounded rows and landmarks.

    The rows, and points between them, are changed by less than the last bit of float32, so that pairs of nearly equal
    rows are measured too.

    Parameters
    ----------
    cast_scorer, scorer : Scorer
        Prepared models of the same landmarks, in float32 and in float64.
    rows : ndarray or csr_array of shape (s, d)
        Some training rows, in float64.
    lengths : ndarray of shape (N,)
        `roots.row_lengths` of the landmarks.
    """
    kernel = scorer.model.kernel
    if kernel.is_precomputed:
        return _MIN_FLOAT32_ROUNDING
    diagonal, largest = kernel.evaluate_diagonal(rows), _MIN_FLOAT32_ROUNDING
    code_free = is_code_free(kernel)
    points = [rows, _make_points_between_rows(rows, find_rounding_probe_rows(rows, diagonal))] if code_free else [rows]
    with np.errstate(over="ignore", invalid="ignore"):  # values that overflow float32 raise elsewhere
        for z in points:
            changed = _change_last_bits(z, _EPS32 / 3)  # rounding to float32 changes these by a third of a bit or more
            try:
                own = replace_zero_lengths(row_lengths(kernel.evaluate_diagonal(changed)))
                errors = scorer.kernel_values(changed) - cast_scorer.kernel_values(changed).astype(np.float64)
            except DkfmError:
                if code_free:
                    raise
                continue  # as in `measure_in_float64`
            _make_errors_relative_in_place(errors, own, replace_zero_lengths(lengths))
            largest = max(largest, _UNSEEN_PAIRS * float(np.nan_to_num(errors, posinf=0.0).max(initial=0.0)))
    return largest


def _change_last_bits(rows: Rows, eps: float = EPS) -> Rows:
    changed = rows.copy()
    numbers = changed if isinstance(changed, np.ndarray) else changed.data
    numbers *= 1 + eps * np.random.default_rng(0).choice([-1.0, 1.0], numbers.shape)
    return changed


def _make_errors_relative_in_place(errors: Array, left: Array, right: Array) -> None:
    """Replace errors (n, m) by their absolute values, divided by the lengths of both rows."""
    np.abs(errors, out=errors)
    errors /= left[:, np.newaxis]
    errors /= right
