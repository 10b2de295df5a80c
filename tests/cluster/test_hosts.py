"""Workers on several hosts: a link that is cut, a bad line, hosts that come and go, and one with another store."""

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
from distributed.security import Security

import dkfm
from cluster import netns, proxy
from cluster.needs import needs
from dkfm.scoring import receipts
from dkfm.storage.output_files import LocalOutput
from helpers import harness
from helpers.harness import TOTALS, Site, process, run, wait_for

needs("ip", "ss", "mount", "import cryptography")


WORKERS, GUEST = range(3), 3
"""Those that are always there, and one that a test may have beside them; each has a host of its own."""

CHUNKS, CHUNK_ROWS, FREE = 60, 50, 10
"""Of the job; the first of them are never held, so that it is under way when workers are."""

AGAIN = ["sh", "-c", 'while :; do "$@"; done', "sh"]
"""What a system that looks after services does with a worker that ended: it starts it again."""

KERNEL = """
import os
import time
from pathlib import Path

import numpy as np
from scipy.spatial.distance import cdist


def kernel(X, Y):
    if (X[:, 0] == 7.0).any():
        time.sleep(0.1)
        held = Path(os.environ.get("HELD_BY", "nothing"))
        while held.exists():
            held.with_suffix(".here").touch()
            time.sleep(0.02)
    return np.exp(-cdist(X, Y))
"""
"""A task takes time without computing, for all hosts share the cores of one; and it waits while its worker is held."""


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """What every process of Dask reads: certificates, which are required, and how soon a silent line is a dead one."""
    folder, security = tmp_path_factory.mktemp("tls"), Security.temporary()
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    certificate.write_text(security.tls_ca_file)
    key.write_text(security.tls_worker_key)
    tls = {"CA_FILE": certificate}
    for role in ("SCHEDULER", "WORKER", "CLIENT"):
        tls |= {f"{role}__CERT": certificate, f"{role}__KEY": key}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in tls.items():
            patch.setenv(f"DASK_DISTRIBUTED__COMM__TLS__{name}", str(value))
        patch.setenv("DASK_DISTRIBUTED__COMM__DEFAULT_SCHEME", "tls")
        patch.setenv("DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION", "True")
        # The least that Dask allows, in place of 30 seconds: so long is a worker waited for that is cut off.
        patch.setenv("DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP", "11s")
        yield


@contextmanager
def made_hosts(number):
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(netns.hosts(number))
        except OSError as error:
            # reason: namespaces take privileges that not every machine gives, and nothing else makes hosts of one
            pytest.skip(f"Network namespaces cannot be made here: {error}")
        yield hosts


class Hosts(Site):
    """A scheduler on the first of some hosts, and a worker on each of three others."""

    def __init__(self, folder, hosts):
        super().__init__(folder, workers=len(WORKERS))
        self.hosts = hosts

    def host(self, number=None):
        return self.hosts[0 if number is None else number + 1]

    def place(self, number=None):
        return self.host(number).inside(), self.host(number).address

    def start_worker(self, number, before=AGAIN, **more):
        return super().start_worker(number, before, HELD_BY=str(self._holder(number)), **more)

    @contextmanager
    def guest(self, **more):
        """Have another worker, which comes while the test goes on."""
        started = self.start_worker(GUEST, **more)
        try:
            yield started
        finally:
            harness.end(started)
            (self.folder / f"worker{GUEST}.log").unlink()

    def arrivals(self, number):
        """Return how often a worker was told that it is one of the scheduler's."""
        log = self.folder / f"worker{number}.log"
        return log.read_text().count("Registered to:") if log.exists() else 0

    def wait_for_arrival(self, number, times=1):
        wait_for(lambda: self.arrivals(number) >= times, f"worker {number}, {self.arrivals(number)} arrivals before,")

    def hold(self, *numbers):
        """Let workers wait within their next tasks."""
        for number in numbers or WORKERS:
            self._holder(number).with_suffix(".here").unlink(missing_ok=True)
            self._holder(number).touch()

    def wait_for_held(self, *numbers):
        """Wait until workers that are held have a task in hand each."""
        for number in numbers or WORKERS:
            wait_for(self._holder(number).with_suffix(".here").exists, f"a task of worker {number}")

    def let_go(self, *numbers):
        for number in numbers or WORKERS:
            self._holder(number).unlink(missing_ok=True)

    def _holder(self, number):
        return self.folder / f"held{number}"

    @contextmanager
    def driver(self, job, target, may_warn=False):
        """Start a job on the first host; its log is beside its output."""
        command = job.command(target, "--trusted", "waiting:kernel", "--scheduler", self.address)
        command = [word for word in command if not (may_warn and word in ("-W", "error"))]
        with process(self.host().inside(*command), target.with_suffix(".log")) as driver:
            yield driver


@pytest.fixture(scope="module")
def site(settings, tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    (folder / "waiting.py").write_text(KERNEL)
    with made_hosts(2 + len(WORKERS)) as hosts, pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)  # of drivers
        with Hosts(folder, hosts) as started:
            for number in WORKERS:
                started.wait_for_arrival(number)
            yield started


@pytest.fixture(scope="module")
def job(site, tmp_path_factory):
    from waiting import kernel

    folder, rng = tmp_path_factory.mktemp("job"), np.random.default_rng(3)
    rows = rng.normal(size=(CHUNKS * CHUNK_ROWS, 5))
    rows[FREE * CHUNK_ROWS :: CHUNK_ROWS, 0] = 7.0
    dkfm.KernelPCA(4, kernel=dkfm.kernels.Function(kernel)).fit(rows[1:100:2]).save(folder / "model")
    np.save(folder / "rows.npy", rows)
    made = harness.Job(folder, CHUNK_ROWS)
    options = {"chunk_rows": CHUNK_ROWS, "trusted": ["waiting:kernel"], "progress": False}
    dkfm.batch_score(*made.paths(made.expected), **options)
    return made


@pytest.fixture
def target(tmp_path, site):
    folder = tmp_path / "shared"
    folder.mkdir()
    yield folder / "scores"
    site.let_go()
    time.sleep(0.1)  # after a test that failed: those that are held look up now and then


def scored_by(target, address):
    """Return how many chunks were scored by workers whose addresses begin so, as far as the journal tells."""
    found = receipts.read_receipts(LocalOutput(target)) if (target / "zarr.json").exists() else []
    return sum(receipt.worker.startswith(f"tls://{address}") for receipt in found)


def require_done(driver, target):
    assert driver.wait(harness.LIMIT) == 0, target.with_suffix(".log").read_text()


def test_hosts_reach_each_other_while_their_links_are_up_and_nothing_of_them_stays():
    connect = "import socket, sys; socket.create_connection((sys.argv[1], 9), 1)"

    def reaches(host, other):
        try:
            netns.run(*host.inside(sys.executable, "-c", connect, other.address))
        except OSError:
            return False
        return True

    def fail_after_all(first, *others):
        wait_for(first.listening, "a server")
        assert first.listening() == ["0.0.0.0:9"]
        assert all(reaches(other, first) for other in others)
        others[0].cut()
        assert [reaches(other, first) for other in others] == [False, True]
        others[0].mend()
        wait_for(lambda: reaches(others[0], first), "a mended link")
        raise InterruptedError

    listen = "import socket, time; s = socket.create_server(('0.0.0.0', 9)); time.sleep(100)"
    with ExitStack() as stack:
        hosts = stack.enter_context(made_hosts(3))
        left = subprocess.Popen(hosts[0].inside(sys.executable, "-c", listen))
        with pytest.raises(InterruptedError), stack.pop_all():
            fail_after_all(*hosts)
    assert left.wait(10) == -signal.SIGKILL
    assert not any(host.name in netns.ip("netns", "list") for host in hosts)


def test_the_smoke_job_runs_on_three_hosts_over_tls_and_nothing_listens_on_every_interface(site, job, target):
    site.hold()
    with site.driver(job, target) as driver:
        site.wait_for_held()
        for number in (None, *WORKERS):
            host, listening = site.host(number), site.host(number).listening()
            assert {line.rpartition(":")[0] for line in listening} <= {host.address, "127.0.0.1"}, listening
            assert len(listening) >= 2
        site.let_go()
        require_done(driver, target)
    assert all(scored_by(target, site.host(number).address) for number in WORKERS)
    verified = run(site.host().inside(*harness.DKFM, "verify", str(target)))
    assert f"{CHUNKS * CHUNK_ROWS:,} rows, every chunk as it was written" in verified
    job.settle(target)


def test_a_link_that_is_cut_for_a_moment_costs_no_worker_and_no_row(site, job, target):
    before, address = site.arrivals(0), site.host(0).address
    site.hold()
    with site.driver(job, target) as driver:
        site.wait_for_held()
        done, there = scored_by(target, address), job.chunks_there(target)
        site.host(0).cut()
        TOTALS.faults += 1
        site.let_go(0)
        wait_for(lambda: job.chunks_there(target) > there, "a chunk that is written and not told of")
        site.host(0).mend()
        wait_for(lambda: scored_by(target, address) > done + 10, "chunks of a worker that is heard of again")
        site.let_go()
        require_done(driver, target)
    assert site.arrivals(0) == before
    job.settle(target)


def test_a_job_ends_while_a_link_is_down_and_with_it_up_the_worker_is_used_again(site, job, target):
    before = site.arrivals(0)
    site.hold()
    with site.driver(job, target) as driver:
        site.wait_for_held()
        site.host(0).cut()  # each has a task in hand, and more to come
        TOTALS.faults += 1
        try:
            site.let_go()
            require_done(driver, target)
        finally:
            site.host(0).mend()
    job.settle(target)
    site.wait_for_arrival(0, before + 1)
    site.hold(1, 2)
    with site.driver(job, target) as driver:
        wait_for(lambda: scored_by(target, site.host(0).address), "a chunk of a worker that was cut off")
        site.let_go()
        require_done(driver, target)
    job.settle(target)


def test_a_worker_behind_a_line_that_delays_and_drops_does_what_it_can_and_nothing_is_lost(site, job, target):
    """It reaches the scheduler over the line alone, and is reached over it alone, as behind a gateway."""
    gateway, log = site.host(), site.folder / "proxy.log"
    scheduler, worker = site.address.removeprefix("tls://"), f"{site.host(GUEST).address}:9000"
    to_scheduler, to_worker = f"{gateway.address}:9001", f"{gateway.address}:9002"
    line = [sys.executable, proxy.__file__, "5", f"{to_scheduler}={scheduler}", f"{to_worker}={worker}"]
    listen = ["--listen-address", f"tls://{worker}", "--contact-address", f"tls://{to_worker}"]
    site.hold()
    with (
        site.driver(job, target) as driver,
        process(gateway.inside(*line), log),
        site.guest(scheduler=f"tls://{to_scheduler}", listen=listen),
    ):
        wait_for(lambda: scored_by(target, to_worker), "a chunk of a worker behind a bad line", harness.LIMIT)
        before = site.arrivals(GUEST)
        site.wait_for_arrival(GUEST, before + 1)  # what it told the scheduler over was dropped, and it came again
        site.let_go()
        require_done(driver, target)
    told = log.read_text().splitlines()
    TOTALS.faults += sum(line.startswith("dropped") for line in told)
    assert {f"opened {scheduler}", f"dropped {scheduler}", f"opened {worker}"} <= set(told)
    job.settle(target)


def test_a_worker_that_joins_mid_run_is_used_and_one_that_leaves_mid_run_is_not_missed(site, job, target):
    site.hold()
    with site.driver(job, target) as driver:
        site.wait_for_held()
        with site.guest(before=()) as guest:
            wait_for(lambda: scored_by(target, site.host(GUEST).address), "a chunk of a worker that joined")
            assert job.chunks_there(target) < CHUNKS - len(WORKERS)  # there is more to do than what the others hold
            guest.send_signal(signal.SIGTERM)
            TOTALS.faults += 1
            guest.wait(60)
            site.let_go()
            require_done(driver, target)
    job.settle(target)


def test_a_worker_whose_store_is_another_one_is_named_and_scores_nothing(site, job, target, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    mounted = ["sh", "-c", 'mount --bind "$1" "$2" && shift 2 && exec "$@"', "sh", str(other), str(target.parent)]
    with site.guest(before=mounted):
        site.wait_for_arrival(GUEST)
        with site.driver(job, target, may_warn=True) as driver:
            require_done(driver, target)
    told = target.with_suffix(".log").read_text()
    assert f"//{site.host(GUEST).address}:" in told
    assert f"does not see the same {target} as the driver" in told
    assert not any(f"//{site.host(number).address}:" in told for number in WORKERS)
    assert job.chunks_there(other / target.name) == 0
    job.settle(target)
