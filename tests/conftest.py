"""Fixtures: seeded data, MNIST where it is to be had, real clusters on loopback."""

import gzip
import os
import signal
import time
from pathlib import Path

if (workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT")) is not None:
    # Before NumPy loads its BLAS: processes that share cores wait for each other's threads many times over.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers))))

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from helpers import s3_server as s3
from helpers.cluster_process import start_cluster
from helpers.default_cases import list_left_out_cases

# The same examples in every run, so that a run that fails fails again; `--hypothesis-profile random` looks for others.
COMMON = {"database": None, "deadline": None, "max_examples": 25, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("fixed", derandomize=True, **COMMON)
settings.register_profile("random", **COMMON)
settings.load_profile("fixed")

SUITES = {"slow", "faults", "cluster", "s3", "browser"}

# A shell without job control starts what runs in its background with Ctrl-C ignored, nohup with SIGHUP, and programs
# inherit that.
for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, default)


@pytest.hookimpl(tryfirst=True)  # before pytest drops the tests that -m does not ask for
def pytest_collection_modifyitems(items):
    """Mark the tests of folders that are suites of their own, and as slow what the default suite leaves out."""
    cases = []
    for item in items:
        tests = Path(__file__).parent
        if item.path.is_relative_to(tests):
            folder = item.path.relative_to(tests).parts[0]
            if folder in {"cluster", "faults", "s3"}:
                item.add_marker(folder)
        if hasattr(item, "callspec") and not SUITES & {mark.name for mark in item.iter_markers()}:
            cases.append(item)
    for item in list_left_out_cases(cases):
        item.add_marker("slow")


@pytest.fixture
def rng():
    return np.random.default_rng(20)


@pytest.fixture(scope="session")
def digits():
    """scikit-learn's handwritten digits in a seeded order, pixels in [0, 1]."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(images))
    return images[order] / 16, labels[order]


def _idx(path: Path, offset: int):
    return np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8, offset=offset)


def _mnist():
    """All images (n, 784), pixels in [0, 1], and labels; None where they are neither here nor to be had from OpenML."""
    folder = os.environ.get("DKFM_MNIST")
    if folder is not None:
        images = _idx(Path(folder) / "t10k-images-idx3-ubyte.gz", 16).reshape(-1, 784)
        return images / 255, _idx(Path(folder) / "t10k-labels-idx1-ubyte.gz", 8)
    from sklearn.datasets import fetch_openml

    try:
        images, labels = fetch_openml("mnist_784", return_X_y=True, as_frame=False, n_retries=1, delay=0.1)
    except Exception:
        return None
    return images / 255, labels.astype(np.uint8)


def images_247():
    """Images of the digits 2, 4 and 7, pixels in [0, 1]: the first 500 of each, then what is left in a seeded order.

    None where MNIST is neither in `DKFM_MNIST` nor to be had from OpenML.
    """
    found = _mnist()
    if found is None:
        return None
    images, labels = found
    first = np.concatenate([np.flatnonzero(labels == digit)[:500] for digit in (2, 4, 7)])
    rest = np.setdiff1d(np.flatnonzero(np.isin(labels, (2, 4, 7))), first)
    return images[np.concatenate([first, np.random.default_rng(0).permutation(rest)])]


@pytest.fixture(scope="session")
def mnist_247_labelled():
    """The paper's digits and their labels: of each of 2, 4 and 7 the first 500, and the 500 that follow."""
    if os.environ.get("DKFM_MNIST") is None:
        # OpenML has the training images first, for which no figures are known.
        pytest.skip("DKFM_MNIST names no folder.")  # reason: without these images nothing can be measured
    images, labels = _mnist()
    each = [np.flatnonzero(labels == digit) for digit in (2, 4, 7)]
    train, test = (np.concatenate([of[part] for of in each]) for part in (slice(500), slice(500, 1000)))
    return images[train], labels[train], images[test], labels[test]


@pytest.fixture(scope="session")
def mnist_247():
    """The paper's training set: the first 500 images of the digits 2, 4 and 7."""
    images = images_247()
    if images is None:
        # Where DKFM_MNIST is set, as in .ci/run, a missing file is an error in images_247.
        pytest.skip("MNIST is neither in DKFM_MNIST nor on OpenML.")  # reason: without images nothing can be measured
    return images[:1500]


@pytest.fixture(scope="session")
def processes(tmp_path_factory):
    """Address of a real scheduler with a real worker process, which all tests share: to start them takes seconds."""
    with start_cluster(tmp_path_factory.mktemp("cluster")) as address:
        yield address


@pytest.fixture
def client(processes):
    """A client of a worker process."""
    from distributed import Client

    with Client(processes) as connected:
        yield connected


@pytest.fixture
def threaded_client(tmp_path):
    """A real scheduler with workers inside this process."""
    import dask
    from distributed import Client

    with (
        dask.config.set({"temporary-directory": str(tmp_path)}),
        Client(processes=False, n_workers=1, threads_per_worker=2, dashboard_address="127.0.0.1:0") as connected,
    ):
        yield connected


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    """An S3 server, of which the environment tells fsspec."""
    import s3fs

    nothing = str(tmp_path_factory.mktemp("aws") / "none")
    with s3.server() as port, pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("AWS_", "FSSPEC_"))]:
            patch.delenv(name)
        here = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_EC2_METADATA_DISABLED": "true"}
        files = {"AWS_CONFIG_FILE": nothing, "AWS_SHARED_CREDENTIALS_FILE": nothing}
        for name, value in {**s3.CREDENTIALS, **here, **files}.items():
            patch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir("bucket")
        yield port
        s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def place(port, request):
    """A prefix of the test's own on an S3 server."""
    from dkfm.files.object_store import Remote

    return Remote(f"{s3.BUCKET}/{request.node.name.partition('[')[0]}/{time.monotonic_ns()}")


@pytest.fixture(scope="module")
def one_proxy(port):
    with s3.proxy(port) as made:
        yield made


@pytest.fixture
def proxy(one_proxy, monkeypatch):
    """A proxy through which dkfm reaches the server now, with limits of about a second."""
    from fsspec.config import conf

    limits = {"connect_timeout": 1, "read_timeout": 1.2, "retries": {"total_max_attempts": 2}}
    monkeypatch.setitem(conf, "s3", {"endpoint_url": one_proxy.url, "config_kwargs": limits})
    one_proxy.seen, one_proxy.faults = [], []
    return one_proxy
