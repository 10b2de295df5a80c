"""What a fit costs: the bases beside scikit-learn's Nystroem map of all rows, interleaved; then 100,000 rows.

    python tests/benchmarks/fits.py [--quick]

The first part fits N = 4,000 standard normal rows of 10 columns (Gaussian, sigma = 3, of full rank) on all cores;
ratios are Nystroem's time to dkfm's, pair by pair. The second fits 100,000 points of the plane in the cholesky basis,
in a process of its own, and prints seconds, the peak of its memory and the certificate, and the time to map 20,000.
"""

import argparse
import statistics
import subprocess
import sys
import time
from functools import partial

import numpy as np
from sklearn.kernel_approximation import Nystroem

from dkfm import ExactFeatureMap, kernels

BASES = ("cholesky", "spectral", "symmetric")

PLANE = """
import sys, time
import numpy as np
from dkfm import ExactFeatureMap, kernels
from dkfm.execution.memory import peak_memory

n, m = int(sys.argv[1]), int(sys.argv[2])
rng = np.random.default_rng(0)
X, Z = rng.normal(size=(n, 2)), rng.normal(size=(m, 2))
start = time.perf_counter()
phi = ExactFeatureMap(kernels.Gaussian(1.0), basis="cholesky").fit(X)
fitted = time.perf_counter()
phi.transform(Z)
mapped = time.perf_counter()
print(f"{n:,} points: rank {phi.rank_}, {fitted - start:.1f} s, peak of the process {peak_memory() / 1e6:,.0f} MB")
print(f"certificate {phi.certificate_}")
print(f"training points {phi.training_certificate_}; error bound {phi.error_bound_:.1e}")
print(f"against the new points {phi.verify(Z).against}")
print(f"{m:,} more mapped in {mapped - fitted:.2f} s")
"""


def seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def beside_nystroem(n, repeats):
    X = np.random.default_rng(0).normal(size=(n, 10))
    peer = Nystroem(kernel="rbf", gamma=1 / 18, n_components=n, random_state=0)
    maps = [ExactFeatureMap(kernels.Gaussian(3.0), basis=basis) for basis in BASES]
    fits = [partial(estimator.fit, X) for estimator in (peer, *maps)]
    times = [[seconds(fit) for fit in fits] for _ in range(repeats)]
    print(f"N = {n:,}: Nystroem {statistics.median(t[0] for t in times):.2f} s, {repeats} times in turn")
    for place, (basis, phi) in enumerate(zip(BASES, maps, strict=True), 1):
        ratios = sorted(t[0] / t[place] for t in times)
        median = statistics.median(t[place] for t in times)
        spread = f"{statistics.median(ratios):5.1f} times less ({ratios[0]:.1f} to {ratios[-1]:.1f})"
        print(f"  {basis:<10} {median:6.2f} s, {spread}, rank {phi.rank_}, certificate {phi.certificate_.error:.1e}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rows, once")
    quick = parser.parse_args().quick
    beside_nystroem(*((500, 1) if quick else (4000, 3)))
    subprocess.run([sys.executable, "-c", PLANE, *(("5000", "1000") if quick else ("100000", "20000"))], check=True)


if __name__ == "__main__":
    main()
