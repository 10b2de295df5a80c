"""What fits without a Gram matrix cost: components by matrix-free products, beside their limit, a cluster and a plan.

    python tests/benchmarks/large_fits.py [--quick] [--before CHECKOUT]

1. 20 components of N = 20,000 rows of 50 columns (standard normal, Gaussian): seconds and peak memory in a process of
   its own, in turn with those of another checkout, if one is given.
2. The same of 100,000 rows: seconds, peak memory, bytes on disk, and residuals ``|K v - mu v| / mu`` of the components.
3. A product with 32 columns beside the time of its matrix products and exponentials alone, on the same threads.
4. Two workers of one thread beside two threads of this process.
5. Plans of five sizes beside what their fits took: seconds and bytes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from distributed import Client, LocalCluster

from dkfm import kernels
from dkfm.core import cpus
from dkfm.execution.blas_threads import single_blas_thread
from dkfm.gram.matrix_free import open_matrix_free
from dkfm.kernels.pairwise.block_functions import exp_in_place

FIT = """
import json, os, sys, tempfile, time
import numpy as np
import dkfm
from dkfm.execution.memory import peak_memory

n, d, sigma = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
X, kernel = np.random.default_rng(0).normal(size=(n, d)), dkfm.kernels.Gaussian(sigma)
dkfm.KernelPCA(2, kernel=kernel).fit(X[:300])  # imports and pools are there before
before, start = peak_memory(), time.perf_counter()
plan = dkfm.plan_fit(dkfm.KernelPCA(20, kernel=kernel), X) if hasattr(dkfm, "plan_fit") else None
planned, start = time.perf_counter() - start, time.perf_counter()
pca = dkfm.KernelPCA(20, kernel=kernel).fit(X)
seconds, peak = time.perf_counter() - start, peak_memory() - before
found = {"seconds": seconds, "peak": peak, "certificate": pca.certificate_.error}
found["eigenvalues"] = pca.eigenvalues_.tolist()
if plan is not None:
    found |= {"planned_seconds": plan.seconds, "planned_bytes": plan.memory_bytes, "road": plan.road}
if len(sys.argv) > 4:
    V, mu = pca.eigenvectors_, pca.eigenvalues_
    from dkfm.gram.matrix_free import open_matrix_free
    with open_matrix_free(kernel, X, 20) as gram:
        product = gram @ V
    residual = product - product.mean(axis=0) - mu * V  # V has mean 0
    found["residuals"] = float((np.linalg.norm(residual, axis=0) / mu).max())
print(json.dumps(found))
"""


def fit(n, d, checkout=None, *, sigma=None, residuals=False):
    """Return what a fit in a process of its own takes."""
    more = {} if checkout is None else {"PYTHONPATH": checkout}
    arguments = [str(n), str(d), str(sigma or d**0.5), *(["residuals"] if residuals else [])]
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | more | {"TMPDIR": folder}
        output = subprocess.check_output([sys.executable, "-c", FIT, *arguments], env=environment, text=True)
        assert not list(Path(folder).iterdir()), "the fit left something"
    return json.loads(output.splitlines()[-1])


def compare_commits(n, rounds, before):
    for _ in range(rounds):
        found = fit(n, 50)
        line = f"N = {n:,}, d = 50: {found['seconds']:.1f} s, peak {found['peak'] / 1e6:,.0f} MB"
        if before is not None:
            old = fit(n, 50, before)
            line += f"; before {old['seconds']:.1f} s, {old['peak'] / 1e6:,.0f} MB"
            line += f", {old['seconds'] / found['seconds']:.2f} times as long"
            np.testing.assert_allclose(found["eigenvalues"], old["eigenvalues"], rtol=1e-10)
        print(line, flush=True)


def fit_many(n):
    found = fit(n, 50, residuals=True)
    print(
        f"N = {n:,}, d = 50: {found['seconds']:.0f} s, peak {found['peak'] / 1e6:,.0f} MB, nothing on disk, residuals "
        f"{found['residuals']:.1e}, certificate {found['certificate']:.1e}",
        flush=True,
    )


def compare_with_limit(n, d, rounds):
    """Print a product's share of its limit: the least arithmetic, of half of the values for both sides, on threads."""
    rng = np.random.default_rng(0)
    X, V, kernel = rng.normal(size=(n, d)), rng.normal(size=(n, 32)), kernels.Gaussian(d**0.5)
    rows, columns = 128, 2048
    left, right = rng.uniform(size=(rows, d + 2)), np.asfortranarray(-rng.uniform(size=(d + 2, columns)) / d)
    W, U = rng.normal(size=(columns, 32)), rng.normal(size=(rows, 32))
    blocks = n * n // 2 // (rows * columns)

    def compute_blocks(count):
        values, across, down = np.empty((rows, columns)), np.empty((rows, 32)), np.empty((columns, 32))
        for _ in range(count):
            np.matmul(left, right, out=values)
            exp_in_place(values)
            np.matmul(values, W, out=across)
            np.matmul(values.T, U, out=down)

    def measure(function):
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    def reach_limit():
        with single_blas_thread(), ThreadPoolExecutor(cpus.COUNT) as pool:
            list(pool.map(compute_blocks, [blocks // cpus.COUNT] * cpus.COUNT))

    with open_matrix_free(kernel, X, 32) as gram:
        gram @ V
        shares = sorted(measure(reach_limit) / measure(lambda: gram @ V) for _ in range(rounds))
    spread = f"{statistics.median(shares):.2f} ({shares[0]:.2f} to {shares[-1]:.2f})"
    print(f"a product, N = {n:,}, d = {d}: its limit takes {spread} of its time", flush=True)


def compare_with_workers(n, rounds):
    rng = np.random.default_rng(0)
    X, V, kernel, shares = rng.normal(size=(n, 50)), rng.normal(size=(n, 32)), kernels.Gaussian(7.0), []
    place = {"dashboard_address": "127.0.0.1:0", "memory_limit": "4GB"}
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, **place) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        for _ in range(rounds + 1):
            seconds, products = [], []
            for where in (None, client):
                with open_matrix_free(kernel, X, 32, client=where) as gram:
                    start = time.perf_counter()
                    products.append(gram @ V)
                    seconds.append(time.perf_counter() - start)
            np.testing.assert_array_equal(*products)
            shares.append(seconds[0] / seconds[1])
    shares = sorted(shares[1:])
    spread = f"{statistics.median(shares):.2f} ({shares[0]:.2f} to {shares[-1]:.2f})"
    print(f"two workers of a thread have {spread} of the speed of two threads, and the same bits", flush=True)


def compare_with_plans(sizes):
    for n, d in sizes:
        found = fit(n, d)
        seconds, size = found["planned_seconds"] / found["seconds"], found["planned_bytes"] / found["peak"]
        print(f"N = {n:,}, d = {d}: planned {seconds:.2f} of the seconds, {size:.2f} of the bytes", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rows and rounds")
    parser.add_argument("--before", help="root of another checkout, to be compared with")
    options = parser.parse_args()
    quick = options.quick
    compare_commits(5000 if quick else 20_000, 1 if quick else 3, options.before)
    fit_many(6000 if quick else 100_000)
    for d in (50, 784):
        compare_with_limit(4000 if quick else 16_000, d, 1 if quick else 7)
    compare_with_workers(4000 if quick else 20_000, 1 if quick else 7)
    sizes = [(6000, 5), (12_000, 5), (12_000, 50), (20_000, 50), (30_000, 10)]
    compare_with_plans(sizes[:1] if quick else sizes)


if __name__ == "__main__":
    main()
