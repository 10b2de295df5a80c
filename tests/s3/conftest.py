"""Fixtures of these tests."""

import pytest

import dkfm
from dkfm import kernels
from helpers.cluster_process import start_cluster


@pytest.fixture(scope="module")
def processes(port, tmp_path_factory):
    """Address of a cluster whose worker finds the server of these tests in its environment."""
    with start_cluster(tmp_path_factory.mktemp("cluster")) as address:
        yield address


@pytest.fixture
def rows(rng):
    return rng.normal(size=(60, 3))


@pytest.fixture
def fitted(rows):
    return dkfm.KernelPCA(2, kernel=kernels.Gaussian(2.0)).fit(rows)


@pytest.fixture
def model(place, fitted):
    fitted.save(f"{place.url}/model")
    return place.join("model")
