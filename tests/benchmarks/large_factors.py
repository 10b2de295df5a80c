"""What regressions and discriminants of many rows cost: a factor in tiles, conjugate gradients, and left-out rows.

    python tests/benchmarks/large_factors.py [--quick] [--digits]

1. A factor in tiles of N = 40,000 rows of 50 columns on disk: its rate beside that of a plain matrix product on the
   same threads before and after it, peak memory, and ``|L L' - K|`` of 10,000 entries.
2. Two panels of N = 100,000 beside what the plan of the whole factor says of so many operations.
3. `KernelRidge` of 4,000 rows beside scikit-learn's: seconds in turn, and the difference of the predictions.
4. Predictions of left-out rows: a path of 20 penalties beside one, and 60 refits.
5. Two workers of one thread beside two threads of this process: a factor.
6. A map of all rows whose weights stay on disk: seconds, peak memory and certificate.
7. Conjugate gradients beside a factor in tiles, for several penalties.
8. With --digits, and DKFM_MNIST set: handwritten digits and the same ones moved by a pixel, 40,000 rows, learned by
   `KernelRidgeClassifier` and `KernelFisher`, each in a process of its own; beside scikit-learn's ridge regression on
   as many rows as fit in the same memory, and on 2,000 features of `Nystroem`.
"""

import argparse
import gzip
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import numpy as np
from distributed import Client, LocalCluster
from sklearn.kernel_ridge import KernelRidge as Theirs

import dkfm
from dkfm.core import budget, cpus
from dkfm.execution.blas_threads import single_blas_thread
from dkfm.execution.memory import peak_memory
from dkfm.gram import build, product_costs
from dkfm.gram.linear_systems.tile_store import open_tile_store
from dkfm.gram.linear_systems.tiled_cholesky import FactorTask, factor_tile, open_tiled_factor
from dkfm.kernels import Gaussian
from dkfm.sources.memory import MemorySource

SIDE = 2048
PLACE = {"dashboard_address": "127.0.0.1:0", "memory_limit": "4GB"}


def seconds_of(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure_product_rate(count=6):
    """Return the operations a second of plain matrix products, one on each thread."""
    left, right = np.random.default_rng(0).normal(size=(2, SIDE, SIDE))

    def multiply(_):
        out = np.empty((SIDE, SIDE))
        for _ in range(count):
            np.matmul(left, right.T, out=out)

    with single_blas_thread(), ThreadPoolExecutor(cpus.COUNT) as pool:
        taken = seconds_of(lambda: list(pool.map(multiply, range(cpus.COUNT))))
    return cpus.COUNT * count * 2 * SIDE**3 / taken


def factor_rows(n):
    X, kernel = np.random.default_rng(0).normal(size=(n, 50)), Gaussian(5.0)
    rows = np.sort(np.random.default_rng(1).choice(n, 100, replace=False))
    before, rates = peak_memory(), [measure_product_rate()]
    start = time.perf_counter()
    with open_tiled_factor(kernel, X, 1e-3) as store:
        taken = time.perf_counter() - start
        rates.append(measure_product_rate())
        L = np.zeros((len(rows), n))
        for i in range(store.blocks):
            inside = (rows >= store.rows(i).start) & (rows < store.rows(i).stop)
            for j in range(i + 1) if inside.any() else ():
                with store.read_tile_to_buffer((i, j)) as tile:
                    L[inside, store.rows(j)] = tile[rows[inside] - store.rows(i).start]
    error = np.abs(L @ L.T - kernel(X[rows]) - 1e-3 * np.eye(len(rows))).max()
    share = n**3 / 3 / taken / statistics.mean(rates)
    planned = product_costs.factor_seconds(n, cpus.COUNT, product_costs.value_seconds(kernel, 50))
    print(
        f"a factor of N = {n:,}, d = 50: {taken:.0f} s (planned {planned:.0f}), {share:.2f} of the rate of a product, "
        f"peak {(peak_memory() - before) / 1e6:,.0f} MB, |L L' - K| {error:.1e} ({n * 2.2e-16:.1e} allowed)",
        flush=True,
    )


def factor_panels(n):
    """Print the seconds of the first two panels of a factor, beside the planned ones of as many operations."""
    X, kernel = np.random.default_rng(0).normal(size=(n, 50)), Gaussian(5.0)
    with tempfile.TemporaryDirectory() as folder:
        store = open_tile_store(Path(folder) / "factor.zarr", {"shape": [n, 50]}, n, build.TILE_ROWS)
        task = FactorTask(kernel, MemorySource(X), None, 1e-3, store, None)
        columns = range(2)
        with ThreadPoolExecutor(cpus.COUNT) as pool:
            start = time.perf_counter()
            for j in columns:
                factor_tile(task, (j, j))
                below = [(i, j) for i in range(j + 1, store.blocks)]
                list(pool.map(factor_tile, [task] * len(below), below))
            taken = time.perf_counter() - start
    tiles = sum(store.blocks - j for j in columns)
    share = sum((2 * j + 1) * SIDE**3 * (store.blocks - j) for j in columns) / (n**3 / 3)
    plan = dkfm.plan_fit(dkfm.KernelRidge(1e-3, kernel=kernel, solver="tiled"), (n, 50))
    written = 8 * n * n / 2 / budget.WRITE_BYTES / cpus.COUNT
    products = product_costs.factor_seconds(n, cpus.COUNT) - written
    values_and_writes = product_costs.factor_seconds(n, cpus.COUNT, product_costs.value_seconds(kernel, 50)) - products
    expected = share * products + tiles * SIDE**2 / (n * n / 2) * values_and_writes
    print(
        f"two panels of a factor of N = {n:,}: {taken:.0f} s, planned {expected:.0f} s ({expected / taken:.2f}); all "
        f"of it {plan.seconds / 60:.0f} min and {plan.disk_bytes / 1e9:.0f} GB of disk",
        flush=True,
    )


def compare_with_scikit_learn(n, rounds):
    rng = np.random.default_rng(0)
    X, y, Z = rng.normal(size=(n, 50)), rng.normal(size=n), rng.normal(size=(500, 50))
    ours, theirs = (cls(0.1, kernel="rbf", gamma=0.02) for cls in (dkfm.KernelRidge, Theirs))
    ratios = sorted(seconds_of(lambda: theirs.fit(X, y)) / seconds_of(lambda: ours.fit(X, y)) for _ in range(rounds))
    difference = np.abs(ours.predict(Z) - theirs.predict(Z)).max() / np.abs(theirs.predict(Z)).max()
    predict = sorted(seconds_of(lambda: theirs.predict(X)) / seconds_of(lambda: ours.predict(X)) for _ in range(rounds))
    print(
        f"KernelRidge of N = {n:,}: scikit-learn's takes {statistics.median(ratios):.2f} times as long to fit "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f}, {rounds} rounds), {statistics.median(predict):.2f} times to predict; "
        f"predictions differ by {difference:.1e}",
        flush=True,
    )


def leave_out(n, rounds):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, 5))
    y, words = np.sin(X[:, 0]) + 0.1 * rng.normal(size=n), {"kernel": "rbf", "gamma": 0.1}
    one, path = dkfm.KernelRidge("loo", alphas=[0.01], **words), dkfm.KernelRidge("loo", **words)
    factored = dkfm.KernelRidge(0.01, leave_one_out=True, **words)
    ratios, by_factor = [], []
    for _ in range(rounds):
        single = seconds_of(lambda: one.fit(X, y))
        ratios.append(seconds_of(lambda: path.fit(X, y)) / single)
        by_factor.append(seconds_of(lambda: factored.fit(X, y)) / single)
    errors = []
    for row in range(60):
        rest = np.arange(n) != row
        refit = dkfm.KernelRidge(0.01, **words).fit(X[rest], y[rest])
        errors.append(abs(refit.predict(X[row : row + 1])[0] - one.loo_predictions_[row]))
    print(
        f"left-out rows of N = {n:,}: a path of 20 penalties takes {statistics.median(ratios):.2f} times one, and one "
        f"by a factor {statistics.median(by_factor):.2f}; 60 refits differ by at most {max(errors):.1e}",
        flush=True,
    )


def compare_with_workers(n, rounds):
    X, kernel, shares = np.random.default_rng(0).normal(size=(n, 50)), Gaussian(5.0), []

    def factor(place):
        start = time.perf_counter()
        with place, open_tiled_factor(kernel, X, 1e-3):
            return time.perf_counter() - start

    with (
        LocalCluster(n_workers=2, threads_per_worker=1, **PLACE) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        for _ in range(rounds + 1):
            shares.append(factor(nullcontext()) / factor(client.as_current()))
    shares = sorted(shares[1:])
    spread = f"{statistics.median(shares):.2f} ({shares[0]:.2f} to {shares[-1]:.2f})"
    print(f"a factor of N = {n:,}: two workers of a thread have {spread} of the speed of two threads", flush=True)


def compare_solvers(n, penalties):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, 5))
    y = np.sin(X[:, 0]) + 0.1 * rng.normal(size=n)
    for alpha in penalties:
        fits = {solver: dkfm.KernelRidge(alpha, kernel=Gaussian(2.0), solver=solver) for solver in ("tiled", "cg")}
        taken = {solver: seconds_of(lambda fit=fit: fit.fit(X, y)) for solver, fit in fits.items()}
        difference = np.abs(fits["tiled"].predict(X[:500]) - fits["cg"].predict(X[:500])).max()
        print(
            f"N = {n:,}, d = 5, alpha = {alpha:g}: {taken['tiled']:.1f} s by a factor, {taken['cg']:.1f} s by "
            f"conjugate gradients; predictions differ by {difference:.1e}",
            flush=True,
        )


LEARN = """
import json, logging, sys, time
import numpy as np
from dkfm.execution.memory import peak_memory

data = np.load(sys.argv[1])
X, y, Z, t = (data[name] for name in ("X", "y", "Z", "t"))
name, sigma, alpha, n = sys.argv[2], float(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])
X, y = X[:n], y[:n]
words = {"kernel": "rbf", "gamma": 1 / (2 * sigma**2)}
if name.startswith("Kernel"):
    import dkfm
    options = {"solver": "tiled", "progress": False}
    cls = getattr(dkfm, name)
    penalty = {"shrinkage" if name == "KernelFisher" else "alpha": alpha}
    model = cls(**penalty, **words, **options)
    logging.basicConfig(level=logging.INFO)
elif name == "scikit-learn":
    from sklearn.kernel_ridge import KernelRidge
    model, labels = KernelRidge(alpha, **words), y
    y = np.where(y[:, None] == np.arange(10), 1.0, -1.0)
else:
    from sklearn.kernel_approximation import Nystroem
    from sklearn.linear_model import RidgeClassifier
    from sklearn.pipeline import make_pipeline
    model = make_pipeline(Nystroem(gamma=words["gamma"], n_components=2000, random_state=0), RidgeClassifier(alpha))
before, start = peak_memory(), time.perf_counter()
model.fit(X, y)
seconds, peak = time.perf_counter() - start, peak_memory() - before
predicted = model.predict(Z)
predicted = predicted.argmax(axis=1) if predicted.ndim == 2 else predicted
found = {"seconds": seconds, "peak": peak, "accuracy": float((predicted == t).mean())}
if hasattr(model, "certificate_"):
    found["certificate"] = model.certificate_.error
print(json.dumps(found))
"""


def map_rows(n):
    X, Z = (np.random.default_rng(seed).normal(size=(count, 50)) for seed, count in ((0, n), (1, 2000)))
    with tempfile.TemporaryDirectory() as place:
        phi = dkfm.ExactFeatureMap(Gaussian(5.0), basis="cholesky", build="tiled", workspace=place, progress=False)
        planned, before = dkfm.plan_fit(phi, (n, 50)), peak_memory()
        taken = seconds_of(lambda: phi.fit(X))
        peak, mapped = peak_memory() - before, seconds_of(lambda: phi.transform(Z))
    print(
        f"a map of N = {n:,}: {taken:.0f} s (planned {planned.seconds:.0f}), peak {peak / 1e6:,.0f} MB (planned "
        f"{planned.memory_bytes / 1e6:,.0f}), disk {planned.disk_bytes / 1e9:.1f} GB, certificate "
        f"{phi.certificate_.relative_error:.1e} (bound {phi.error_bound_:.1e}), 2,000 rows in {mapped:.1f} s",
        flush=True,
    )


def learn_digits(quick):
    folder = Path(os.environ["DKFM_MNIST"])
    with gzip.open(folder / "t10k-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 28, 28) / 255
    with gzip.open(folder / "t10k-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8).astype(np.int64)
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[: 800 if quick else 8000], order[8000:]
    moves = [(0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)]
    moved = np.concatenate([np.roll(images[train], move, axis=(1, 2)) for move in moves]).reshape(-1, 784)
    with tempfile.TemporaryDirectory() as place:
        path = f"{place}/digits.npz"
        np.savez(path, X=moved, y=np.tile(labels[train], 5), Z=images[test].reshape(-1, 784), t=labels[test])

        def learn(name, alpha, n):
            command = [sys.executable, "-c", LEARN, path, name, "5", str(alpha), str(n)]
            ended = subprocess.run(command, capture_output=True, text=True, check=True)
            residuals = [line for line in ended.stderr.splitlines() if "residual of the system" in line]
            found = json.loads(ended.stdout.splitlines()[-1])
            print(
                f"digits, {name} of {n:,} rows: {found['accuracy']:.2%} of {len(test):,} right, {found['seconds']:.0f} "
                f"s, peak {found['peak'] / 1e6:,.0f} MB {found.get('certificate', '')} {' '.join(residuals)}",
                flush=True,
            )
            return found

        n = len(moved)
        peak = learn("KernelRidgeClassifier", 0.01, n)["peak"]
        learn("KernelFisher", 1e-3, n)
        learn("scikit-learn", 0.01, min(n, int((peak / 24) ** 0.5)))
        learn("Nystroem", 0.01, n)


def main():
    logging.getLogger("dkfm").setLevel(logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rows and rounds")
    parser.add_argument("--digits", action="store_true", help="only the digits of DKFM_MNIST")
    options = parser.parse_args()
    quick = options.quick
    if options.digits:
        learn_digits(quick)
        return
    factor_rows(4200 if quick else 40_000)
    factor_panels(4200 if quick else 100_000)
    compare_with_scikit_learn(500 if quick else 4000, 1 if quick else 7)
    leave_out(300 if quick else 3000, 1 if quick else 3)
    compare_with_workers(2100 if quick else 16_000, 1 if quick else 7)
    map_rows(2100 if quick else 40_000)
    compare_solvers(*((500, [1.0]) if quick else (20_000, [1.0, 1e-2, 1e-4])))


if __name__ == "__main__":
    main()
