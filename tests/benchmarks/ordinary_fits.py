"""Count the warnings of ordinary fits: kernels at their median widths, data sets of scikit-learn, random rows.

    python tests/benchmarks/ordinary_fits.py [--noise] [SEEDS [ROWS]]

Each seed draws at most ROWS rows, 400 by default, of each of four data sets. They are standardized, or in [0, 1] for
kernels of histograms. A map in each basis, `KernelPCA(5)` and `KernelFisher` are fitted to them, in float64 and
float32, with each of 20 kernels: 4 x 5 x 2 x 20 = 800 fits. Five seeds are the default. The classes of random rows are
thirds of their first column. With --noise the classes are random, too: discriminants then fit noise, and a few in
float32 are so small beside what they cancel that the warning is true. Each warning is a line. The last line has their
number; the exit code is 1 if there is one, or, with --noise, one in float64 or more than one in 500 fits.
"""

import sys
import warnings
from collections.abc import Callable
from itertools import product

import numpy as np
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from sklearn.preprocessing import MinMaxScaler, StandardScaler

from dkfm import ExactFeatureMap, KernelFisher, KernelPCA, kernels
from dkfm.errors import DkfmWarning

DTYPES = ("float64", "float32")

KERNELS = {
    "gaussian": kernels.Gaussian("median"),
    "laplacian": kernels.Laplacian("median"),
    "exponential": kernels.Exponential("median"),
    "matern 3/2": kernels.Matern(1.5, "median"),
    "matern 5/2": kernels.Matern(2.5, "median"),
    "rational quadratic": kernels.RationalQuadratic(1.0, "median"),
    "periodic": kernels.Periodic(6.0, 4.0),
    "arc-cosine 0": kernels.ArcCosine(0),
    "arc-cosine 1": kernels.ArcCosine(1),
    "linear": kernels.Linear(),
    "cosine": kernels.Cosine(),
    "polynomial 2": kernels.Polynomial(2),
    "polynomial 3": kernels.Polynomial(3),
    "sum": kernels.Gaussian("median") + 0.1 * kernels.Polynomial(2),
    "product": kernels.Gaussian("median") * kernels.Cosine(),
    "normalized": kernels.Normalized(kernels.Polynomial(3)),
}
HISTOGRAMS = {
    "chi-squared": kernels.ChiSquared(),
    "jensen-shannon": kernels.JensenShannon(),
    "intersection": kernels.HistogramIntersection(),
    "exponential of additive chi-squared": kernels.Exp(kernels.AdditiveChiSquared()),
}

FITS: dict[str, Callable] = {
    **{
        basis: lambda kernel, X, y, dtype, basis=basis: ExactFeatureMap(kernel, basis=basis, dtype=dtype).fit(X)
        for basis in ("symmetric", "spectral", "cholesky")
    },
    "components": lambda kernel, X, y, dtype: KernelPCA(5, kernel=kernel).fit(X.astype(dtype)),
    "discriminants": lambda kernel, X, y, dtype: KernelFisher(kernel=kernel).fit(X.astype(dtype), y),
}


def draw_data(seed, rows, noise):
    """Yield the name, rows (n, d) and labels (n,) of each data set."""
    rng = np.random.default_rng(seed)
    for load in (load_digits, load_wine, load_breast_cancer):
        X, y = load(return_X_y=True)
        chosen = rng.permutation(len(X))[:rows]
        X = X[chosen]
        yield load.__name__[5:], X[:, np.ptp(X, axis=0) > 0], y[chosen]
    columns = int(rng.integers(2, 40))
    X = rng.normal(size=(rows, columns))
    classes = np.arange(rows) % 3 if noise else X[:, 0].argsort().argsort() * 3 // rows
    yield f"random, {columns} columns", X, classes


def list_warnings(seed, rows, noise):
    """Return the number of fits of a seed, and the dtype of each that warned; its warning is printed."""
    fits, warned = 0, []
    for data, X, y in draw_data(seed, rows, noise):
        for name, kernel in (KERNELS | HISTOGRAMS).items():
            scaled = (MinMaxScaler if name in HISTOGRAMS else StandardScaler)().fit_transform(X)
            for (what, fit), dtype in product(FITS.items(), DTYPES):
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always", DkfmWarning)
                    fit(kernel, scaled, y, dtype)
                fits += 1
                for warning in caught:
                    warned.append(dtype)
                    print(f"seed {seed}, {data}, {name}, {what}, {dtype}: {warning.message}", flush=True)
    return fits, warned


def main():
    noise, arguments = "--noise" in sys.argv, [int(argument) for argument in sys.argv[1:] if argument != "--noise"]
    seeds, rows = (arguments + [5, 400][len(arguments) :])[:2]
    fits, warned = 0, []
    for seed in range(seeds):
        more, of_seed = list_warnings(seed, rows, noise)
        fits, warned = fits + more, warned + of_seed
    print(f"{fits} fits, {len(warned)} warnings")
    return int("float64" in warned or len(warned) > (fits // 500 if noise else 0))


if __name__ == "__main__":
    sys.exit(main())
