"""Fixtures of these tests."""

import numpy as np
import pytest

import dkfm
from helpers.compared_digits import NAMES


@pytest.fixture(scope="module")
def rows(digits):
    X, y = digits
    return X[:200], np.array([f"digit {label}" for label in y[:200] % 3]), X[200:300], y[200:300] % 3


@pytest.fixture(scope="module")
def found(rows):
    X, y, Z, t = rows
    t = np.array([f"digit {label}" for label in t])
    return dkfm.compare_kernels(NAMES, X, y, test=Z, test_labels=t, embedding=True)


@pytest.fixture(scope="module")
def text(found):
    return found.to_html()
