"""Paths and URLs as users give them."""

import numpy as np
import pytest

import dkfm
from dkfm import kernels
from dkfm.errors import StoreError
from dkfm.files.location import locate


def test_the_parent_folder_in_a_path_is_resolved_unless_it_is_that_of_a_link(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "far" / "there").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "there")
    monkeypatch.chdir(tmp_path / "here")
    assert locate("../x.npy") == locate("x/../../x.npy") == tmp_path / "x.npy"
    assert locate("../link/../x.npy") == tmp_path / "here" / ".." / "link" / ".." / "x.npy"
    assert locate("../link/x.npy") == tmp_path / "link" / "x.npy"


def test_a_job_is_the_same_from_another_folder(tmp_path, rng, monkeypatch):
    X = rng.normal(size=(30, 3))
    dkfm.KernelPCA(2, kernel=kernels.Gaussian(2.0)).fit(X).save(tmp_path / "model")
    np.save(tmp_path / "x.npy", X)
    dkfm.batch_score(tmp_path / "model", tmp_path / "x.npy", tmp_path / "out", progress=False)
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert dkfm.batch_score("../model", "../x.npy", "../out", progress=False).scored_chunks == 0


@pytest.mark.parametrize("position", range(3))
def test_an_empty_path_is_not_the_current_folder(tmp_path, rng, position):
    paths = [tmp_path / "model", tmp_path / "x.npy", tmp_path / "out"]
    dkfm.KernelPCA(2, kernel=kernels.Gaussian(2.0)).fit(rng.normal(size=(30, 3))).save(paths[0])
    np.save(paths[1], rng.normal(size=(30, 3)))
    paths[position] = ""
    with pytest.raises(StoreError, match="A path is empty text"):
        dkfm.batch_score(*paths, progress=False)


@pytest.mark.parametrize("url", ["http://localhost/out", "ftp://localhost/out", "nowhere://bucket/out"])
def test_an_output_where_none_can_be_written_is_refused_without_a_request(rng, url):
    model = dkfm.KernelPCA(2, kernel=kernels.Gaussian(2.0)).fit(rng.normal(size=(30, 3)))
    for write in (model.save, lambda url: dkfm.batch_score(model, np.zeros((3, 3)), url, progress=False)):
        with pytest.raises(StoreError, match="cannot be written: only s3://"):
            write(url)
