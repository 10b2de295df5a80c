"""One kernel block on one thread: dkfm's time beside scikit-learn's, as ratios of medians in one interleaved run.

    python tests/benchmarks/kernel_blocks.py [--quick]

The first table is of 500 x 2,000 rows of 784 columns, everything included. The second is the Gaussian block against
prepared landmarks beside its floor on this machine: one GEMM of the same sizes and exp in place.
"""

import argparse
import platform
import statistics
import time
from functools import partial
from importlib.util import find_spec

import numpy as np
from sklearn.metrics import pairwise
from threadpoolctl import threadpool_limits

from dkfm import kernels

D = 784
L1 = ("laplacian", lambda X, Y: pairwise.laplacian_kernel(X, Y, gamma=1 / D), kernels.Laplacian(float(D)))
PAIRS = [
    L1,
    ("chi2", pairwise.chi2_kernel, kernels.ChiSquared()),
    ("rbf", lambda X, Y: pairwise.rbf_kernel(X, Y, gamma=1 / D), kernels.Gaussian(None)),
    ("polynomial", pairwise.polynomial_kernel, kernels.from_sklearn("polynomial")),
    ("cosine", pairwise.cosine_similarity, kernels.Cosine()),
    ("sigmoid", pairwise.sigmoid_kernel, kernels.from_sklearn("sigmoid")),
]


def medians(functions, repeats):
    """Run functions in turn; return the median time of each, and its ratio to the first: median, least, largest."""
    times = [[] for _ in functions]
    for function in functions:
        function()
    for _ in range(repeats):
        for function, taken in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            taken.append(time.perf_counter() - start)
    ratios = [[a / b for a, b in zip(times[0], taken, strict=True)] for taken in times]
    return [(statistics.median(t), statistics.median(r), min(r), max(r)) for t, r in zip(times, ratios, strict=True)]


def against_scikit_learn(n, m, repeats, rng):
    print(f"{'kernel':<12}{'dtype':<10}{'scikit-learn':>14}{'dkfm':>10}{'ratio':>8}{'least':>8}{'most':>8}")
    for name, theirs, kernel in PAIRS:
        for dtype in (np.float64, np.float32):
            X, Y = rng.uniform(size=(n, D)).astype(dtype), rng.uniform(size=(m, D)).astype(dtype)
            (slow, *_), (fast, ratio, low, high) = medians([partial(theirs, X, Y), partial(kernel, X, Y)], repeats)
            columns = f"{slow * 1e3:>11.1f} ms{fast * 1e3:>7.1f} ms{ratio:>8.2f}{low:>8.2f}{high:>8.2f}"
            print(f"{name:<12}{dtype.__name__:<10}{columns}")


def against_the_floor(n, m, repeats, rng):
    print(f"\n{'d':<12}{'dtype':<10}{'GEMM + exp':>14}{'Gaussian':>10}{'share':>8}")
    for d in (10, 50, 200, 784):
        for dtype in (np.float64, np.float32):
            X, Y = rng.normal(size=(n, d)).astype(dtype), rng.normal(size=(m, d)).astype(dtype)
            block = kernels.Gaussian(None).make_evaluator(Y)

            def floor(X=X, Y=Y, d=d):
                product = X @ Y.T
                product *= -1 / d
                np.exp(product, out=product)

            (least, *_), (taken, share, *_) = medians([floor, partial(block, X)], repeats)
            print(f"{d:<12}{dtype.__name__:<10}{least * 1e3:>11.1f} ms{taken * 1e3:>7.1f} ms{share:>8.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small blocks, three times")
    quick = parser.parse_args().quick
    n, m, repeats = (50, 200, 3) if quick else (500, 2000, 9)
    extra = "with" if find_spec("numba") else "without"
    print(f"{platform.machine()}, one thread, {extra} numba, {n} x {m} rows, medians of {repeats}\n")
    with threadpool_limits(1):
        rng = np.random.default_rng(0)
        against_scikit_learn(n, m, repeats, rng)
        against_the_floor(n, m, repeats, rng)


if __name__ == "__main__":
    main()
