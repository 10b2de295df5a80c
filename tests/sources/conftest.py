"""Fixtures of these tests."""

import numpy as np
import pytest
import scipy.sparse as sp


@pytest.fixture
def rows(rng):
    return rng.normal(size=(1000, 3))


@pytest.fixture
def matrix(rng):
    dense = np.zeros(6000)
    dense[rng.choice(6000, 600, replace=False)] = rng.normal(size=600)
    return sp.csr_array(dense.reshape(200, 30))
