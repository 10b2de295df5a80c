"""Fixtures: seeded data, MNIST where it is to be had, real clusters on loopback."""

import gzip
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "dkfm", database=None, deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("dkfm")


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


def images_247():
    """Images of the digits 2, 4 and 7, pixels in [0, 1]: the first 500 of each, then what is left in a seeded order.

    None where MNIST is neither in `DKFM_MNIST` nor to be had from OpenML.
    """
    folder = os.environ.get("DKFM_MNIST")
    if folder is not None:
        images = _idx(Path(folder) / "t10k-images-idx3-ubyte.gz", 16).reshape(-1, 784)
        labels = _idx(Path(folder) / "t10k-labels-idx1-ubyte.gz", 8)
    else:
        from sklearn.datasets import fetch_openml

        try:
            images, labels = fetch_openml("mnist_784", return_X_y=True, as_frame=False, n_retries=1, delay=0.1)
        except Exception:
            return None
        labels = labels.astype(np.uint8)
    first = np.concatenate([np.flatnonzero(labels == digit)[:500] for digit in (2, 4, 7)])
    rest = np.setdiff1d(np.flatnonzero(np.isin(labels, (2, 4, 7))), first)
    return images[np.concatenate([first, np.random.default_rng(0).permutation(rest)])] / 255


@pytest.fixture(scope="session")
def mnist_247():
    """The paper's training set: the first 500 images of the digits 2, 4 and 7."""
    images = images_247()
    if images is None:
        # Where DKFM_MNIST is set, as in .ci/run, a missing file is an error in images_247.
        pytest.skip("MNIST is neither in DKFM_MNIST nor on OpenML.")  # reason: without images nothing can be measured
    return images[:1500]


@pytest.fixture
def client():
    """A real scheduler and a real worker process."""
    from distributed import Client

    from dkfm.clusters import local_cluster

    with local_cluster() as cluster, Client(cluster) as connected:
        yield connected


@pytest.fixture
def threaded_client(tmp_path):
    """A real scheduler with workers inside this process."""
    import dask
    from distributed import Client

    with (
        dask.config.set({"temporary-directory": str(tmp_path)}),
        Client(processes=False, n_workers=1, threads_per_worker=2, dashboard_address=None) as connected,
    ):
        yield connected
