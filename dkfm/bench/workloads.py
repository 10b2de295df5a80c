"""Set up rivals with the same task, time them, and return rows of a table, in one function for each benchmark."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np

from dkfm.bench import bare_scoring_jobs, sklearn_peers
from dkfm.bench.bench_environment import (
    AGREEMENT_ROWS,
    DTYPE_TOLERANCES,
    BenchEnvironment,
    Job,
    align_signs,
    require_agreement,
    sample_inner_products,
)
from dkfm.bench.timing import Ratio, Times
from dkfm.core import cpus
from dkfm.core.display.text_tables import Row
from dkfm.core.rows import Array
from dkfm.estimators import ExactFeatureMap, KernelPCA
from dkfm.estimators.fitting.parameter_types import DType
from dkfm.execution import memory, model_cache
from dkfm.kernels import Gaussian, Laplacian
from dkfm.numerics.model import Head
from dkfm.scoring.planning import plan_with_model_in_memory
from dkfm.scoring.run import batch_score
from dkfm.sources.opening import open_source

if TYPE_CHECKING:
    from distributed import Client

_TILE_ROWS = (256, 1024, 2048)
_COLUMNS = 50
"""Columns of the jobs that have no parameter `columns`."""

Rivals: TypeAlias = dict[str, Callable[[Path], object]]


@dataclass(frozen=True)
class ScoringResult:
    """Two tables of a scoring benchmark, with a row for each precision.

    They hold times beside scikit-learn's, and beside those of the bare arithmetic, a lower bound.
    """

    sklearn_table_rows: Sequence[Row]
    lower_bound_table_rows: Sequence[Row]


@dataclass(frozen=True)
class GrowthResult:
    """Seconds of a job, peak memory of the largest worker process in bytes, and the prediction of this peak."""

    seconds: float
    peak_bytes: int
    predicted_bytes: int


def default_gaussian(columns: int) -> Gaussian:
    """Return the Gaussian kernel with gamma = 1 / d, scikit-learn's default."""
    return Gaussian(sqrt(columns / 2))


def bench_scoring(environment: BenchEnvironment, n: int, q: int, columns: int, rows: int) -> ScoringResult:
    """Compare the scoring of rows with q components of n landmarks."""
    X = _normal_rows(n, columns)
    models = {dtype: _fit_components(environment, q, X, dtype) for dtype in DTYPE_TOLERANCES}
    ours: dict[str, Job] = {
        dtype: partial(_score, environment.client, environment.save_model(model)) for dtype, model in models.items()
    }
    # Lanczos components are exact, so that the scores of the rivals agree.
    theirs = environment.make_sklearn_jobs(sklearn_peers.make_sklearn_kernel_pca(1 / columns, q, "arpack").fit(X), n, q)
    require_agreement(environment, ours, theirs, _normal_rows(AGREEMENT_ROWS, columns), align_signs)
    source = environment.create_random_rows(rows, columns)
    rivals = _bind_stored_rows(environment, ours, theirs, rows, columns)
    Z = np.asarray(open_source(source).read(slice(0, rows)))
    for dtype, model in models.items():
        rivals[f"loop {dtype}"] = bare_scoring_jobs.prepare_threaded_tile_loop(model.model_, Z, environment.threads)
        for tile in _TILE_ROWS:
            rivals[f"{dtype} {tile}"] = bare_scoring_jobs.prepare_bare_arithmetic(
                rows, columns, n, q, dtype, tile, environment.threads
            )
    times = environment.time_jobs(rivals)
    scores = [
        {"columns": columns, "rows": rows, "dtype": dtype, **_make_sklearn_row(times, dtype, theirs)}
        for dtype in DTYPE_TOLERANCES
    ]
    limits = [{"columns": columns, "dtype": dtype, **_make_lower_bound_row(times, dtype)} for dtype in DTYPE_TOLERANCES]
    return ScoringResult(scores, limits)


def _bind_stored_rows(
    environment: BenchEnvironment, ours: Mapping[str, Job], theirs: Mapping[str, Job], rows: int, columns: int
) -> Rivals:
    """Bind each job to the path of its stored rows: dkfm reads rows of its precision, scikit-learn reads float64."""
    bound = {name: partial(job, environment.create_random_rows(rows, columns, name)) for name, job in ours.items()}
    return {
        **bound,
        **{name: partial(job, environment.create_random_rows(rows, columns)) for name, job in theirs.items()},
    }


def _score(client: "Client | None", model: Path, source: Path, destination: Path) -> None:
    batch_score(model, source, destination, client=client, progress=False)


def _make_sklearn_row(times: Times, ours: str, theirs: Mapping[str, Job]) -> Row:
    """Return table cells that compare the dkfm job `ours` with the fastest scikit-learn job."""
    best = times.find_fastest_name(theirs)
    return {
        "seconds": times.median(ours),
        "scikit-learn": times.median(best),
        "chunk_rows": best,
        "times_less": times.ratio(best, ours),
    }


def _make_lower_bound_row(times: Times, dtype: str) -> Row:
    """Return the seconds of the fastest bare arithmetic, a lower bound, and its share of the loop and of the job."""
    limit = times.find_fastest_name([f"{dtype} {tile}" for tile in _TILE_ROWS])
    return {
        "limit_seconds": times.median(limit),
        "loop_seconds": times.median(f"loop {dtype}"),
        "share_of_loop": times.ratio(limit, f"loop {dtype}"),
        "share_of_job": times.ratio(limit, dtype),
    }


def bench_laplacian(environment: BenchEnvironment, n: int, q: int, rows: int) -> Row:
    """Compare scoring with a Laplacian kernel, whose values are no function of matrix products."""
    X, kernel = _normal_rows(n, _COLUMNS), Laplacian(float(_COLUMNS))
    model = environment.save_model(KernelPCA(q, kernel=kernel, workspace=environment.folder).fit(X))
    ours: dict[str, Job] = {"float64": partial(_score, environment.client, model)}
    theirs = environment.make_sklearn_jobs(sklearn_peers.LaplacianKernelPCA(1 / _COLUMNS, q).fit(X), n, q)
    require_agreement(environment, ours, theirs, _normal_rows(AGREEMENT_ROWS, _COLUMNS), align_signs)
    times = environment.time_jobs(_bind_stored_rows(environment, ours, theirs, rows, _COLUMNS))
    return {"columns": _COLUMNS, "N": n, "rows": rows, **_make_sklearn_row(times, "float64", theirs)}


def bench_odd_shapes(
    environment: BenchEnvironment, unfriendly: tuple[int, int, int], friendly: tuple[int, int, int], rows: int
) -> Row:
    """Compare models whose (landmarks, columns, components) fit no block size with models of powers of 2."""
    rivals: Rivals = {}
    for name, (n, columns, q) in (("odd", unfriendly), ("friendly", friendly)):
        model = environment.save_model(_fit_components(environment, q, _normal_rows(n, columns)))
        rivals[name] = partial(_score, environment.client, model, environment.create_random_rows(rows, columns))
    times = environment.time_jobs(rivals)
    per_value = [
        [t / (rows * n) for t in times.seconds_by_name[s]]
        for s, (n, _, _) in zip(rivals, (unfriendly, friendly), strict=True)
    ]
    return {
        "N,_columns,_components": f"{unfriendly[0]:,}, {unfriendly[1]}, {unfriendly[2]}",
        "beside": f"{friendly[0]:,}, {friendly[1]}, {friendly[2]}",
        "rows": rows,
        "seconds": times.median("odd"),
        "friendly_seconds": times.median("friendly"),
        "times_as_long": Ratio.of(*per_value),
    }


def bench_features(
    environment: BenchEnvironment, sigma: float, n: int, columns: int, rows: int, dtypes: tuple[str, ...]
) -> Iterator[Row]:
    """Compare feature maps of n landmarks, in the cholesky basis, for each precision."""
    X, kernel, gamma = _normal_rows(n, columns), Gaussian(sigma), 0.5 / sigma**2
    maps = {dtype: ExactFeatureMap(kernel, basis="cholesky", dtype=cast("DType", dtype)).fit(X) for dtype in dtypes}
    ours: dict[str, Job] = {
        dtype: partial(_score, environment.client, environment.save_model(phi)) for dtype, phi in maps.items()
    }
    theirs = environment.make_sklearn_jobs(sklearn_peers.make_sklearn_nystroem(gamma, n).fit(X), n, n)
    require_agreement(
        environment,
        ours,
        theirs,
        np.vstack([X[:AGREEMENT_ROWS], _normal_rows(AGREEMENT_ROWS, columns)]),
        sample_inner_products,
    )
    times = environment.time_jobs(_bind_stored_rows(environment, ours, theirs, rows, columns))
    for dtype, phi in maps.items():
        yield {
            "columns": columns,
            "N": n,
            "rows": rows,
            "dtype": dtype,
            "features": phi.rank_,
            **_make_sklearn_row(times, dtype, theirs),
            "error": phi.certificate_.error,
            "Nystroem's": sklearn_peers.measure_kernel_error(
                sklearn_peers.make_sklearn_nystroem(gamma, n), kernel, X, dtype
            ),
        }


def bench_fits(environment: BenchEnvironment, n: int, columns: int, q: int, rounds: int) -> Iterator[Row]:
    """Compare fits of q components, and of all features, to n rows, in this process on all its cores."""
    X, kernel, gamma = _normal_rows(n, columns), default_gaussian(columns), 1 / columns
    pairs: list[tuple[sklearn_peers.Transformer, sklearn_peers.Transformer]] = [
        (KernelPCA(q, kernel=kernel), sklearn_peers.make_sklearn_kernel_pca(gamma, q, "dense")),
        (ExactFeatureMap(kernel, basis="cholesky"), sklearn_peers.make_sklearn_nystroem(gamma, n)),
    ]
    for ours, theirs in pairs:
        times = environment.time_jobs({"ours": _prepare_fit(ours, X), "theirs": _prepare_fit(theirs, X)}, rounds)
        yield {
            "fit": type(ours).__name__,
            "scikit-learn's": type(theirs).__name__,
            "N": n,
            "columns": columns,
            "seconds": times.median("ours"),
            "scikit-learn": times.median("theirs"),
            "times_less": times.ratio("theirs", "ours"),
        }


def _prepare_fit(estimator: sklearn_peers.Transformer, X: Array) -> Callable[[Path], object]:
    return lambda _: estimator.fit(X)


def bench_dask_overhead(environment: BenchEnvironment, n: int, q: int, rows: int) -> Row:
    """Compare scoring on the cluster with scoring on threads of this process."""
    model = environment.save_model(_fit_components(environment, q, _normal_rows(n, _COLUMNS)))
    source = environment.create_random_rows(rows, _COLUMNS)
    times = environment.time_jobs(
        {"cluster": partial(_score, environment.client, model, source), "threads": partial(_score, None, model, source)}
    )
    return {
        "rows": rows,
        "N": n,
        "columns": _COLUMNS,
        "dask_threads": environment.threads,
        "pool_threads": cpus.COUNT,
        "cluster_seconds": times.median("cluster"),
        "pool_seconds": times.median("threads"),
        "times_as_long": times.ratio("cluster", "threads"),
    }


def bench_growth_job(environment: BenchEnvironment, n: int, q: int, rows: int) -> GrowthResult:
    """Time scoring once on a new cluster, and measure the peak memory of its workers, which never falls."""
    before = max(environment.client.run(model_cache.import_and_measure_peak_memory).values())
    pca, source = make_random_kernel_pca(n, q, _COLUMNS), environment.create_random_rows(rows, _COLUMNS)
    job = partial(_score, environment.client, environment.save_model(pca))
    environment.time_jobs({"imports": partial(job, environment.create_random_rows(AGREEMENT_ROWS, _COLUMNS))}, 1)
    times = environment.time_jobs({"job": partial(job, source)}, 1)
    peak = max(environment.client.run(memory.peak_memory).values())
    job_plan = plan_with_model_in_memory(pca.model_, ["scores"], open_source(source), threads=environment.threads)
    predicted = job_plan.worker_bytes(max(environment.client.nthreads().values()), before)
    return GrowthResult(times.median("job"), peak, predicted)


def summarize_growth(jobs: Sequence[GrowthResult], n: int, rows: int) -> Row:
    """Return the medians of jobs of the same size that ran on separate clusters."""
    seconds, peak = [job.seconds for job in jobs], median(job.peak_bytes for job in jobs)
    return {
        "rows": rows,
        "N": n,
        "seconds": median(seconds),
        "microseconds_a_row": Ratio.of(seconds, [rows / 1e6] * len(jobs)),
        "peak_MB": peak / 1e6,
        "predicted_MB": median(job.predicted_bytes for job in jobs) / 1e6,
        "peak_of_predicted": median(job.peak_bytes / job.predicted_bytes for job in jobs),
    }


def _fit_components(environment: BenchEnvironment, q: int, X: Array, dtype: str = "float64") -> KernelPCA:
    kernel, precision = default_gaussian(X.shape[1]), cast("DType", dtype)
    return KernelPCA(q, kernel=kernel, dtype=precision, workspace=environment.folder).fit(X)


def make_random_kernel_pca(n: int, q: int, columns: int) -> KernelPCA:
    """Return a KernelPCA with random weights, which needs no long fit; time and memory do not depend on the weights."""
    X, weights = _normal_rows(n, columns), np.random.default_rng(n).normal(size=(n, q))
    pca = KernelPCA(1, kernel=default_gaussian(columns)).fit(_normal_rows(AGREEMENT_ROWS, columns))
    pca.model_ = replace(pca.model_, landmarks=X, heads={"scores": Head(weights, np.zeros(q))})
    return pca


def _normal_rows(n: int, columns: int) -> Array:
    return np.random.default_rng([n, columns]).normal(size=(n, columns))
