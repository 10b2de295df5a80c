"""Fixtures of these tests."""

import pytest
import scipy.sparse as sp


@pytest.fixture
def rows(rng):
    return rng.normal(size=(1000, 3))


@pytest.fixture
def matrix(rows):
    return sp.csr_array(rows * (rows > 0.5))
