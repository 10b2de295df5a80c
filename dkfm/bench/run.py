"""Compare the speed of dkfm with scikit-learn, with the bare arithmetic, and with dkfm without Dask, in one run.

Rivals run in turn in every round, and each ratio is computed within one round, because a busy machine slows both sides.
Before rivals are timed, they must agree on the scores of some rows.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from math import sqrt
from pathlib import Path

from dkfm.bench import calibration, workloads
from dkfm.bench.bench_environment import DTYPE_TOLERANCES, BenchEnvironment
from dkfm.bench.machine import describe_machine
from dkfm.core.display.text_tables import Row, Table
from dkfm.errors import ClusterError
from dkfm.execution.clusters.connect import connect
from dkfm.execution.clusters.current_client import find_client
from dkfm.execution.clusters.local import local_cluster
from dkfm.files import temporary_folders

_LOW_RANK_SIGMA = 1.08
"""Width of a Gaussian kernel at which 2,000 standard normal points of the plane have a rank of about 250."""


@dataclass(frozen=True)
class BenchSizes:
    """Sizes of all measurements.

    Attributes
    ----------
    rounds, fit_rounds : int
        Number of times that jobs, and fits, are timed.
    chunks : tuple of int
        Rows of a scikit-learn task: the sizes tried, ascending. The source has chunks of the first size.
    components, scored_n : int
        Components and landmarks of the scoring jobs.
    scored : tuple of (int, int)
        (columns, rows) of each scoring job.
    odd, friendly : (int, int, int)
        (landmarks, columns, components) of two models: not multiples of any block size, and powers of 2 nearby.
    odd_rows, laplacian_n, laplacian_rows : int
        Rows that those two models score; landmarks and rows of the Laplacian job.
    mapped_n, mapped_columns, mapped_rows : int
        Landmarks, columns and rows of the feature map jobs.
    fitted_n, fitted_columns : int
        Shape of the training rows of the fits.
    dask_n, dask_rows : int
        Landmarks and rows of the job that runs both on threads and on the cluster.
    growth : tuple of (int, int)
        (rows, landmarks) of the jobs whose memory is measured.
    sized_n, sized_rows, sized_tasks, sized_bytes : int
        To measure the constants of `sizing`: landmarks, rows of a thread, empty tasks, bytes that a thread moves.
    """

    rounds: int
    fit_rounds: int
    chunks: tuple[int, ...]
    components: int
    scored_n: int
    scored: tuple[tuple[int, int], ...]
    odd: tuple[int, int, int]
    friendly: tuple[int, int, int]
    odd_rows: int
    laplacian_n: int
    laplacian_rows: int
    mapped_n: int
    mapped_columns: int
    mapped_rows: int
    fitted_n: int
    fitted_columns: int
    dask_n: int
    dask_rows: int
    growth: tuple[tuple[int, int], ...]
    sized_n: int
    sized_rows: int
    sized_tasks: int
    sized_bytes: int


FULL = BenchSizes(
    rounds=3,
    fit_rounds=3,
    chunks=(1_000, 4_000, 16_000),
    components=20,
    scored_n=4_000,
    scored=((10, 240_000), (50, 180_000), (200, 120_000), (784, 120_000)),
    odd=(3_777, 33, 7),
    friendly=(4_096, 32, 8),
    odd_rows=150_000,
    laplacian_n=2_000,
    laplacian_rows=32_000,
    mapped_n=2_000,
    mapped_columns=50,
    mapped_rows=36_000,
    fitted_n=3_000,
    fitted_columns=50,
    dask_n=2_000,
    dask_rows=1_000_000,
    growth=(
        (100_000, 2_000),
        (1_000_000, 2_000),
        (100_000, 1_000),
        (100_000, 4_000),
        (100_000, 8_000),
    ),
    sized_n=4_000,
    sized_rows=20_000,
    sized_tasks=10_000,
    sized_bytes=256_000_000,
)
QUICK = replace(
    FULL,
    fit_rounds=1,
    scored_n=1_000,
    scored=((10, 66_000), (784, 20_000)),
    odd=(977, 33, 7),
    friendly=(1_024, 32, 8),
    odd_rows=64_000,
    laplacian_n=500,
    laplacian_rows=8_000,
    mapped_n=500,
    mapped_rows=30_000,
    fitted_n=1_000,
    dask_n=1_000,
    dask_rows=66_000,
    growth=((66_000, 1_000), (132_000, 2_000)),
    sized_n=1_000,
    sized_rows=8_000,
    sized_tasks=300,
    sized_bytes=64_000_000,
)
"""Smaller sizes; each job still has at least two dkfm tasks."""


def run_benchmarks(
    sizes: BenchSizes, address: str | None, say: Callable[[str], None], wait_for_workers: float | None = None
) -> dict[str, object]:
    """Run all measurements.

    Parameters
    ----------
    sizes : BenchSizes
        `FULL` or `QUICK`.
    address : str or None
        Scheduler of a cluster whose workers see this machine's temporary directory; None starts a local cluster.
    say : callable
        Called with each line of the tables as soon as it is known.
    wait_for_workers : float, optional
        Seconds to wait for the first worker of that cluster; see `dkfm.execution.clusters.connect.connect`.

    Returns
    -------
    dict
        The same results for JSON.

    Raises
    ------
    DisagreementError
        Two jobs that are compared return different scores.
    ClusterError
        The scheduler cannot be reached, or this process already has a current Dask client.
    """
    if find_client(None) is not None:
        raise ClusterError("A Dask client is current here, and dkfm bench compares with threads: close it first.")
    report: dict[str, object] = {"sizes": asdict(sizes)}
    with temporary_folders.open_temporary_folder("bench") as folder:
        with _open_environment(address, folder, sizes, wait_for_workers) as environment:
            report["machine"] = machine = describe_machine(environment.client)
            for name, fact in machine.items():
                say(f"{name.replace('_', ' '):<22}{fact}")
            for name, table in _measure_tables(environment, sizes):
                _report_table(name, table, report, say)
            measured = calibration.measure_constants(
                environment, sizes.sized_n, sizes.sized_rows, sizes.sized_tasks, sizes.sized_bytes
            )
            title = "Constants of a sizing, with all threads at work"
            _report_table("sizing", Table(title, measured.table_rows()), report, say)
            report["constants"] = asdict(measured.constants)
        _report_table("growth", _measure_growth(address, folder, sizes, wait_for_workers), report, say)
    return report


def _report_table(name: str, table: Table, report: dict[str, object], say: Callable[[str], None]) -> None:
    report[name] = table.to_json_rows()
    for line in ("", *table.format_lines()):
        say(line)


@contextmanager
def _open_environment(
    address: str | None, folder: Path, sizes: BenchSizes, wait_for_workers: float | None = None
) -> Iterator[BenchEnvironment]:
    """Yield an environment whose client is not the current one, so that jobs without a client run on threads."""
    from distributed import Client

    if address is not None:
        with connect(address, set_as_default=False, wait_for_workers=wait_for_workers) as client:
            yield BenchEnvironment(client, folder, sizes.chunks, sizes.rounds)
        return
    with local_cluster() as cluster, Client(cluster, set_as_default=False) as client:
        yield BenchEnvironment(client, folder, sizes.chunks, sizes.rounds)


def _measure_tables(environment: BenchEnvironment, sizes: BenchSizes) -> Iterator[tuple[str, Table]]:
    n, q = sizes.scored_n, sizes.components
    cases = [workloads.bench_scoring(environment, n, q, columns, rows) for columns, rows in sizes.scored]
    title = f"KernelPCA, N = {n:,}, {q} components, Zarr to Zarr: times less than scikit-learn's float64"
    yield "scoring", Table(title, [row for case in cases for row in case.sklearn_table_rows])
    title = "Those jobs beside their limit, the bare products and exponentials: its share of the loop and of the job"
    yield "limits", Table(title, [row for case in cases for row in case.lower_bound_table_rows])
    odd = workloads.bench_odd_shapes(environment, sizes.odd, sizes.friendly, sizes.odd_rows)
    yield "odd", Table("Unfriendly numbers beside friendly ones: time per kernel value", [odd])
    laplacian = workloads.bench_laplacian(environment, sizes.laplacian_n, q, sizes.laplacian_rows)
    title = f"KernelPCA of a Laplacian, {'with' if find_spec('numba') else 'without'} the extra fast: times less"
    yield "laplacian", Table(title, [laplacian])
    title = "Features, Zarr to Zarr: times less than scikit-learn's float64 Nystroem; errors of inner products"
    yield "features", Table(title, list(_measure_features(environment, sizes)))
    fits = workloads.bench_fits(environment, sizes.fitted_n, sizes.fitted_columns, q, sizes.fit_rounds)
    yield "fits", Table("Fits in this process: times less than scikit-learn's", list(fits))
    share = workloads.bench_dask_overhead(environment, sizes.dask_n, q, sizes.dask_rows)
    yield "dask", Table("Dask's share: times as long on the cluster as on a thread pool of this process", [share])


def _measure_features(environment: BenchEnvironment, sizes: BenchSizes) -> Iterator[Row]:
    n, columns, rows = sizes.mapped_n, sizes.mapped_columns, sizes.mapped_rows
    yield from workloads.bench_features(environment, sqrt(columns / 2), n, columns, rows, tuple(DTYPE_TOLERANCES))
    yield from workloads.bench_features(environment, _LOW_RANK_SIGMA, n, 2, 2 * rows, ("float64",))


def _measure_growth(address: str | None, folder: Path, sizes: BenchSizes, wait_for_workers: float | None) -> Table:
    rows = []
    for count, n in sizes.growth:
        jobs = []
        for _ in range(sizes.rounds):
            # A new local cluster: its peak memory is that of one job.
            with _open_environment(address, folder, sizes, wait_for_workers) as environment:
                jobs.append(workloads.bench_growth_job(environment, n, sizes.components, count))
        rows.append(workloads.summarize_growth(jobs, n, count))
    return Table("As rows and N grow: time, the peak of the largest worker process, what was predicted", rows)
