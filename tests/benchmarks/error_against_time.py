"""Error against time: maps on landmarks beside scikit-learn's Nystroem and random Fourier features.

    python tests/benchmarks/error_against_time.py [--quick]

All maps are fitted to the same 20,000 rows, a mixture of 20 clusters in 10 columns, with the same Gaussian kernels,
and map the same 20,000 new rows, on all cores, in turn. "fit" and "map" are medians of seconds. "error" is the
largest difference of an inner product of a training row and a new row from its kernel value, over 2,000 of each, and
"root mean square" that of all these pairs. dkfm states its bound at the fit; the others state none.
"""

import argparse
import statistics
import time

import numpy as np
from sklearn.kernel_approximation import Nystroem, RBFSampler

from dkfm import ExactFeatureMap, kernels
from dkfm.core.display.text_tables import Table

SIGMAS = {"narrow": 3.0, "wide": 9.0}
"""Widths of the kernel; the median distance is 9."""


def clusters(n, rng):
    """Return rows (n, 10) around 20 centres."""
    centres = np.random.default_rng(1).normal(scale=2.0, size=(20, 10))
    return centres[rng.integers(0, 20, n)] + rng.normal(scale=0.7, size=(n, 10))


def make_maps(features, sigma):
    """Return the maps of a number of features, by name."""
    gamma, kernel = 1 / (2 * sigma**2), kernels.Gaussian(sigma)
    chosen = {"n_landmarks": features, "basis": "cholesky", "random_state": 0}
    return {
        "dkfm, pivots": ExactFeatureMap(kernel, landmarks="pivots", **chosen),
        "dkfm, random pivots": ExactFeatureMap(kernel, landmarks="random_pivots", **chosen),
        "dkfm, uniform": ExactFeatureMap(kernel, landmarks="uniform", **chosen),
        "dkfm, uniform, sampled certificate": ExactFeatureMap(kernel, landmarks="uniform", certify="sample", **chosen),
        "Nystroem": Nystroem(gamma=gamma, n_components=features, random_state=0),
        "random Fourier features": RBFSampler(gamma=gamma, n_components=features, random_state=0),
    }


def seconds(function, *arguments):
    """Return what a function returns, and the seconds that it took."""
    start = time.perf_counter()
    result = function(*arguments)
    return result, time.perf_counter() - start


def measure(features, sigma, X, Z, rounds):
    """Return a line of the table for each map of a number of features."""
    maps = make_maps(features, sigma)
    times = {name: [] for name in maps}
    for _ in range(rounds):
        for name, feature_map in maps.items():
            _, fit = seconds(feature_map.fit, X)
            _, mapping = seconds(feature_map.transform, Z)
            times[name].append((fit, mapping))
    left, right = X[:: len(X) // 2000], Z[:: len(Z) // 2000]
    truth = kernels.Gaussian(sigma)(left, right)
    for name, feature_map in maps.items():
        error = feature_map.transform(left) @ feature_map.transform(right).T - truth
        fit, mapping = (statistics.median(column) for column in zip(*times[name], strict=True))
        yield {
            "map": name,
            "features": feature_map.transform(right[:1]).shape[1],
            "fit_seconds": fit,
            "map_seconds": mapping,
            "error": float(np.abs(error).max()),
            "root_mean_square": float(np.sqrt(np.square(error).mean())),
            "stated_bound": getattr(feature_map, "error_bound_", "none"),
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rows, once")
    quick = parser.parse_args().quick
    rng = np.random.default_rng(0)
    n = 2_000 if quick else 20_000
    X, Z = clusters(n, rng), clusters(n, rng)
    rounds = 1 if quick else 3
    numbers = (50,) if quick else (100, 300, 1000)
    for word, sigma in SIGMAS.items():
        rows = [row for features in numbers for row in measure(features, sigma, X, Z, rounds)]
        title = f"A {word} Gaussian, sigma = {sigma:g}; {n:,} rows fitted, {n:,} mapped; medians of {rounds}"
        print("\n".join(("", *Table(title, rows).format_lines())))


if __name__ == "__main__":
    main()
