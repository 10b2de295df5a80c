"""Names of tasks on Dask's dashboard, and its report of a job: refused before the work, whole or as it was after it."""

import os
import re
import signal
import time
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError

import dask.array as da
import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from distributed import Client

import dkfm
from dkfm import kernels
from dkfm.cli import performance_report
from dkfm.cli.app import main
from dkfm.errors import ClusterError, StoreError
from dkfm.kernel_comparison import html_page as pages
from helpers.harness import Site, sentence
from helpers.versions import HAS_DASK_2026_3, needs_dask_2026_3

OLD = f"<html><head>{pages.GENERATOR}</head></html>"

FUNCTIONS = {"score_block", "block_distances", "convert_array", "convert_series", "read_frame", "log_probabilities"}
"""What Dask would call tasks of ours, which says nothing to their users."""


def require_names(expected, found):
    """Tasks of a kind have one name; Dask adds to it what it has fused with them, and has names for its own."""
    assert {name for name in expected if not any(other.startswith(name) for other in found)} == set()
    assert {name for name in found if any(function in name for function in FUNCTIONS)} == set()
    assert {name for name in found if "dkfm" in name and not re.fullmatch("[a-z-]+", name)} == set()


@pytest.fixture
def run(tmp_path, monkeypatch, rng):
    monkeypatch.chdir(tmp_path)
    dkfm.KernelPCA(2).fit(rng.normal(size=(20, 3))).save("model")
    rows = rng.normal(size=(50, 3))
    np.save("rows.npy", rows)
    rows[33] = np.nan
    np.save("nan.npy", rows)
    return lambda line: CliRunner().invoke(main, line.split())


@pytest.mark.slow
def test_tasks_are_called_what_they_do_and_each_kind_has_one_name(threaded_client, tmp_path, rng):
    import dask.dataframe as dd

    X, lazy = rng.normal(size=(60, 4)), da.random.normal(size=(50, 4), chunks=(10, 4))
    scheduler, y = threaded_client.cluster.scheduler, X[:, 0] > 0
    pca, fisher = dkfm.KernelPCA(2).fit(X), dkfm.KernelFisher(kernel=kernels.Gaussian(2.0)).fit(X, y)
    columns = pd.DataFrame(X, columns=list("abcd"))
    named = dkfm.KernelFisher(kernel=kernels.Gaussian(2.0)).fit(columns, y)

    def score():
        return dkfm.batch_score(pca, X, tmp_path / "scores.zarr", chunk_rows=10, progress=False)

    scored = {"dkfm-transform", "dkfm-transform-model"}
    for work, names in (
        (lambda: dkfm.build_gram(kernels.Gaussian(2.0), X, tmp_path / "gram", tile_rows=20), {"dkfm-gram"}),
        (score, {"dkfm-score"}),
        (score, {"dkfm-look"}),
        (lambda: dkfm.open_scores(tmp_path / "scores.zarr").compute(), {"dkfm-read"}),
        (lambda: pca.transform(lazy).compute(), scored),
        (lambda: pca.reconstruction_error(lazy).compute(), scored),
        (
            lambda: dkfm.ExactFeatureMap(kernels.Gaussian(2.0)).fit(X).distance(lazy, X).compute(),
            {"dkfm-distances", "dkfm-points"},
        ),
        (lambda: fisher.predict(lazy).compute(), {"dkfm-labels", "dkfm-transform-model"}),
        (lambda: fisher.predict_log_proba(lazy).compute(), {"dkfm-chances", "dkfm-transform-model"}),
        (lambda: named.predict(dd.from_pandas(columns, npartitions=3)).compute(), scored | {"dkfm-labels"}),
    )[: None if HAS_DASK_2026_3 else -1]:  # before, tasks of data frames had the name of what they were fused with
        before = {name: prefix.state_counts["memory"] for name, prefix in scheduler.task_prefixes.items()}
        work()
        after = {name: prefix.state_counts["memory"] for name, prefix in scheduler.task_prefixes.items()}
        found = {name for name in after if after[name] > before.get(name, 0)}
        require_names(names, found)
        assert work is not score or found == names


@pytest.mark.slow
@needs_dask_2026_3("tasks of a data frame have the name of what they were fused with")
def test_a_table_of_scores_is_read_under_the_same_name(threaded_client, tmp_path, rng):
    X = rng.normal(size=(30, 3))
    dkfm.batch_score(dkfm.KernelPCA(2).fit(X), X, tmp_path / "s.parquet", chunk_rows=10, progress=False)
    dkfm.open_scores(tmp_path / "s.parquet").compute()
    require_names({"dkfm-score", "dkfm-read"}, set(threaded_client.cluster.scheduler.task_prefixes))


@pytest.mark.slow
def test_jobs_have_reports_that_replace_those_before_them(run, client, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["dkfm", "score", "<rows> of mine"])
    (tmp_path / "report.html").write_text(OLD)
    options = f"--scheduler {client.scheduler.address} --report report.html"
    result = run(f"score model rows.npy scores.zarr --chunk-rows 10 --quiet {options}")
    assert (result.exit_code, result.stderr) == (0, "")
    text = (tmp_path / "report.html").read_text()
    assert "number of tasks: 5" in text
    assert '"dkfm-score"' in text
    assert "dkfm score" in text
    assert "&amp;lt;rows&amp;gt; of mine" in text  # of a page inside a page
    assert "cdn.bokeh.org" not in text  # it is read where there is no network
    result = run(f"fit rows.npy other --kernel linear --tile-rows 20 --quiet {options}")
    assert (result.exit_code, result.stderr) == (0, "")
    text = (tmp_path / "report.html").read_text()
    assert '"dkfm-gram"' in text
    assert '"dkfm-score"' not in text
    assert sorted(tmp_path.glob(".*")) == []


@pytest.mark.slow
@needs_dask_2026_3("a report beside Bokeh 3.9 fails")
def test_a_job_that_fails_has_a_report_and_its_own_sentence(run, client, tmp_path):
    options = f"--scheduler {client.scheduler.address} --report report.html"
    result = run(f"score model nan.npy scores.zarr --chunk-rows 10 {options}")
    assert result.exit_code == 1
    assert "row 33 contains NaN" in sentence(result.stderr)
    assert '"dkfm-score"' in (tmp_path / "report.html").read_text()


def test_a_dry_run_writes_no_report(run, client, tmp_path):
    result = run(f"score model rows.npy out --dry-run --scheduler {client.scheduler.address} --report report.html")
    assert result.exit_code == 0
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("none/report.html", "its folder is not there"),
        (".", "it is a folder"),
        ("pipe", "it is no file"),
        ("n" * 250, "File name too long"),
    ],
)
@pytest.mark.parametrize("line", ["score model rows.npy out", "fit rows.npy out --kernel linear"])
def test_a_report_that_cannot_be_written_is_refused_before_any_work(run, tmp_path, line, page, words):
    os.mkfifo(tmp_path / "pipe")
    result = run(f"{line} --scheduler 127.0.0.1:1 --report {page}")
    assert result.exit_code == 1
    assert words in sentence(result.stderr)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("line", ["score model rows.npy out", "fit rows.npy out --kernel linear"])
def test_without_a_cluster_there_is_nothing_to_report_on(run, tmp_path, line):
    before = sorted(tmp_path.rglob("*"))
    result = run(f"{line} --report report.html")
    assert result.exit_code == 2
    assert result.stderr.endswith("Error: There is no cluster to report on; name one with --scheduler.\n")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_scheduler_that_can_make_none_is_refused_before_any_work(run, client, tmp_path, monkeypatch):
    def version(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(performance_report, "version", version)
    result = run(f"score model rows.npy out --scheduler {client.scheduler.address} --report report.html")
    assert result.exit_code == 3
    assert "install dask[diagnostics] where it runs" in sentence(result.stderr)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("ends", [None, ClusterError, KeyboardInterrupt])
def test_a_page_that_is_there_stays_until_the_report_is_whole(client, tmp_path, ends):
    page, link = tmp_path / "report.html", tmp_path / "latest.html"
    page.write_text(OLD)
    link.symlink_to(page)

    def job():
        assert client.submit(abs, -1).result() == 1
        assert page.read_text() == OLD
        if ends is not None:
            raise ends

    with nullcontext() if ends is None else pytest.raises(ends), performance_report.record_report(client, str(link)):
        job()
    assert "number of tasks: 1" in page.read_text()
    assert link.is_symlink()
    assert sorted(tmp_path.iterdir()) == [link, page]


@needs_dask_2026_3("a report beside Bokeh 3.9 fails")
def test_a_page_that_could_not_be_replaced_is_told_and_stays(client, tmp_path, monkeypatch, capsys):
    (tmp_path / "report.html").write_text(OLD)

    def full(*_):
        raise StoreError("the disk is full.")

    with performance_report.record_report(client, str(tmp_path / "report.html")):
        monkeypatch.setattr("dkfm.files.local.new_file", full)
    assert re.fullmatch(r"There is no report at .*report\.html: the disk is full\.\n", capsys.readouterr().err)
    assert (tmp_path / "report.html").read_text() == OLD


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "words"), [(signal.SIGKILL, ""), (signal.SIGSTOP, "did not make it in 2 seconds")])
def test_a_scheduler_that_went_or_hangs_costs_the_report_and_not_the_job(tmp_path, monkeypatch, capsys, sent, words):
    monkeypatch.setattr(performance_report, "_REPORT_TIMEOUT", 2)

    def job(site):
        site.scheduler.send_signal(sent)
        raise ClusterError("the job's own")

    with Site(tmp_path / "site", workers=0) as site, Client(site.address) as client:
        start = time.monotonic()
        with (
            pytest.raises(ClusterError, match="the job's own"),
            performance_report.record_report(client, str(tmp_path / "r.html")),
        ):
            job(site)
        assert time.monotonic() - start < 30
        site.scheduler.send_signal(signal.SIGKILL)
    said = capsys.readouterr().err
    assert "There is no report at" in said
    assert words in said
    assert not (tmp_path / "r.html").exists()
