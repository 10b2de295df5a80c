"""A file of a model that was made longer is refused for its size, and not read to its end."""

import os

import numpy as np
import pytest

import dkfm
from dkfm.errors import DamagedStoreError, StoreError

LONG = 2**42


@pytest.fixture
def model(tmp_path):
    rows = np.random.default_rng(0).normal(size=(20, 3))
    dkfm.ExactFeatureMap(dkfm.kernels.Gaussian(2.0)).fit(rows).save(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.slow
@pytest.mark.timeout(30)
def test_every_file_of_a_model_is_held_against_its_size_before_it_is_read(model):
    files = [path for path in model.rglob("*") if path.is_file()]
    assert len(files) > 3
    for path in files:
        size = path.stat().st_size
        os.truncate(path, LONG)
        with pytest.raises(StoreError, match=r"bytes and m(ust|ay) have"):
            dkfm.load(model)
        os.truncate(path, size)
        dkfm.load(model)


def test_a_changed_byte_is_still_told_as_such(model):
    path = next(path for path in model.rglob("c/*/0"))
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedStoreError, match="a byte of it changed"):
        dkfm.load(model)
