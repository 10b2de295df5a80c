"""How exact the values of every kernel are, beside the same formula with 40 digits.

    python tests/benchmarks/values.py [--quick] [--save FILE] [--beside FILE]

A setting is a kernel with its parameters, a number of columns, a kind of rows and a dtype. Its error is the largest
``|err| / max(|k(x, z)|, sqrt(k(x, x) k(z, z)))`` of 12 rows and 9 others, in units of the dtype's rounding; the rows
are numbers of that dtype, so both have one truth. Each line has a kernel and a dtype: its settings, the median and the
largest of their errors, and where the largest is. Values below the dtype's normal numbers do not count. The unit is
2.2e-16 or 1.2e-7. NegativeSquaredDistance, whose k(x, x) is 0, has no scale but k(x, z) itself; a Bessel function is
exact to 1e-13.

`--save` writes the errors of all settings as JSON; `--beside` reads those of another version, and lists the settings
whose errors became more than twice as large, and more than 4 units.
"""

import argparse
import json
import warnings
from pathlib import Path

import mpmath
import numpy as np
from mpmath import mp, mpf

from dkfm import kernels as k

mp.dps = 40
COLUMNS = (1, 3, 8, 40)


def dot(x, z):
    return mp.fdot(x, z)


def square(x, z):
    return mp.fsum((a - b) ** 2 for a, b in zip(x, z, strict=True))


def gaussian(x, z, sigma):
    return mp.exp(-square(x, z) / (2 * mpf(sigma) ** 2))


def matern(x, z, nu, scale):
    a = mp.sqrt(2 * mpf(nu) * square(x, z)) / scale
    return mpf(1) if a == 0 else mp.power(2, 1 - mpf(nu)) / mp.gamma(nu) * a**nu * mp.besselk(nu, a)


def arc_cosine(x, z, order):
    norms = mp.sqrt(dot(x, x) * dot(z, z))
    if norms == 0:
        return mpf(order == 0) * (mpf(1) / 2)
    angle = mp.acos(max(-1, min(1, dot(x, z) / norms)))
    if order == 0:
        return 1 - angle / mp.pi
    return norms * (mp.sin(angle) + (mp.pi - angle) * mp.cos(angle)) / mp.pi


def periodic(x, z, period, scale):
    terms = (mp.sin(mp.pi * (a - b) / mpf(period)) ** 2 for a, b in zip(x, z, strict=True))
    return mp.exp(-2 * mp.fsum(terms) / mpf(scale) ** 2)


def chi_squared(x, z):
    return mp.fsum((a - b) ** 2 / (a + b) for a, b in zip(x, z, strict=True) if a + b)


def jensen_shannon(x, z):
    def term(a, b):
        return a * mp.log((a + b) / a, 2) if a else mpf(0)

    return mp.fsum(term(a, b) + term(b, a) for a, b in zip(x, z, strict=True)) / 2


def normalized(f):
    return lambda x, z: f(x, z) / mp.sqrt(f(x, x) * f(z, z)) if f(x, x) * f(z, z) else mpf(0)


def list_settings(d):
    """Yield name, kernel, formula, and whether its rows are histograms."""
    r = float(np.sqrt(d))
    for sigma in (0.1 * r, r, 30 * r):
        yield "Gaussian", k.Gaussian(sigma), lambda x, z, s=sigma: gaussian(x, z, s), False
        yield "Exponential", k.Exponential(sigma), lambda x, z, s=sigma: mp.exp(-mp.sqrt(square(x, z)) / s), False
        yield (
            "Laplacian",
            k.Laplacian(sigma),
            lambda x, z, s=sigma: mp.exp(-mp.fsum(abs(a - b) for a, b in zip(x, z, strict=True)) / s),
            False,
        )
        for nu in (0.5, 1.5, 2.5, 3.5, 10.5, 0.8, 1.0, 2.0, 7.0, 11.3, 40.5):
            yield f"Matern({nu})", k.Matern(nu, sigma), lambda x, z, s=sigma, n=nu: matern(x, z, n, s), False
    for alpha in (0.3, 1.0, 20.0):
        yield (
            "RationalQuadratic",
            k.RationalQuadratic(alpha, r),
            lambda x, z, a=alpha: (1 + square(x, z) / (2 * mpf(a) * mpf(r) ** 2)) ** -mpf(a),
            False,
        )
    yield "NegativeSquaredDistance", k.NegativeSquaredDistance(r), lambda x, z: -square(x, z) / mpf(r) ** 2, False
    yield "Periodic", k.Periodic(2.5, r), lambda x, z: periodic(x, z, 2.5, r), False
    yield "Linear", k.Linear(), dot, False
    yield "Cosine", k.Cosine(), normalized(dot), False
    cubic = k.Polynomial(3, scale=1 / d, offset=1.0)
    yield "Polynomial", cubic, lambda x, z: (dot(x, z) * mpf(1 / d) + 1) ** 3, False
    yield "Sigmoid", k.Sigmoid(1 / d, 0.5), lambda x, z: mp.tanh(dot(x, z) * mpf(1 / d) + mpf(0.5)), False
    for order in (0, 1):
        yield f"ArcCosine({order})", k.ArcCosine(order), lambda x, z, n=order: arc_cosine(x, z, n), False
    yield "Normalized", k.Normalized(cubic), normalized(lambda x, z: (dot(x, z) * mpf(1 / d) + 1) ** 3), False
    yield "Power", k.Linear() ** 3, lambda x, z: dot(x, z) ** 3, False
    yield "PowerSeries", k.PowerSeries(k.Cosine(), [1.0, 0.5, 0.25]), power_series, False
    yield "Exp", k.Exp(k.Cosine()), lambda x, z: mp.exp(normalized(dot)(x, z)), False
    yield "Outer", k.Outer(_row_sums), lambda x, z: mp.fsum(x) * mp.fsum(z), False
    yield "Scaled", 0.3 * k.Gaussian(r), lambda x, z: mpf(0.3) * gaussian(x, z, r), False
    widths = (0.3 * r, r, 3 * r)
    sums = k.Gaussian(widths[0]) + k.Gaussian(widths[1]) + k.Gaussian(widths[2])
    yield "Sum", sums, lambda x, z: mp.fsum(gaussian(x, z, s) for s in widths), False
    product = k.Gaussian(r) * k.RationalQuadratic(1.0, r)
    yield "Product", product, lambda x, z: gaussian(x, z, r) / (1 + square(x, z) / (2 * mpf(r) ** 2)), False
    mixed = cubic * k.Gaussian(r)
    yield "Product", mixed, lambda x, z: (dot(x, z) * mpf(1 / d) + 1) ** 3 * gaussian(x, z, r), False
    warped = k.Gaussian(r).warp(k.Affine(2, -1))
    yield "Warped", warped, lambda x, z: gaussian([2 * a - 1 for a in x], [2 * b - 1 for b in z], r), False
    yield "ChiSquared", k.ChiSquared(1 / d), lambda x, z: mp.exp(-mpf(1 / d) * chi_squared(x, z)), True
    yield "AdditiveChiSquared", k.AdditiveChiSquared(), lambda x, z: -chi_squared(x, z), True
    yield "HistogramIntersection", k.HistogramIntersection(), lambda x, z: mp.fsum(map(min, x, z)), True
    yield "JensenShannon", k.JensenShannon(), jensen_shannon, True


def power_series(x, z):
    c = normalized(dot)(x, z)
    return 1 + c / 2 + c**2 / 4


def _row_sums(X):
    return X.sum(axis=1)


def make_rows(kind, d, histograms):
    rng = np.random.default_rng((d, KINDS.index(kind)))
    X = rng.normal(size=(21, d))
    if histograms:
        X = np.abs(X) * (rng.random(X.shape) > 0.2)
    if kind == "far from 0" and not histograms:
        X += 30.0
    elif kind == "two clusters" and not histograms:
        X = X * 1e-3 + rng.choice([-10.0, 10.0], (21, 1))
    elif kind == "near pairs":
        X[12:] = X[:9] + 1e-5 * np.abs(rng.normal(size=(9, d))) * (X[:9] != 0)
    elif kind == "of many lengths":
        X *= 10.0 ** rng.uniform(-3, 1, (21, 1))
    return X


KINDS = ("normal", "far from 0", "two clusters", "near pairs", "of many lengths")


def measure(kernel, formula, X, dtype):
    """Return the error of one setting, in units of the dtype's rounding."""
    X = X.astype(dtype)
    rows = [[mpf(float(a)) for a in row] for row in X]
    values, eps, smallest = kernel(X[:12], X[12:]), float(np.finfo(dtype).eps), float(np.finfo(dtype).tiny)
    scales, worst = [abs(formula(x, x)) for x in rows], mpf(0)
    for i, x in enumerate(rows[:12]):
        for j, z in enumerate(rows[12:]):
            truth = formula(x, z)
            scale = max(abs(truth), mp.sqrt(scales[i] * scales[12 + j]))
            error = abs(mpf(float(values[i, j])) - truth)
            if error > smallest:
                worst = max(worst, error / scale)
    return float(worst / eps)


def list_errors(columns):
    for d in columns:
        for name, kernel, formula, histograms in list_settings(d):
            for kind in KINDS:
                X = make_rows(kind, d, histograms)
                for dtype in ("float64", "float32"):
                    yield (name, dtype), f"{kernel!r}, {d} columns, rows {kind}", measure(kernel, formula, X, dtype)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="measure rows of 8 columns alone")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--beside", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    kinds, errors = {}, {}
    for key, setting, error in list_errors((8,) if options.quick else COLUMNS):
        kinds.setdefault(key, []).append((error, setting))
        errors[f"{key[1]} {setting}"] = error
    print(f"{len(errors)} settings with mpmath {mpmath.__version__}; errors in units of the dtype's rounding")
    for (name, dtype), found in sorted(kinds.items()):
        largest, where = max(found)
        median = float(np.median([error for error, _ in found]))
        print(f"{name:24s} {dtype}  {len(found):4d}  median {median:8.2g}  largest {largest:8.2g}  {where}")
    if options.save:
        options.save.write_text(json.dumps(errors))
    if options.beside:
        before = json.loads(options.beside.read_text())
        worse = [(errors[s], e, s) for s, e in before.items() if s in errors and errors[s] > max(2 * e, 4)]
        print(f"{len(worse)} of {len(before)} settings have errors of more than twice those before:")
        for after, error, setting in sorted(worse, reverse=True):
            print(f"{error:8.2g} -> {after:8.2g}  {setting}")


if __name__ == "__main__":
    main()
