"""Time the values of each kernel on one thread, and its formula in plain NumPy, so that slow kernels stand out.

A formula computes in the precision of the rows and makes a new array for each step, as a user would write it. Its time
is a target for the kernel, but its values are less exact.
"""
# mypy: disable-error-code="no-any-return"
# NumPy types the result of an expression of arrays and numbers as Any.

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from dkfm import kernels
from dkfm.bench.bench_environment import DTYPE_TOLERANCES
from dkfm.bench.machine import describe_process
from dkfm.bench.timing import time_round_robin
from dkfm.core.display.text_tables import Row, Table
from dkfm.core.rows import Array
from dkfm.errors import DisagreementError
from dkfm.execution.blas_threads import single_blas_thread
from dkfm.kernels import Kernel

COLUMNS = (4, 8, 64, 784)
"""Numbers of columns at which every kernel is timed."""

Formula = Callable[[Array, Array], Array]
"""Function of rows Z (n, d) and X (m, d) that returns their kernel values (n, m)."""


@dataclass(frozen=True)
class BlockSizes:
    """Rows and landmarks of the blocks, and how often each is timed after one call that is not."""

    rows: int
    landmarks: int
    rounds: int


FULL = BlockSizes(256, 2_000, 9)
QUICK = BlockSizes(128, 500, 3)


def run_kernel_benchmark(sizes: BlockSizes, say: Callable[[str], None]) -> dict[str, object]:
    """Time a block of each kernel and of its formula in turn, with landmarks that are prepared off the clock.

    Parameters
    ----------
    sizes : BlockSizes
        `FULL` or `QUICK`.
    say : callable
        Called with each line of the tables as soon as it is known.

    Returns
    -------
    dict
        The same results for JSON; tables are named after the number of columns.

    Raises
    ------
    DisagreementError
        A kernel and its formula return different values.
    """
    machine, tables = describe_process(), {}
    for name, fact in machine.items():
        say(f"{name:<14}{fact}")
    say("Plain is the formula in NumPy; times as long is dkfm's time divided by it, so that less than 1 is faster.")
    for d in COLUMNS:
        rows = [
            _measure_kernel(name, kernel, formula, d, dtype, sizes)
            for name, kernel, formula in list_kernels(d)
            for dtype in DTYPE_TOLERANCES
        ]
        shape = f"{sizes.rows:,} rows by {sizes.landmarks:,} landmarks"
        table = Table(f"Nanoseconds a value of {d} columns, {shape}, on one thread", rows)
        tables[f"{d}_columns"] = table.to_json_rows()
        for line in ("", *table.format_lines()):
            say(line)
    return {"machine": machine, "sizes": asdict(sizes), "nanoseconds_a_value": tables}


def _measure_kernel(name: str, kernel: Kernel, formula: Formula, d: int, dtype: str, sizes: BlockSizes) -> Row:
    Z, X = make_rows(sizes.rows, sizes.landmarks, d, dtype)
    evaluator = kernel.make_evaluator(X)
    out = np.empty((len(Z), len(X)), dtype)
    rivals: dict[str, Callable[[Path], Array]] = {
        "dkfm": lambda _: evaluator(Z, out),
        "plain": lambda _: formula(Z, X),
    }
    with single_blas_thread(), np.errstate(all="ignore"):
        _require_agreement(name, rivals["dkfm"](Path()), rivals["plain"](Path()))
        times = time_round_robin(rivals, sizes.rounds)
    nanoseconds = {name: times.median(name) / out.size * 1e9 for name in rivals}
    return {"kernel": name, "dtype": dtype, **nanoseconds, "times_as_long": times.ratio("dkfm", "plain")}


def _require_agreement(name: str, values: Array, others: Array) -> None:
    """Raise a DisagreementError if a kernel and its formula differ by more than the formula's rounding explains."""
    error, largest = float(np.abs(values - others).max()), float(np.abs(values).max())
    if not error <= DTYPE_TOLERANCES[values.dtype.name] * largest:  # also true for NaN
        raise DisagreementError(f"{name} differs from its formula by {error:.1e}, where the largest is {largest:.1e}.")


def make_rows(n: int, m: int, d: int, dtype: str) -> tuple[Array, Array]:
    """Return random histograms, rows (n, d) and landmarks (m, d), times d: their numbers are about 1."""
    rows: Array = np.random.default_rng(0).uniform(0.1, 1.9, (n + m, d))
    rows *= d / rows.sum(axis=1, keepdims=True)
    return rows[:n].astype(dtype), rows[n:].astype(dtype)


def list_kernels(d: int) -> list[tuple[str, Kernel, Formula]]:
    """Return name, kernel and formula of each kernel, with length scales near the distances of `make_rows`."""
    k, r = kernels, float(np.sqrt(d / 2))
    gaussian, polynomial = k.Gaussian(r), k.Polynomial(3, 1 / d, 1.0)
    return [
        ("Gaussian", gaussian, partial(_gaussian, r)),
        ("Gaussian, narrow", k.Gaussian(r / 6), partial(_gaussian, r / 6)),
        ("three Gaussians", gaussian + k.Gaussian(2 * r) + k.Gaussian(3 * r), partial(_three_gaussians, r)),
        ("Exponential", k.Exponential(r), lambda Z, X: np.exp(-_distances(Z, X) / r)),
        ("Matern 1/2", k.Matern(0.5, r), lambda Z, X: np.exp(-_distances(Z, X) / r)),
        ("Matern 3/2", k.Matern(1.5, r), partial(_matern, r, False)),
        ("Matern 5/2", k.Matern(2.5, r), partial(_matern, r, True)),
        ("Matern of nu 1", k.Matern(1.0, r), partial(_matern_nu_1, r)),
        (
            "RationalQuadratic",
            k.RationalQuadratic(1.0, r),
            lambda Z, X: 1 / (1 + _squared_distances(Z, X) / (2 * r**2)),
        ),
        ("NegativeSquaredDistance", k.NegativeSquaredDistance(r), lambda Z, X: -_squared_distances(Z, X) / r**2),
        ("Laplacian", k.Laplacian(float(d)), _laplacian),
        ("Periodic", k.Periodic(3.0, r), partial(_periodic, r)),
        ("Linear", k.Linear(), lambda Z, X: Z @ X.T),
        ("Polynomial 3", polynomial, _cubic),
        ("Cosine", k.Cosine(), _cosines),
        ("Sigmoid", k.Sigmoid(1 / d), lambda Z, X: np.tanh(Z @ X.T / d)),
        ("ArcCosine 0", k.ArcCosine(0), lambda Z, X: 1 - np.arccos(np.clip(_cosines(Z, X), -1, 1)) / np.pi),
        ("ArcCosine 1", k.ArcCosine(1), _arc_cosine),
        ("ChiSquared", k.ChiSquared(1 / d), lambda Z, X: np.exp(-_sum_terms(_chi_squared_terms, Z, X) / d)),
        ("AdditiveChiSquared", k.AdditiveChiSquared(), lambda Z, X: -_sum_terms(_chi_squared_terms, Z, X)),
        ("HistogramIntersection", k.HistogramIntersection(), partial(_sum_terms, np.minimum)),
        ("JensenShannon", k.JensenShannon(), lambda Z, X: _sum_terms(_entropy_terms, Z, X) / (2 * np.log(2))),
        ("Exp of Linear / d", k.Exp(1 / d * k.Linear()), lambda Z, X: np.exp(Z @ X.T / d)),
        ("PowerSeries", k.PowerSeries(k.Linear(), (1.0, 1 / d, 0.5 / d**2)), partial(_power_series, d)),
        ("Normalized Polynomial 3", k.Normalized(polynomial), _normalized_cubic),
        ("Gaussian of Affine", gaussian.warp(k.Affine(2, -1)), lambda Z, X: _gaussian(r, 2 * Z - 1, 2 * X - 1)),
        ("Outer", k.Outer(_row_sums), lambda Z, X: np.multiply.outer(Z.sum(axis=1), X.sum(axis=1))),
        ("Polynomial * Gaussian", polynomial * gaussian, lambda Z, X: _cubic(Z, X) * _gaussian(r, Z, X)),
        ("Power 3 of Linear", k.Linear() ** 3, lambda Z, X: (Z @ X.T) ** 3),
    ]


def _row_sums(X: Array) -> Array:
    return X.sum(axis=1)


def _squared_distances(Z: Array, X: Array) -> Array:
    return np.maximum((Z * Z).sum(axis=1)[:, np.newaxis] + (X * X).sum(axis=1) - 2 * Z @ X.T, 0)


def _distances(Z: Array, X: Array) -> Array:
    return np.sqrt(_squared_distances(Z, X))


def _gaussian(sigma: float, Z: Array, X: Array) -> Array:
    return np.exp(_squared_distances(Z, X) / (-2 * sigma**2))


def _three_gaussians(sigma: float, Z: Array, X: Array) -> Array:
    squares = _squared_distances(Z, X)
    one, two, three = (np.exp(squares / (-2 * (i * sigma) ** 2)) for i in (1, 2, 3))
    return one + two + three


def _matern(length: float, five: bool, Z: Array, X: Array) -> Array:
    a = _distances(Z, X) * (float(np.sqrt(5 if five else 3)) / length)
    return (1 + a + a * a / 3 if five else 1 + a) * np.exp(-a)


def _matern_nu_1(length: float, Z: Array, X: Array) -> Array:
    from scipy.special import k1

    a = np.maximum(_distances(Z, X) * (float(np.sqrt(2)) / length), 1e-5)
    return a * k1(a)


def _laplacian(Z: Array, X: Array) -> Array:
    from sklearn.metrics.pairwise import manhattan_distances

    return np.exp(manhattan_distances(Z, X) / -Z.shape[1])


def _periodic(length: float, Z: Array, X: Array) -> Array:
    angles = [rows * (2 * np.pi / 3) for rows in (Z, X)]
    return _gaussian(length, *(np.hstack([np.cos(a), np.sin(a)]) for a in angles))


def _cubic(Z: Array, X: Array) -> Array:
    return (Z @ X.T / Z.shape[1] + 1) ** 3


def _cosines(Z: Array, X: Array) -> Array:
    return Z @ X.T / np.multiply.outer(np.linalg.norm(Z, axis=1), np.linalg.norm(X, axis=1))


def _arc_cosine(Z: Array, X: Array) -> Array:
    lengths = np.multiply.outer(np.linalg.norm(Z, axis=1), np.linalg.norm(X, axis=1))
    cosines = np.clip(Z @ X.T / lengths, -1, 1)
    return lengths * (np.sqrt(1 - cosines**2) + (np.pi - np.arccos(cosines)) * cosines) / np.pi


def _sum_terms(terms: Formula, Z: Array, X: Array) -> Array:
    return np.stack([terms(z, X).sum(axis=1) for z in Z])


def _chi_squared_terms(z: Array, X: Array) -> Array:
    return (z - X) ** 2 / (z + X)


def _entropy_terms(z: Array, X: Array) -> Array:
    total = z + X
    return z * np.log(total / z) + X * np.log(total / X)


def _power_series(d: int, Z: Array, X: Array) -> Array:
    products = Z @ X.T
    return 1 + products / d + 0.5 * products**2 / d**2


def _normalized_cubic(Z: Array, X: Array) -> Array:
    lengths = [((rows * rows).sum(axis=1) / rows.shape[1] + 1) ** 1.5 for rows in (Z, X)]
    return _cubic(Z, X) / np.multiply.outer(*lengths)
