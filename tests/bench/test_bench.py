"""`dkfm bench` at sizes where nothing is measured but that everything is."""

import json
import math
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import zarr
from click.testing import CliRunner

from dkfm import kernels
from dkfm.bench import bare_scoring_jobs, bench_environment, kernel_values, sklearn_peers, workloads
from dkfm.bench import run as bench
from dkfm.bench.timing import Ratio, Times, time_round_robin
from dkfm.cli.app import main
from dkfm.errors import ClusterError, DisagreementError

TINY = bench.BenchSizes(
    rounds=2,
    fit_rounds=1,
    chunks=(50, 100, 400),
    components=3,
    scored_n=60,
    scored=((5, 400),),
    odd=(37, 5, 2),
    friendly=(32, 4, 3),
    odd_rows=400,
    laplacian_n=60,
    laplacian_rows=100,
    mapped_n=300,
    mapped_columns=5,
    mapped_rows=400,
    fitted_n=60,
    fitted_columns=5,
    dask_n=60,
    dask_rows=400,
    growth=((400, 60), (800, 60)),
    sized_n=60,
    sized_rows=400,
    sized_tasks=40,
    sized_bytes=1_600_000,
)
PARTS = ["scoring", "limits", "odd", "laplacian", "features", "fits", "dask", "sizing", "growth"]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """Make an empty temporary directory the only one that there is."""
    folder, before = tmp_path_factory.mktemp("scratch"), tempfile.tempdir
    tempfile.tempdir = str(folder)
    yield folder
    tempfile.tempdir = before


@pytest.fixture(scope="module")
def cluster(scratch):
    """A scheduler with a worker inside this process."""
    from distributed import LocalCluster

    with LocalCluster(processes=False, n_workers=1, threads_per_worker=2, dashboard_address="127.0.0.1:0") as started:
        yield started


@dataclass(frozen=True)
class Run:
    """What a run of everything said and returned, which clients its jobs had, and what it left."""

    lines: list
    report: dict
    clients: list
    left: set


@pytest.fixture(scope="module")
def measured(cluster, scratch):
    """Run everything once, on a given cluster."""

    def batch_score(model, source, destination, client, progress):
        clients.append(None if client is None else client.scheduler.address)
        return original(model, source, destination, client=client, progress=progress)

    original, before, lines, clients = workloads.batch_score, set(scratch.iterdir()), [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workloads, "batch_score", batch_score)
        patch.setattr(bench, "local_cluster", lambda: pytest.fail("a cluster was started"))
        report = bench.run_benchmarks(TINY, cluster.scheduler_address, lines.append)
    return Run(lines, report, clients, set(scratch.iterdir()) - before)


@pytest.fixture
def site(cluster, tmp_path):
    """The place of a benchmark, whose client is not the current one."""
    with bench._open_environment(cluster.scheduler_address, tmp_path, TINY) as found:
        yield found


def ratios(value):
    if isinstance(value, dict) and set(value) == {"median", "least", "most", "rounds"}:
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from ratios(part)


@pytest.mark.slow
def test_the_report_has_every_part_and_every_number_is_finite_and_positive(measured):
    report = json.loads(json.dumps(measured.report, allow_nan=False))
    assert list(report) == ["sizes", "machine", *PARTS[:-1], "constants", "growth"]
    cells = [cell for part in PARTS for row in report[part] for cell in row.values()]
    assert all(math.isfinite(cell) and cell > 0 for cell in cells if not isinstance(cell, str | dict))
    assert [row["dtype"] for row in report["scoring"]] == ["float64", "float32"]
    maps = [(row["columns"], row["dtype"]) for row in report["features"]]
    assert maps == [(5, "float64"), (5, "float32"), (2, "float64")]
    assert [row["fit"] for row in report["fits"]] == ["KernelPCA", "ExactFeatureMap"]


@pytest.mark.slow
def test_every_part_has_a_ratio_whose_median_lies_between_its_least_and_most(measured):
    for part in PARTS:
        found = list(ratios(measured.report[part]))
        assert len(found) >= len(measured.report[part])
        least = -math.inf if part == "sizing" else 0  # costs are differences, which noise can make negative
        for ratio in found:
            assert least < ratio["least"] <= ratio["median"] <= ratio["most"] < math.inf
            assert ratio["rounds"] == (TINY.fit_rounds if part == "fits" else TINY.rounds)


@pytest.mark.slow
def test_what_it_says_are_threads_versions_and_the_same_tables(measured):
    said = {line[:22].strip(): line[22:] for line in measured.lines if line}
    for name in ("cores", "dask threads", "blas threads per task", "pool threads"):
        assert int(said[name]) >= 1
    assert said["scikit-learn"]
    assert "openblas" in said["blas"] or "mkl" in said["blas"]
    text = "\n".join(measured.lines)
    for part in PARTS:
        first = next(ratios(measured.report[part]))
        assert f"{first['median']:.3g} ({first['least']:.3g} to {first['most']:.3g})" in text


@pytest.mark.slow
def test_nothing_is_left_in_the_temporary_directory(measured):
    assert measured.left == set()


@pytest.mark.slow
def test_features_of_low_rank_are_fewer_and_errors_are_those_of_the_same_pairs(measured):
    full, single, low = measured.report["features"]
    assert full["features"] == 300
    assert low["features"] < 300
    assert max(full["error"], low["error"]) < 1e-12 < single["error"] < 1e-5
    kernel = workloads.Gaussian(math.sqrt(2.5))
    X = workloads._normal_rows(300, 5)
    features = sklearn_peers.make_sklearn_nystroem(1 / 5, 300).fit(X).transform(X)
    expected = np.abs(features @ features.T - kernel(X, X)).max()
    assert full["Nystroem's"] == pytest.approx(expected, rel=0.1)


def test_a_peer_that_computes_something_else_is_not_timed(site, monkeypatch):
    original = sklearn_peers.make_sklearn_kernel_pca
    monkeypatch.setattr(
        sklearn_peers, "make_sklearn_kernel_pca", lambda gamma, q, solver: original(1.01 * gamma, q, solver)
    )
    monkeypatch.setattr(bench_environment, "time_round_robin", lambda *_: pytest.fail("it was timed"))
    with pytest.raises(DisagreementError, match="dkfm's float64 scores of 5 columns differ from scikit-learn's by"):
        workloads.bench_scoring(site, 60, 3, 5, 400)


def test_a_map_that_computes_something_else_is_not_timed(site, monkeypatch):
    original = sklearn_peers.make_sklearn_nystroem
    monkeypatch.setattr(sklearn_peers, "make_sklearn_nystroem", lambda gamma, n: original(1.01 * gamma, n))
    with pytest.raises(DisagreementError, match="scores of 5 columns"):
        next(workloads.bench_features(site, 2.0, 60, 5, 400, ("float64",)))


def test_scores_of_the_other_sign_agree_and_nan_does_not():
    scores = np.random.default_rng(0).normal(size=(9, 3))
    left, right = bench_environment.align_signs(scores * [1.0, -1.0, 1.0], scores)
    np.testing.assert_array_equal(left, right)


def test_a_job_that_leaves_nan_is_not_timed(site):
    def write(value, source, destination):
        bench_environment._create_array(destination, (4, 2), 4)[...] = value

    jobs = [lambda *paths, value=value: write(value, *paths) for value in (1.0, math.nan)]
    rows = np.ones((4, 2))
    bench_environment.require_agreement(
        site, {"float64": jobs[0]}, {"50": jobs[0]}, rows, bench_environment.align_signs
    )
    with pytest.raises(DisagreementError, match="by nan"):
        bench_environment.require_agreement(
            site, {"float64": jobs[1]}, {"50": jobs[0]}, rows, bench_environment.align_signs
        )


def test_the_best_chunk_size_is_the_one_compared_with():
    times = Times({"ours": [1.0, 1.0, 1.0], "50": [3.0, 3.0, 9.0], "100": [2.0, 8.0, 2.0], "400": [4.0, 1.0, 4.0]})
    row = workloads._make_sklearn_row(times, "ours", {"50": None, "100": None, "400": None})
    assert (row["chunk_rows"], row["scikit-learn"], row["times_less"]) == ("100", 2.0, Ratio(2.0, 2.0, 8.0, 3))


@pytest.mark.slow
def test_scikit_learns_job_writes_what_transform_returns_at_every_chunk_size_and_every_time(site):
    X = workloads._normal_rows(60, 5)
    fitted = sklearn_peers.make_sklearn_kernel_pca(1 / 5, 3, "dense").fit(X)
    source = site.create_random_rows(430, 5)
    expected = fitted.transform(zarr.open_array(source)[:])
    jobs = site.make_sklearn_jobs(fitted, 60, 3)
    assert list(jobs) == ["50", "100", "400"]
    for turn in range(2):
        for name, job in jobs.items():
            job(source, site.folder / f"{turn}-{name}")
            found = zarr.open_array(site.folder / f"{turn}-{name}" / "scores")
            np.testing.assert_allclose(found[:], expected, rtol=0, atol=1e-14)
            assert found.chunks == (int(name), 3)
            assert [type(codec).__name__ for codec in found.metadata.codecs] == ["BytesCodec", "Crc32cCodec"]


def test_a_chunk_size_that_a_worker_cannot_hold_is_not_tried(site, monkeypatch):
    fitted = sklearn_peers.make_sklearn_kernel_pca(1 / 5, 3, "dense").fit(workloads._normal_rows(60, 5))
    monkeypatch.setattr(bench_environment.memory, "task_budget", lambda client, threads: 3 * 8 * 60 * 100)
    assert list(site.make_sklearn_jobs(fitted, 60, 3)) == ["50", "100"]
    monkeypatch.setattr(bench_environment.memory, "task_budget", lambda client, threads: 0)
    assert list(site.make_sklearn_jobs(fitted, 60, 3)) == ["50"]


def test_rivals_run_in_turn_each_round_begun_by_another_and_each_where_nothing_is(tmp_path):
    order = []

    def rival(name):
        def run(place):
            assert not place.exists()
            place.mkdir()
            order.append(name)

        return run

    times = time_round_robin({name: rival(name) for name in "abc"}, 4, tmp_path / "out")
    assert "".join(order) == "abcbcacababc"
    assert {name: len(taken) for name, taken in times.seconds_by_name.items()} == {"a": 4, "b": 4, "c": 4}
    assert not (tmp_path / "out").exists()


def test_the_limit_computes_every_row_once_in_values_that_exp_takes_quickly(monkeypatch):
    counted = []
    original = bare_scoring_jobs._ThreadWork.run

    def run(self, count):
        original(self, count)
        counted.append(count)
        products = self.row_tile @ self.landmarks.T
        assert -2 <= products.min() <= products.max() <= 0
        np.testing.assert_allclose(self.scores[:1], np.exp(products[:1]) @ self.weights, rtol=1e-4)
        assert {
            a.dtype.name for a in (self.row_tile, self.landmarks, self.weights, self.kernel_values, self.scores)
        } == {"float32"}

    monkeypatch.setattr(bare_scoring_jobs._ThreadWork, "run", run)
    bare_scoring_jobs.prepare_bare_arithmetic(1001, 5, 60, 3, "float32", 256, 2)(Path())
    assert sorted(counted) == [500, 501]


@pytest.mark.slow
def test_a_given_cluster_is_used_and_no_client_for_as_many_jobs_as_are_compared_with_it(measured, cluster):
    assert set(measured.clients) == {cluster.scheduler_address, None}
    assert measured.clients.count(None) == TINY.rounds


def test_each_growth_is_measured_on_a_cluster_of_its_own(cluster, monkeypatch, tmp_path):
    started = []

    @contextmanager
    def local_cluster():
        started.append(cluster)
        yield cluster

    monkeypatch.setattr(bench, "local_cluster", local_cluster)
    assert len(bench._measure_growth(None, tmp_path, TINY, None).rows) == 2
    assert len(started) == 2 * TINY.rounds


@pytest.mark.slow
def test_every_connection_to_a_given_cluster_waits_as_long_as_is_told(cluster, monkeypatch, tmp_path):
    waits = []

    def connect(address, **options):
        waits.append(options.pop("wait_for_workers"))
        return connect_to(address, **options)

    connect_to = bench.connect
    monkeypatch.setattr(bench, "connect", connect)
    bench._measure_growth(cluster.scheduler_address, tmp_path, TINY, 7.0)
    assert waits == [7.0] * 2 * TINY.rounds


@pytest.mark.slow
def test_both_sides_run_in_worker_processes_of_this_machine(tmp_path):
    with bench._open_environment(None, tmp_path, TINY) as site:
        assert site.client.scheduler.address.startswith("tcp://127.0.0.1:")
        assert bench.find_client(None) is None
        score, share = workloads.bench_scoring(site, 60, 3, 5, 400).sklearn_table_rows
        assert (score["rows"], share["dtype"]) == (400, "float32")
        grown = workloads.bench_growth_job(site, 60, 3, 400)
        assert grown.peak_bytes == pytest.approx(max(site.client.run(workloads.memory.peak_memory).values()), rel=0.01)
        assert workloads.summarize_growth([grown] * 3, 60, 400)["peak_MB"] == grown.peak_bytes / 1e6


def test_the_command_prints_what_run_says_and_with_json_nothing_but_what_it_returns(monkeypatch):
    def run(sizes, address, say, wait):
        say(f"{sizes.rounds} {address}{'' if wait is None else f' {wait:g}'}")
        return {"rounds": sizes.rounds}

    monkeypatch.setattr(bench, "run_benchmarks", run)
    assert CliRunner().invoke(main, ["bench"]).stdout == f"{bench.FULL.rounds} None\n"
    assert CliRunner().invoke(main, ["bench", "--quick", "--scheduler", "a"]).stdout == f"{bench.QUICK.rounds} a\n"
    waits = ["bench", "--scheduler", "a", "--wait-for-workers", "7"]
    assert CliRunner().invoke(main, waits).stdout == f"{bench.FULL.rounds} a 7\n"
    assert json.loads(CliRunner().invoke(main, ["bench", "--json"]).output) == {"rounds": bench.FULL.rounds}


def test_a_scheduler_that_is_not_there_is_one_sentence(monkeypatch):
    result = CliRunner().invoke(main, ["bench", "--scheduler", "nowhere:1"])
    assert result.exit_code == 3
    assert result.stderr.startswith("ClusterError: There is no scheduler at nowhere:1")
    assert result.stderr.count("\n") == 1


def test_it_refuses_to_run_where_a_client_is_current(cluster):
    from distributed import Client

    with Client(cluster), pytest.raises(ClusterError, match="close it first"):
        bench.run_benchmarks(TINY, None, print)


def test_all_sizes_join_whole_chunks_of_the_source():
    for sizes in (bench.FULL, bench.QUICK):
        assert all(rows % sizes.chunks[0] == 0 for rows in sizes.chunks)
        assert sizes.chunks == (1_000, 4_000, 16_000)


def test_what_is_not_finite_is_null_in_json():
    assert bench.Table("", [{"a": math.inf, "b": 2.0, "c": "x"}]).to_json_rows() == [{"a": None, "b": 2.0, "c": "x"}]


@pytest.mark.slow
def test_every_kernel_is_timed_beside_its_formula_and_no_folder_is_removed(monkeypatch, tmp_path):
    monkeypatch.setattr(kernel_values, "QUICK", kernel_values.BlockSizes(3, 4, 2))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dkfm-bench-writes-no-file").mkdir()
    result = CliRunner().invoke(main, ["bench", "--kernels", "--quick", "--json"], catch_exceptions=False)
    report = json.loads(result.output)
    assert report.pop("sizes") == {"rows": 3, "landmarks": 4, "rounds": 2}
    timed = [kernel for kernel in kernels.__all__ if isinstance(getattr(kernels, kernel), type)]
    assert report.pop("machine")["cpu"]
    (tables,) = report.values()
    assert set(tables) == {"4_columns", "8_columns", "64_columns", "784_columns"}
    for name, rows in tables.items():
        d = int(name.removesuffix("_columns"))
        listed = repr([kernel for _, kernel, _ in kernel_values.list_kernels(d)])
        classes = {name for name in timed if issubclass(getattr(kernels, name), kernels.Kernel)}
        # What users define, what only adds or copies, and what is one of those listed under another name.
        rest = {
            "Kernel",
            "Function",
            "Pairwise",
            "Precomputed",
            "Constant",
            "Columns",
            "Sum",
            "Product",
            "Power",
            "Scaled",
        }
        assert all(f"{name}(" in listed for name in classes - rest - {"Warped"}), d
        assert [(row["kernel"], row["dtype"]) for row in rows] == [
            (name, dtype) for name, _, _ in kernel_values.list_kernels(d) for dtype in ("float64", "float32")
        ]
        assert all(row["dkfm"] > 0 and row["plain"] > 0 and row["times_as_long"]["rounds"] == 2 for row in rows)
    assert (tmp_path / "dkfm-bench-writes-no-file").exists()


def test_a_kernel_that_differs_from_its_formula_is_not_timed(monkeypatch):
    monkeypatch.setattr(kernel_values, "QUICK", kernel_values.BlockSizes(3, 4, 2))
    monkeypatch.setattr(kernel_values, "_squared_distances", lambda Z, X: 1.001 * np.ones((len(Z), len(X))))
    result = CliRunner().invoke(main, ["bench", "--kernels", "--quick"])
    assert result.exit_code == 1
    assert "Gaussian differs from its formula by" in result.output


def test_the_benchmark_of_kernels_takes_no_scheduler():
    result = CliRunner().invoke(main, ["bench", "--kernels", "--scheduler", "tcp://127.0.0.1:1"])
    assert result.exit_code == 2
    assert "takes no --scheduler" in result.output
