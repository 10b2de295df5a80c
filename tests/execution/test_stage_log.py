"""Log lines of stages, and heartbeats: what the logger dkfm gets, and that nothing is printed unless a user asks."""

import itertools
import logging
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dkfm
from dkfm import kernels
from dkfm.estimators.fitting import eigenproblem_setup
from dkfm.execution import progress, stage_log, task_runner
from dkfm.execution.executors import open_executor
from dkfm.kernels.pairwise import columnwise_sums

K = kernels.Gaussian(1.0)
SCHEMES = ["s3", "gs", "az", "https"]


@pytest.fixture
def records(caplog):
    """Return a function of the records of a stage that were logged."""
    caplog.set_level(logging.DEBUG, "dkfm")
    return lambda stage, level=logging.INFO: [
        record
        for record in caplog.records
        if record.name == "dkfm" and (record.stage, record.levelno) == (stage, level)
    ]


@pytest.fixture
def always(monkeypatch):
    """Every update of a heartbeat logs a line."""
    monkeypatch.setattr(progress, "HEARTBEAT_SECONDS", 0.0)


@pytest.mark.parametrize(
    ("estimator", "stages"),
    [
        (dkfm.KernelPCA(2, kernel=K), ["fit", "gram", "root"]),
        (dkfm.KernelPCA(2, kernel=K, tile_rows=20), ["fit", "gram", "root"]),
        (dkfm.KernelFisher(kernel=K), ["fit", "gram", "root"]),
        (dkfm.ExactFeatureMap(K), ["fit", "gram", "root"]),
        (dkfm.ExactFeatureMap(K, basis="cholesky", build="columns"), ["fit", "root"]),
        (dkfm.ExactFeatureMap(K, basis="cholesky", build="gram"), ["fit", "gram", "root"]),
        (dkfm.ExactFeatureMap(K, landmarks="kmeans", n_landmarks=9), ["fit", "landmarks", "gram", "root"]),
    ],
    ids=repr,
)
def test_each_stage_of_a_fit_is_logged_once_in_order_with_its_size(estimator, stages, records, caplog, rng):
    estimator.fit(rng.normal(size=(60, 3)), np.arange(60) % 2)
    logged = [record for record in caplog.records if record.levelno == logging.INFO and record.stage != "certificate"]
    assert [record.stage for record in logged] == stages
    assert logged[0].fields["rows"] == 60
    assert {record.name for record in logged} == {"dkfm"}
    for record in records("gram"):
        assert record.fields["seconds"] >= 0
        assert "60 x 60" in record.getMessage() or "9 x 9" in record.getMessage()


def test_few_components_are_logged_with_their_number_and_the_limit_of_products(records, rng):
    dkfm.KernelPCA(2, kernel=K, eigen_solver="arpack", max_iter=70).fit(rng.normal(size=(400, 3)))
    (record,) = records("root")
    assert (record.fields["components"], record.fields["rows"]) == (2, 400)
    assert record.fields["products"] <= 400


def test_a_trial_on_some_rows_is_told(records, rng, monkeypatch):
    monkeypatch.setattr(eigenproblem_setup, "SMALL_ROWS", 1500)
    dkfm.KernelPCA(2, kernel=K).fit(rng.normal(size=(1600, 3)))
    (record,) = records("trial")
    assert record.getMessage().endswith("1,024 of 1,600 rows show how many products 2 components need")


def test_residuals_of_many_rows_are_a_stage(records, rng):
    dkfm.ExactFeatureMap(K, landmarks="uniform", n_landmarks=9).fit(rng.normal(size=(60, 3)))
    (record,) = records("certificate")
    assert (record.fields["rows"], record.fields["landmarks"]) == (60, 9)


def test_a_gram_matrix_on_disk_is_logged_with_its_place_and_not_when_it_exists(records, rng, tmp_path):
    X = rng.normal(size=(60, 3))
    for _ in range(2):
        dkfm.build_gram(K, X, tmp_path / "gram", tile_rows=20)
    (record,) = records("gram")
    assert str(tmp_path / "gram") in record.getMessage()
    assert (record.fields["rows"], record.fields["columns"], record.fields["tiles"]) == (60, 3, 6)
    assert "threads of this process, about " in record.getMessage()


@pytest.mark.parametrize(("threads", "said"), [(1, "1 thread of this process"), (2, "2 threads of this process")])
def test_one_thread_is_said_to_be_one(threads, said, monkeypatch):
    monkeypatch.setattr("dkfm.core.cpus.COUNT", threads)
    with open_executor(None) as executor:
        assert stage_log.describe_place(executor) == said


def test_a_job_logs_what_it_scores_and_what_it_reads_again(records, rng, tmp_path):
    X = rng.normal(size=(60, 3))
    model = dkfm.KernelPCA(2, kernel=K).fit(X)
    dkfm.batch_score(model, X, tmp_path / "s", chunk_rows=20, progress=False)
    (record,) = records("score")
    assert {**record.fields, "seconds": 0, "threads": 0} == {
        "rows": 60,
        "columns": 3,
        "chunks": 3,
        "done": 0,
        "threads": 0,
        "seconds": 0,
        "path": str(tmp_path / "s"),
    }
    assert records("look") == []
    next(path for path in (tmp_path / "s" / "scores" / "c").rglob("*") if path.is_file()).unlink()
    dkfm.batch_score(model, X, tmp_path / "s", chunk_rows=20, progress=False)
    assert records("look")[0].fields["chunks"] == 3
    assert (records("score")[1].fields["done"], records("score")[1].fields["chunks"]) == (2, 3)
    assert len(records("score", logging.DEBUG)) == 2


def test_a_verification_logs_what_it_reads_and_what_it_scores_again(records, rng, tmp_path):
    X = rng.normal(size=(60, 3))
    dkfm.KernelPCA(2, kernel=K).fit(X).save(tmp_path / "m")
    dkfm.batch_score(tmp_path / "m", X, tmp_path / "s", chunk_rows=20, progress=False)
    dkfm.verify_scores(tmp_path / "s", X)
    read, sampled = records("verify")
    assert (read.fields["chunks"], read.fields["rows"], sampled.fields["sampled"]) == (3, 60, 60)
    assert sampled.fields["seconds"] >= 0


def test_a_comparison_logs_its_size_and_each_kernel(records, rng):
    dkfm.compare_kernels({"a": K, "b": kernels.Linear()}, rng.normal(size=(60, 3)), np.arange(60) % 2)
    first, *each = records("compare")
    assert (first.fields["kernels"], first.fields["rows"], first.fields["test_rows"]) == (2, 45, 15)
    assert [(record.fields["number"], record.fields["total"]) for record in each] == [(1, 2), (2, 2)]
    assert "kernel 2 of 2, b" in each[1].getMessage()


def beats(updates, total, clock_step):
    """Update a heartbeat on a clock that moves by a step each time it is read; return the heartbeat."""
    now = itertools.count(0.0, clock_step)
    beat = progress.Heartbeat("score", total, "task", lambda: next(now))
    for steps in updates:
        beat.update(steps)
    return beat


@given(st.lists(st.integers(0, 5), max_size=40), st.sampled_from([0.5, 7.0, 29.0, 31.0]), st.booleans())
def test_a_heartbeat_comes_at_most_once_in_30_seconds_and_counts_right(updates, step, known):
    logger, seen = logging.getLogger("dkfm"), []
    handler = logging.Handler()
    handler.emit = seen.append
    former = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        beats(updates, sum(updates) if known else None, step)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(former)
    due, last = [], 0.0
    for number in range(1, len(updates) + 1):
        if number * step - last >= 30:
            last = number * step
            due.append(number)
    assert [record.fields["done"] for record in seen] == [sum(updates[:number]) for number in due]
    for record, number in zip(seen, due, strict=True):
        done = sum(updates[:number])
        assert record.fields["rate"] == pytest.approx(done / (number * step), abs=1e-6)
        assert ("total" in record.fields) == known
        if known and done:
            left = (sum(updates) - done) * number * step / done
            assert record.fields["seconds_left"] == pytest.approx(left, abs=1e-3)


def test_without_a_terminal_tasks_beat_and_with_progress_off_they_do_not(records, always):
    with open_executor(None) as executor:
        for shown in (True, False):
            task_runner.run_tasks(executor, "dkfm-score", abs, [(n,) for n in range(5)], 5, shown)
    logged = records("score")
    assert [record.fields["done"] for record in logged if record.fields["done"] < 5] == sorted(
        record.fields["done"] for record in logged if record.fields["done"] < 5
    )
    assert sum(record.fields["done"] == 5 for record in logged) == 1
    assert "5 of 5 tasks, " in logged[-1].getMessage()


def test_a_heartbeat_comes_while_no_task_finishes(records, always):
    import threading

    beaten = threading.Event()
    handler = logging.Handler()
    handler.emit = lambda record: beaten.set()
    stage_log.LOGGER.addHandler(handler)
    try:
        with open_executor(None) as executor:
            task_runner.run_tasks(executor, "dkfm-score", beaten.wait, [(60,)], 1, True)
    finally:
        stage_log.LOGGER.removeHandler(handler)
    assert records("score")[0].fields["done"] == 0


@pytest.mark.slow
def test_tasks_of_workers_log_nothing(records, always, threaded_client, rng):
    X = rng.normal(size=(60, 3))
    fit = dkfm.KernelPCA(2, kernel=K, tile_rows=20).fit
    threaded_client.submit(fit, X).result()
    assert [records(stage) for stage in ("fit", "gram", "root")] == [[], [], []]
    fit(X)
    (record,) = [record for record in records("gram") if "tiles" in record.fields]
    assert threaded_client.scheduler.address in record.getMessage()


@given(st.sampled_from(SCHEMES), st.text("abcXYZ019+-_.~%", min_size=6, max_size=20))
def test_no_secret_of_a_url_and_no_control_character_gets_into_a_record(scheme, secret):
    seen = []
    handler = logging.Handler()
    handler.emit = seen.append
    former = stage_log.LOGGER.level
    stage_log.LOGGER.addHandler(handler)
    stage_log.LOGGER.setLevel(logging.INFO)
    try:
        url = f"{scheme}://KEY:<{secret}>@bucket/rows"
        stage_log.log_stage("score", f"{url}\x1b[2J\n", path=url)
    finally:
        stage_log.LOGGER.removeHandler(handler)
        stage_log.LOGGER.setLevel(former)
    (record,) = seen
    assert f"<{secret}>" not in record.getMessage() + record.fields["path"]
    assert record.fields["path"] == f"{scheme}://bucket/rows"
    assert record.getMessage().isprintable()


class Stream:
    """A terminal of some descriptor."""

    def __init__(self, descriptor):
        self.descriptor = descriptor

    def isatty(self):
        return os.isatty(self.descriptor)

    def fileno(self):
        return self.descriptor


@pytest.mark.parametrize(
    ("term", "columns", "is_terminal"),
    [("xterm", 80, True), ("xterm", 0, False), ("dumb", 80, False), ("", 80, False), (None, 80, False)],
)
def test_a_terminal_without_a_width_or_a_type_is_none(term, columns, is_terminal, monkeypatch):
    import fcntl
    import pty
    import struct
    import termios

    leader, follower = pty.openpty()
    try:
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        monkeypatch.delenv("TERM", raising=False)
        if term is not None:
            monkeypatch.setenv("TERM", term)
        monkeypatch.setattr(sys, "stderr", Stream(follower))
        assert progress.on_terminal() == is_terminal
    finally:
        os.close(leader)
        os.close(follower)


SCRIPT = """
import logging, sys
import dkfm
assert "logging" not in sys.modules or not logging.getLogger("dkfm").handlers, "import dkfm set up logging"
import numpy as np
from dkfm.execution import progress
progress.HEARTBEAT_SECONDS = 0.0
X = np.random.default_rng(0).normal(size=(60, 3))
if {configured}:
    logging.basicConfig(level=logging.INFO, format="%(stage)s")
model = dkfm.KernelPCA(2, tile_rows=20).fit(X)
dkfm.batch_score(model, X, sys.argv[1], chunk_rows=20)
logger = logging.getLogger("dkfm")
assert [type(handler) for handler in logger.handlers] == [logging.NullHandler]
assert logger.level == logging.NOTSET and logger.propagate
assert bool(logging.getLogger().handlers) == {configured}
"""


@pytest.mark.slow
@pytest.mark.parametrize("configured", [False, True])
def test_a_script_prints_lines_only_if_it_configures_logging(configured, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(configured=configured), tmp_path / "s"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert set(done.stderr.split()) == ({"fit", "gram", "root", "score"} if configured else set())


@pytest.mark.parametrize("has_numba", [True, False])
@pytest.mark.parametrize("kernel", [kernels.Laplacian(2.0), 0.5 * kernels.JensenShannon() + K, K], ids=repr)
def test_a_fit_and_a_job_that_the_extra_fast_would_help_say_so(kernel, has_numba, records, tmp_path, rng, monkeypatch):
    if has_numba:
        pytest.importorskip("numba")
    monkeypatch.setattr(columnwise_sums, "_has_numba", lambda: has_numba)
    X = rng.dirichlet(np.ones(4), size=60)
    dkfm.KernelPCA(2, kernel=kernel).fit(X).save(tmp_path / "model")
    assert records("kernel") == []  # it takes no second
    monkeypatch.setattr(stage_log, "LONG_SECONDS", 0.0)
    dkfm.KernelPCA(2, kernel=kernel).fit(X)
    dkfm.batch_score(tmp_path / "model", X, tmp_path / "scores.zarr", progress=False)
    told = [record.getMessage() for record in records("kernel")]
    assert len(told) == (0 if has_numba or kernel == K else 2)
    assert all("pip install 'dkfm[fast]'" in line for line in told)


@pytest.mark.parametrize(
    "estimator", [dkfm.KernelPCA(2, kernel=K), dkfm.KernelRidge(kernel=K), dkfm.KernelFisher(kernel=K)], ids=repr
)
def test_a_certificate_that_takes_long_is_logged_at_the_fit_and_when_it_is_verified(
    estimator, records, rng, monkeypatch
):
    X = rng.normal(size=(40, 3))
    estimator.fit(X, np.arange(40) % 2).verify()
    assert records("certificate") == []
    monkeypatch.setattr(stage_log, "LONG_SECONDS", 0.0)
    estimator.fit(X, np.arange(40) % 2)
    estimator.verify()
    assert [record.fields["rows"] for record in records("certificate")] == [40, 40]
