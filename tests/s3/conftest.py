"""Fixtures of these tests."""

import pytest

import dkfm
from dkfm import kernels


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
