"""Fixtures of these tests."""

import numpy as np
import pytest


@pytest.fixture
def data(rng):
    y = rng.integers(0, 3, 120)
    return rng.normal(size=(120, 4)) + 1.5 * np.eye(3)[y] @ np.ones((3, 4)).cumsum(axis=0), y
