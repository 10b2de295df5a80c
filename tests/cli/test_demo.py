"""The demo as a user runs it, in a process of its own."""

import subprocess
import sys
import urllib.request

import numpy as np
import pytest

import dkfm
from dkfm.cli import demo
from dkfm.errors import StoreExistsError


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Run the demo on 20,000 rows, and look at its dashboard while it works."""
    folder = tmp_path_factory.mktemp("demo")
    # Matplotlib before 3.10.7 calls names that later versions of pyparsing deprecate.
    warnings = ["-W", "error", "-W", "ignore::DeprecationWarning"]
    command = [sys.executable, *warnings, "-m", "dkfm", "demo", "--rows", "20000", "--dir", "out"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    first = process.stdout.readline()
    status = urllib.request.urlopen(first.split()[1], timeout=30).status
    rest, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors  # every test would otherwise miss a file of its own
    return folder / "out", [first, *rest.splitlines()], errors, process.returncode, status


@pytest.mark.slow
def test_it_says_what_it_promises_in_order(finished):
    folder, lines, errors, code, status = finished
    assert code == 0, errors
    assert status == 200
    words = ["dashboard", "Gram", "rank", "certificate", "scored", "peak memory", "accuracy", "files"]
    assert [line.split("  ")[0] for line in lines] == words
    assert "10 tiles" in lines[1]
    assert "20,000 rows" in lines[4]
    assert float(lines[3].split()[1]) < 1e-12
    assert float(lines[6].split()[1]) >= 0.95
    assert str(folder) in lines[7]
    assert "Warning" not in errors
    assert "Traceback" not in errors


@pytest.mark.slow
def test_its_stores_are_models_and_scores_that_verify(finished):
    folder = finished[0]
    digits = demo.Digits.load()
    pca, phi = dkfm.load(folder / "components"), dkfm.load(folder / "features")
    assert pca.verify().certificate.error < 1e-12
    assert phi.verify(digits.held_out).against.error < 1e-12
    import zarr

    rows = zarr.open_array(folder / "rows.zarr" / "rows", mode="r")[:]
    scores = dkfm.open_scores(folder / "scores.zarr").compute()
    np.testing.assert_allclose(scores, pca.transform(rows), atol=1e-12)
    assert len(list(folder.glob("gram-*.zarr"))) == 1
    from dkfm.cli.inspection import describe_store

    kinds = {path.name: describe_store(path)["kind"] for path in folder.iterdir() if path.is_dir()}
    assert sorted(kinds.values()) == ["gram", "model", "model", "rows", "scores"]


@pytest.mark.slow
def test_its_pictures_are_not_blank(finished):
    from matplotlib.image import imread

    for name in ("spectrum.png", "components.png"):
        assert imread(finished[0] / name).std() > 0.02


def test_a_second_run_starts_clean_and_a_strangers_folder_is_left_untouched(finished, tmp_path):
    path = finished[0] / "scores.zarr/thesis.txt"
    path.write_text("mine")
    with pytest.raises(StoreExistsError, match="left untouched"):
        demo._prepare_folder(finished[0])
    assert path.read_text() == "mine"
    path.unlink()
    demo._prepare_folder(finished[0])
    assert [p.name for p in finished[0].iterdir()] == ["dkfm-demo.json"]
    (tmp_path / "thesis.txt").write_text("mine")
    for folder in (tmp_path, tmp_path / "thesis.txt"):
        with pytest.raises(StoreExistsError, match="--dir"):
            demo._prepare_folder(folder)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_the_scoring_set_is_held_out_digits_shifted_by_at_most_one_pixel():
    images = np.zeros((1, 64))
    images[0, 27] = 1.0  # row 3, column 3
    shifted = demo._augment_images(images, 500, np.random.default_rng(0)).reshape(-1, 8, 8)
    bright = shifted.reshape(500, -1).argmax(axis=1)
    assert set(bright) == {8 * (3 + i) + 3 + j for i in (-1, 0, 1) for j in (-1, 0, 1)}
    again = demo._augment_images(images, 500, np.random.default_rng(0)).reshape(-1, 8, 8)
    np.testing.assert_array_equal(shifted, again)


def test_training_and_held_out_digits_are_all_of_them_once():
    digits = demo.Digits.load()
    assert (len(digits.train), len(digits.held_out)) == (1000, 797)
