"""What scoring with a folded classifier costs beside features followed by the classifier, in turn, in one process.

    python tests/benchmarks/folds.py [--quick]

A logistic regression of three classes on the features of N = 4,000 rows of 50 columns (Gaussian), in each basis. Ratios
are the time of `predict` on the features that `transform` returns, by that of the folded model's `predict`, round by
round, for the same rows; their labels must be the same.
"""

import argparse
import statistics
import time

import numpy as np
from sklearn.linear_model import LogisticRegression

import dkfm
from dkfm.kernels import Gaussian

BASES = ("symmetric", "spectral", "cholesky")


def seconds(work):
    start = time.perf_counter()
    found = work()
    return time.perf_counter() - start, found


def compare(basis, n, rows, rounds):
    rng = np.random.default_rng(0)
    X, Z = rng.normal(size=(n, 50)), rng.normal(size=(rows, 50))
    y = np.digitize(X[:, 0] * X[:, 1], [-0.3, 0.3])
    phi = dkfm.ExactFeatureMap(Gaussian(7.0), basis=basis, progress=False).fit(X)
    pair = LogisticRegression(max_iter=50, tol=1e-2).fit(phi.transform(X), y)
    folded = dkfm.fold(phi, pair)
    folded.predict(Z[:10]), pair.predict(phi.transform(Z[:10]))
    ratios, times = [], []
    for _ in range(rounds):
        slow, expected = seconds(lambda: pair.predict(phi.transform(Z)))
        quick, found = seconds(lambda: folded.predict(Z))
        if not np.array_equal(found, expected):
            raise SystemExit(f"{basis}: labels differ")
        ratios.append(slow / quick)
        times.append((slow, quick))
    slow, quick = (statistics.median(some) for some in zip(*times, strict=True))
    print(
        f"{basis:>9}, {phi.model_.head('features').width:,} features: {rows:,} rows in {slow:.3f} s, "
        f"folded {quick:.4f} s: "
        f"{statistics.median(ratios):.1f} times less ({min(ratios):.1f} to {max(ratios):.1f}, {rounds} rounds)",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="N = 500")
    quick = parser.parse_args().quick
    for basis in BASES:
        compare(basis, *((500, 2000, 3) if quick else (4000, 8000, 7)))


if __name__ == "__main__":
    main()
