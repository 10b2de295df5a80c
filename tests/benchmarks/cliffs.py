"""Where dkfm was once several times slower than a simple alternative: both now, in turn, as ratios of their times.

    python tests/benchmarks/cliffs.py [--quick] [NAME ...]

Each line has the median seconds of dkfm, and the ratio to the alternative, which the docstring of its function tells:
median, least, largest. At most 1.2 is wanted. Lines whose NAME is given are measured; by default all. With --quick the
ratios do not mean much. `dkfm bench --kernels` does the same for the values of each kernel.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
from sklearn import decomposition, kernel_approximation, kernel_ridge, metrics
from sklearn.datasets import load_digits

import dkfm
from dkfm import kernels
from dkfm.execution.blas_threads import single_blas_thread
from dkfm.kernels.pairwise import columnwise_sums
from dkfm.storage.model_store import load_record

RNG = np.random.default_rng(0)


def normal(n, d):
    return RNG.normal(size=(n, d))


def small_blocks(quick, folder):
    """Map lazily in blocks of 100 rows; the alternative has one BLAS limit around all of them."""
    import dask.array as da

    fitted = dkfm.KernelPCA(20, kernel=kernels.Gaussian(5.0)).fit(normal(500, 20))
    rows = da.from_array(normal(2_000 if quick else 20_000, 20), chunks=(100, 20))
    lazy = fitted.transform(rows)

    def limited():
        with single_blas_thread():
            lazy.compute(scheduler="threads")

    return partial(lazy.compute, scheduler="threads"), limited


def far_rows(quick, folder):
    """Evaluate a kernel on rows far from all landmarks; the alternative is near rows."""
    X, Z = normal(1_000, 10), normal(200 if quick else 2_000, 10)
    block = kernels.Gaussian(1.0).make_evaluator(X)
    return partial(block, Z + 60.0), partial(block, Z)


def small_output_chunks(quick, folder):
    """Score into chunks of 100 rows; the alternative is chunks of 1,000 rows."""
    dkfm.KernelPCA(20, kernel=kernels.Gaussian(5.0)).fit(normal(500, 20)).save(folder / "model")
    rows = normal(4_000 if quick else 40_000, 20)

    def score(chunk_rows):
        dkfm.batch_score(folder / "model", rows, folder / "out", chunk_rows=chunk_rows, progress=False)
        shutil.rmtree(folder / "out")

    return partial(score, 100), partial(score, 1_000)


def uniform_landmarks(certify, quick, folder):
    """Fit a map of 500 landmarks of many rows and certify it; the alternative is Nystroem's map."""
    X = normal(5_000 if quick else 100_000, 10)
    ours = dkfm.ExactFeatureMap(kernels.Gaussian(3.0), landmarks="uniform", n_landmarks=500, certify=certify)
    theirs = kernel_approximation.Nystroem(gamma=1 / 18, n_components=500)
    return partial(ours.fit, X), partial(theirs.fit, X)


def histograms_without_numba(kernel, theirs, quick, folder):
    """Evaluate a kernel of histograms without the extra fast; the alternative is scikit-learn's."""
    X, Z = (RNG.dirichlet(np.ones(64), size=n) for n in (1_000, 50 if quick else 200))

    def without_numba():
        found, columnwise_sums._has_numba = columnwise_sums._has_numba, lambda: False
        try:
            kernel(Z, X)
        finally:
            columnwise_sums._has_numba = found

    return without_numba, partial(theirs, Z, X)


def components(count, quick, folder):
    """Fit components from all eigenpairs; the alternative is scikit-learn's dense solver, which takes a few."""
    X = normal(500 if quick else 4_000, 20)
    ours = dkfm.KernelPCA(count, kernel=kernels.Gaussian(5.0), eigen_solver="dense")
    theirs = decomposition.KernelPCA(count, kernel="rbf", gamma=0.02, eigen_solver="dense")
    return partial(ours.fit, X), partial(theirs.fit, X)


def automatic_shrinkage(quick, folder):
    """Fit discriminants whose shrinkage is chosen; the alternative is a shrinkage that is given."""
    n = 400 if quick else 4_000
    y = RNG.integers(0, 5, n)
    X = normal(n, 20) + 0.5 * y[:, np.newaxis]
    chosen, given = (dkfm.KernelFisher(kernel=kernels.Gaussian(5.0), shrinkage=s) for s in ("auto", 0.1))
    return partial(chosen.fit, X, y), partial(given.fit, X, y)


def command(arguments, quick, folder):
    """Run a command on a tiny model; the alternative is a process that imports zarr."""
    dkfm.KernelPCA(5, kernel=kernels.Gaussian(5.0)).fit(normal(100, 5)).save(folder / "model")
    np.save(folder / "rows.npy", normal(1_000, 5))

    def run():
        subprocess.run([sys.executable, "-m", "dkfm", *arguments], cwd=folder, check=True, capture_output=True)

    return run, partial(subprocess.run, [sys.executable, "-c", "import zarr"], check=True)


def many_chunks(quick, folder):
    """Open an output of many chunks; the alternative opens its array alone."""
    import dask.array as da

    dkfm.KernelPCA(2, kernel=kernels.Gaussian(5.0)).fit(normal(50, 5)).save(folder / "model")
    rows = normal(1_000 if quick else 20_000, 5)
    dkfm.batch_score(folder / "model", rows, folder / "out", chunk_rows=1, progress=False)
    return partial(dkfm.open_scores, folder / "out"), partial(da.from_zarr, str(folder / "out" / "scores"))


def small_fit(quick, folder):
    """Fit components of 1,000 rows; the alternative is scikit-learn's."""
    X = load_digits().data[: 300 if quick else 1_000]
    ours = dkfm.KernelPCA(10, kernel=kernels.Gaussian(20.0))
    return partial(ours.fit, X), partial(decomposition.KernelPCA(10, kernel="rbf", gamma=1 / 800).fit, X)


def small_discriminants(quick, folder):
    """Fit discriminants of 1,000 rows; the alternative is scikit-learn's ridge regression of the class indicators."""
    X, y = load_digits(return_X_y=True)
    X, y = (values[: 300 if quick else 1_000] for values in (X, y))
    ours = dkfm.KernelFisher(kernel=kernels.Gaussian(20.0))
    theirs = kernel_ridge.KernelRidge(alpha=0.1, kernel="rbf", gamma=1 / 800)
    return partial(ours.fit, X, y), partial(theirs.fit, X, np.eye(10)[y])


def wide_table(quick, folder):
    """Score 4,000 columns into Parquet; the alternative maps in memory and writes one file with pyarrow."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rank = 500 if quick else 4_000
    fitted = dkfm.ExactFeatureMap(kernels.Gaussian(0.1), basis="cholesky").fit(normal(rank, 5))
    fitted.save(folder / "model")
    rows = normal(rank, 5)

    def score():
        dkfm.batch_score(folder / "model", rows, folder / "out.parquet", progress=False, overwrite=True)

    def write():
        columns = [pa.array(column) for column in fitted.transform(rows).T]
        table = pa.Table.from_arrays(columns, names=[f"x{i}" for i in range(len(columns))])
        pq.write_table(table, folder / "alone.parquet", compression="none", use_dictionary=False)

    return score, write


def parquet_rows(files, columns, group_rows, quick, folder):
    """Score a table; the alternative reads it with pyarrow and scores the array."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = 10_000 if quick else 100_000
    (folder / "rows").mkdir()
    for number in range(min(files, 20) if quick else files):
        table = pa.table({f"x{i}": column for i, column in enumerate(normal(columns, rows // files))})
        pq.write_table(table, folder / "rows" / f"{number:04d}.parquet", row_group_size=group_rows)
    fitted = dkfm.KernelPCA(5, kernel=kernels.Gaussian(columns**0.5)).fit(table.slice(0, 200).to_pandas().to_numpy())
    fitted.save(folder / "model")
    names = table.column_names

    def score():
        dkfm.batch_score(
            folder / "model", folder / "rows", folder / "out", columns=names, progress=False, overwrite=True
        )

    def read_first():
        rows = np.column_stack([column.to_numpy() for column in pq.read_table(folder / "rows").columns])
        dkfm.batch_score(folder / "model", rows, folder / "alone", progress=False, overwrite=True)

    return score, read_first


def models_in_turn(quick, folder):
    """Score with two large models in turn; the alternative checks their files and maps with models in memory."""
    fitted, rows = {}, normal(200, 20)
    for name, sigma in (("one", 1.0), ("other", 2.0)):
        fitted[name] = dkfm.ExactFeatureMap(kernels.Gaussian(sigma), basis="cholesky")
        fitted[name].fit(normal(500 if quick else 6_000, 20)).save(folder / name)

    def score():
        for name in fitted:
            dkfm.batch_score(folder / name, rows, folder / "out", progress=False, overwrite=True)

    def check_and_map():
        for name, feature_map in fitted.items():
            load_record(folder / name, streamed=True)
            np.save(folder / "alone.npy", feature_map.transform(rows))

    return score, check_and_map


def rows_in_memory(n, quick, folder):
    """Map rows in memory; the alternative is a dask array of chunks of them, on threads."""
    import dask.array as da

    fitted = dkfm.KernelPCA(10, kernel=kernels.Gaussian(5.0)).fit(normal(1_000, 20))
    rows = normal(min(n, 2_000) if quick else n, 20)
    lazy = fitted.transform(da.from_array(rows, chunks=(max(100, n // 20), 20)))
    return partial(fitted.transform, rows), partial(lazy.compute, scheduler="threads")


def half_integer_smoothness(quick, folder):
    """Evaluate a Matern kernel of nu = 7/2; the alternative is nu = 5/2."""
    X, Z = normal(1_000, 10), normal(200 if quick else 2_000, 10)
    return tuple(partial(kernels.Matern(nu, 3.0).make_evaluator(X), Z) for nu in (3.5, 2.5))


LINES = {
    "blocks of 100 rows, lazily": small_blocks,
    "rows far from all landmarks": far_rows,
    "output chunks of 100 rows": small_output_chunks,
    "500 uniform landmarks": partial(uniform_landmarks, "all"),
    "500 uniform landmarks, sampled": partial(uniform_landmarks, "sample"),
    "ChiSquared without numba": partial(histograms_without_numba, kernels.ChiSquared(), metrics.pairwise.chi2_kernel),
    "Laplacian without numba": partial(
        histograms_without_numba, kernels.Laplacian(64.0), metrics.pairwise.laplacian_kernel
    ),
    "5 components of all": partial(components, 5),
    "100 components of all": partial(components, 100),
    "shrinkage that is chosen": automatic_shrinkage,
    "dkfm score of 1,000 rows": partial(command, ["score", "model", "rows.npy", "out", "--overwrite", "--no-progress"]),
    "dkfm verify of a tiny model": partial(command, ["verify", "model"]),
    "opening an output of many chunks": many_chunks,
    "components of 1,000 rows": small_fit,
    "discriminants of 1,000 rows": small_discriminants,
    "4,000 columns to Parquet": wide_table,
    "two models in turn": models_in_turn,
    "500 Parquet files": partial(parquet_rows, 500, 20, 200),
    "300 columns in groups of 1,000": partial(parquet_rows, 1, 300, 1_000),
    "40,000 rows in memory": partial(rows_in_memory, 40_000),
    "100 rows in memory": partial(rows_in_memory, 100),
    "Matern of nu = 7/2": half_integer_smoothness,
}


def seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, twice")
    parser.add_argument("names", nargs="*", metavar="NAME", help="; ".join(LINES))
    options = parser.parse_args()
    if unknown := set(options.names) - set(LINES):
        parser.error(f"there is no line {', '.join(unknown)}")
    rounds = 2 if options.quick else 9
    print(f"{'':<36}{'seconds':>9}{'times as long':>15}{'least':>8}{'most':>8}   of {rounds} rounds")
    for name in options.names or LINES:
        with tempfile.TemporaryDirectory() as folder:
            rivals = LINES[name](options.quick, Path(folder))
            for rival in rivals:
                rival()
            times = [[seconds(rival) for rival in rivals] for _ in range(rounds)]
        ratios = sorted(ours / theirs for ours, theirs in times)
        median = statistics.median(ours for ours, _ in times)
        print(
            f"{name:<36}{median:>9.3g}{statistics.median(ratios):>15.2f}{ratios[0]:>8.2f}{ratios[-1]:>8.2f}", flush=True
        )


if __name__ == "__main__":
    main()
