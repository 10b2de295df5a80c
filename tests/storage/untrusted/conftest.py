"""Fixtures of these tests."""

import shutil

import pytest

from helpers.reader import Reader
from helpers.untrusted import OWN, SOURCES, make


@pytest.fixture(scope="session")
def real(tmp_path_factory):
    root = tmp_path_factory.mktemp("real")
    make(root)
    return root


@pytest.fixture(scope="session")
def reader(real):
    warm = [("source", real / name) for name in (*SOURCES, "group", "x.npy")]
    warm += [(kind, real / name) for name, kind in OWN.items()]
    warm += [
        (kind, real / name) for name in OWN for kind in ("describe", "verify") if (kind, name) != ("verify", "gram")
    ]
    made = Reader(warm)
    yield made
    made.close()


@pytest.fixture
def sound(real, tmp_path):
    """Copy one of the sound stores, to be damaged."""

    def copied(name):
        to = tmp_path / ("x.npy" if name == "x.npy" else "store")
        (shutil.copytree if (real / name).is_dir() else shutil.copy)(real / name, to)
        return to

    return copied
