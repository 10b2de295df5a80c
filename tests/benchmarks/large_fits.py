"""What fits without a Gram matrix cost: components by matrix-free products, beside their limit, a cluster and a plan.

    python tests/benchmarks/large_fits.py [--quick] [--before CHECKOUT]

1. 20 components of N = 20,000 rows of 50 columns (standard normal, Gaussian): seconds and peak memory in a process of
   its own, in turn with those of another checkout, if one is given.
2. The same of 100,000 rows: seconds, peak memory, bytes on disk, and residuals ``|K v - mu v| / mu`` of the components.
3. A product with 32 columns beside the time of its matrix products and exponentials alone, on the same threads: each
   product one call of BLAS, and then in the small ones that dkfm makes of those with few columns.
4. Two workers of one thread beside two threads of this process: a product, then pivots in rounds.
5. Pivots in rounds over 1,000,000 rows of 5 columns in a Zarr store, to an error bound of 1e-6: seconds, peak memory,
   and the largest residual of all rows by an independent pass; then its rank beside that in memory, N = 20,000.
6. Plans beside what their fits took: seconds and bytes.
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
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import zarr
from distributed import Client, LocalCluster
from sklearn.base import clone

import dkfm
from dkfm import kernels
from dkfm.core import budget, cpus
from dkfm.execution.blas_threads import single_blas_thread
from dkfm.gram.matrix_free import open_matrix_free
from dkfm.kernels.pairwise.block_operations import exp_in_place
from dkfm.numerics.skinny_and_triangular_matmul import skinny_matmul, skinny_matmul_of_transpose

ENVIRONMENT = dict(os.environ)
"""That of the user: a cluster of Dask with workers in processes sets one thread of BLAS in this process's own."""

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
found = {"seconds": seconds, "peak": peak, "package": dkfm.__file__, "certificate": pca.certificate_.error}
found["eigenvalues"] = pca.eigenvalues_.tolist()
if plan is not None:
    found |= {"planned_seconds": plan.seconds, "planned_bytes": plan.memory_bytes}
    found["method"] = getattr(plan, "method", "")  # earlier versions call it otherwise
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
    more = {} if checkout is None else {"PYTHONPATH": str(Path(checkout).resolve())}
    arguments = [str(n), str(d), str(sigma or d**0.5), *(["residuals"] if residuals else [])]
    with tempfile.TemporaryDirectory() as folder:
        environment = ENVIRONMENT | more | {"TMPDIR": folder}
        # In an empty folder: `python -c` imports the packages of the folder where it runs before those of PYTHONPATH.
        line = [sys.executable, "-c", FIT, *arguments]
        output = subprocess.check_output(line, env=environment, cwd=folder, text=True)
        assert not list(Path(folder).iterdir()), "the fit left something"
    found = json.loads(output.splitlines()[-1])
    assert checkout is None or Path(found["package"]).is_relative_to(Path(checkout).resolve()), found["package"]
    return found


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
    rows, columns = budget.PIECE_ROWS, budget.PIECE_COLUMNS
    left, right = rng.uniform(size=(rows, d + 2)), np.asfortranarray(-rng.uniform(size=(d + 2, columns)) / d)
    W, U = rng.normal(size=(columns, 32)), rng.normal(size=(rows, 32))
    blocks = n * n // 2 // (rows * columns)

    def compute_blocks(multiply, multiply_transpose, count):
        values, across, down = np.empty((rows, columns)), np.empty((rows, 32)), np.empty((columns, 32))
        for _ in range(count):
            np.matmul(left, right, out=values)
            exp_in_place(values)
            multiply(values, W, across)
            multiply_transpose(values, U, down)

    def measure(function):
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    def reach_limit(*products):
        with single_blas_thread(), ThreadPoolExecutor(cpus.COUNT) as pool:
            list(pool.map(partial(compute_blocks, *products), [blocks // cpus.COUNT] * cpus.COUNT))

    whole = np.matmul, lambda values, U, out: np.matmul(values.T, U, out=out)
    split = skinny_matmul, skinny_matmul_of_transpose
    with open_matrix_free(kernel, X, 32) as gram:
        gram @ V
        times = [
            (measure(lambda: gram @ V), *(measure(partial(reach_limit, *products)) for products in (whole, split)))
            for _ in range(rounds)
        ]
    ours, *limits = np.transpose(times)
    shares = [f"{np.median(t / ours):.2f} ({(t / ours).min():.2f} to {(t / ours).max():.2f})" for t in limits]
    what = f"a product, N = {n:,}, d = {d}"
    print(f"{what}: its limit takes {shares[0]} of its time, in small products {shares[1]}", flush=True)


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
            for where in (nullcontext(), client.as_current()):
                with where, open_matrix_free(kernel, X, 32) as gram:
                    start = time.perf_counter()
                    products.append(gram @ V)
                    seconds.append(time.perf_counter() - start)
            np.testing.assert_array_equal(*products)
            shares.append(seconds[0] / seconds[1])
    shares = sorted(shares[1:])
    spread = f"{statistics.median(shares):.2f} ({shares[0]:.2f} to {shares[-1]:.2f})"
    print(f"two workers of a thread have {spread} of the speed of two threads, and the same bits", flush=True)


PIVOTS = """
import json, sys, time
import numpy as np
import dkfm, zarr
from dkfm.execution.memory import peak_memory

path, sigma, tol = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
phi, rows = dkfm.ExactFeatureMap(dkfm.kernels.Gaussian(sigma), basis="cholesky", tol=tol), zarr.open_array(path)
np.save(path + ".npy", rows[:300])
dkfm.ExactFeatureMap(dkfm.kernels.Gaussian(sigma), basis="cholesky", tol=0.5).fit(path + ".npy")  # imports
before, start = peak_memory(), time.perf_counter()
phi.fit(path)
found = {"seconds": time.perf_counter() - start, "peak": peak_memory() - before, "rank": phi.rank_}
plan = dkfm.plan_fit(phi, path)
residual = max(float(phi.residual(rows[a : a + 50_000]).max()) for a in range(0, rows.shape[0], 50_000))
found |= {"bound": phi.error_bound_, "residual": residual}
print(json.dumps(found | {"planned_seconds": plan.seconds, "planned_bytes": plan.memory_bytes}))
"""


def find_pivots(n, sigma, tol):
    """Return what pivots of n stored rows take, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        rows = zarr.create_array(f"{folder}/x.zarr", shape=(n, 5), chunks=(50_000, 5), dtype="float64")
        for start in range(0, n, 50_000):
            stop = min(n, start + 50_000)
            rows[start:stop] = np.random.default_rng(start).normal(size=(stop - start, 5))
        command = [sys.executable, "-c", PIVOTS, f"{folder}/x.zarr", str(sigma), str(tol)]
        return json.loads(subprocess.check_output(command, env=ENVIRONMENT, text=True).splitlines()[-1])


def stream_pivots(n, sigma, tol):
    found = find_pivots(n, sigma, tol)
    print(
        f"pivots of N = {n:,}, d = 5, bound {found['bound']:.1e}: rank {found['rank']:,}, {found['seconds']:.0f} s, "
        f"peak {found['peak'] / 1e6:,.0f} MB; the largest residual of all rows is {found['residual']:.1e}",
        flush=True,
    )


def compare_ranks(n):
    X = np.random.default_rng(0).normal(size=(n, 5))
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/x.npy", X)
        for sigma, tol in [(8.0, 1e-6), (4.0, 1e-3)]:
            phi = dkfm.ExactFeatureMap(kernels.Gaussian(sigma), basis="cholesky", tol=tol)
            stored, memory = (clone(phi).fit(rows).rank_ for rows in (f"{folder}/x.npy", X))
            print(f"rank of N = {n:,}, sigma = {sigma}: {stored} in rounds, {memory} in memory", flush=True)


def compare_pivots_with_workers(n, rounds):
    X, shares = np.random.default_rng(0).normal(size=(n, 5)), []
    place = {"dashboard_address": "127.0.0.1:0", "memory_limit": "4GB"}
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/x.npy", X)
        with LocalCluster(n_workers=2, threads_per_worker=1, **place) as cluster:
            for _ in range(rounds + 1):
                seconds = []
                for context in (nullcontext(), Client(cluster)):
                    with context:
                        start = time.perf_counter()
                        phi = dkfm.ExactFeatureMap(kernels.Gaussian(8.0), basis="cholesky", tol=1e-4)
                        phi.fit(f"{folder}/x.npy")
                        seconds.append(time.perf_counter() - start)
                shares.append(seconds[0] / seconds[1])
    shares = sorted(shares[1:])
    spread = f"{statistics.median(shares):.2f} ({shares[0]:.2f} to {shares[-1]:.2f})"
    print(f"pivots in rounds: two workers of a thread have {spread} of the speed of two threads", flush=True)


def compare_pivots_with_plans(sizes):
    for n, sigma, tol in sizes:
        found = find_pivots(n, sigma, tol)
        seconds, size = found["planned_seconds"] / found["seconds"], found["planned_bytes"] / found["peak"]
        print(f"pivots of N = {n:,}, sigma = {sigma}: planned {seconds:.2f} of the seconds, {size:.2f} of the bytes")


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
    compare_commits(1400 if quick else 20_000, 1 if quick else 3, options.before)
    fit_many(1400 if quick else 100_000)
    for d in (50, 784):
        compare_with_limit(4000 if quick else 16_000, d, 1 if quick else 7)
    compare_with_workers(2000 if quick else 60_000, 1 if quick else 5)
    compare_pivots_with_workers(2000 if quick else 200_000, 1 if quick else 5)
    stream_pivots(20_000 if quick else 1_000_000, 10.0, 1e-2 if quick else 1e-6)
    compare_ranks(1000 if quick else 20_000)
    plans = [
        (30_000, 8.0, 1e-3),
        (100_000, 8.0, 1e-6),
        (100_000, 4.0, 1e-3),
        (200_000, 10.0, 1e-4),
        (300_000, 6.0, 1e-3),
    ]
    compare_pivots_with_plans([(2000, 8.0, 1e-2)] if quick else plans)
    sizes = [(6000, 5), (12_000, 5), (12_000, 50), (20_000, 50), (30_000, 10)]
    compare_with_plans(sizes[:1] if quick else sizes)


if __name__ == "__main__":
    main()
