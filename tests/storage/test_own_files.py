"""Nothing foreign goes: dkfm removes and replaces its own, by exact name or content, and no output lies in an input."""

import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import zarr
from click.testing import CliRunner

import dkfm
from dkfm import kernels
from dkfm.cli import demo
from dkfm.cli.app import main
from dkfm.errors import DkfmWarning, InvalidInputError, StoreExistsError
from dkfm.kernel_comparison import html_page
from dkfm.storage import own_files

ROWS = np.random.default_rng(0).normal(size=(40, 3))
K = kernels.Gaussian(3.0)
HEX = "0123456789abcdef" * 2
PAGE = f"<html><head>{html_page.GENERATOR}</head></html>"


@pytest.fixture
def pca():
    return dkfm.KernelPCA(2, kernel=K).fit(ROWS)


def score(model, path, **options):
    return dkfm.batch_score(model, ROWS, path, progress=False, **options)


def run(*words):
    return CliRunner().invoke(main, [str(word) for word in words])


@pytest.mark.costly
@pytest.mark.parametrize("name", [f".mythesis.{HEX}.partial", f"scores/c/.mine.{HEX}.partial", "empty/", "scores/x/"])
def test_overwriting_refuses_where_there_is_something_foreign(pca, tmp_path, name):
    for path, make in ((tmp_path / "out.zarr", score), (tmp_path / "model", lambda m, p, **o: m.save(p, **o))):
        make(pca, path)
        mine = path / name
        if name.endswith("/"):
            mine.mkdir(parents=True)
        else:
            mine.parent.mkdir(parents=True, exist_ok=True)
            mine.write_text("mine")
        with pytest.raises(StoreExistsError, match="which dkfm did not write; it was left untouched"):
            make(pca, path, overwrite=True)
        assert mine.exists()


@pytest.mark.costly
@pytest.mark.parametrize("name", [f".mythesis.{HEX}.partial", f"scores/c/.mine.{HEX}.partial"])
def test_a_finished_job_sweeps_only_its_own_partial_files(pca, tmp_path, name):
    score(pca, tmp_path / "out.zarr")
    mine, own = tmp_path / "out.zarr" / name, tmp_path / "out.zarr" / f"scores/c/0/.0.{HEX}.partial"
    for path in (mine, own):
        path.write_text("half")
    (tmp_path / "out.zarr" / "_COMPLETE").unlink()
    score(pca, tmp_path / "out.zarr")
    assert mine.read_text() == "half"
    assert not own.exists()


@pytest.mark.slow
def test_what_killed_writers_left_does_not_keep_a_store_from_being_replaced(pca, tmp_path):
    score(pca, tmp_path / "out.zarr")
    for name in (f"._COMPLETE.{HEX}.partial", f"scores/zarr.{HEX}.partial", f"scores/c/0/.0.{HEX}.partial"):
        (tmp_path / "out.zarr" / name).write_text("half")
    score(pca, tmp_path / "out.zarr", overwrite=True)
    assert not list(tmp_path.rglob("*.partial"))
    assert [path.name for path in tmp_path.iterdir()] == ["out.zarr"]


def test_what_comes_into_a_store_while_it_is_replaced_stays(pca, tmp_path, monkeypatch):
    pca.save(tmp_path / "model")
    look = own_files.find_foreign_entry

    def late(root, own):
        if root.name.endswith(".old"):
            (root / "thesis.txt").write_text("mine")
        return look(root, own)

    monkeypatch.setattr(own_files, "find_foreign_entry", late)
    with pytest.warns(DkfmWarning, match="came to hold something that is not dkfm's"):
        pca.save(tmp_path / "model", overwrite=True)
    (kept,) = tmp_path.glob(".model.*.old/*")
    assert kept.read_text() == "mine"


def test_a_page_replaces_only_an_earlier_page(tmp_path):
    y = ROWS[:, 0] > 0
    target = tmp_path / "page.html"
    for _ in range(2):
        html_page.write_page(target, html_page.render_page([], [["kernel"]], []))
    target.write_text("my thesis")
    with pytest.raises(StoreExistsError, match="not a page of dkfm's; move it away, or choose another path"):
        html_page.write_page(target, PAGE)
    np.save(tmp_path / "x.npy", ROWS)
    np.save(tmp_path / "y.npy", y.astype(int))
    words = ["compare", tmp_path / "x.npy", "--labels", tmp_path / "y.npy", "--kernel", "linear", "--html"]
    for place in (target, tmp_path / "x.npy"):
        result = run(*words, place)
        assert result.exit_code == 1
        assert "StoreExistsError" in result.output
    assert target.read_text() == "my thesis"
    np.testing.assert_array_equal(np.load(tmp_path / "x.npy"), ROWS)


def test_a_report_of_dask_replaces_only_an_earlier_report(tmp_path):
    from dkfm.cli import performance_report

    target = tmp_path / "report.html"
    target.write_text("my thesis")
    with pytest.raises(StoreExistsError, match="not a page of dkfm's"):
        performance_report.require_report(str(target), "127.0.0.1:1")
    target.write_text(PAGE)
    performance_report.require_report(str(target), "127.0.0.1:1")
    assert target.read_text() == PAGE


def test_a_demo_replaces_no_picture_and_no_gram_but_its_own(tmp_path):
    pytest.importorskip("matplotlib").use("Agg")
    (tmp_path / "dkfm-demo.json").write_text(json.dumps({}))
    ax = dkfm.plotting.spectrum([2.0, 1.0])
    dkfm.plotting.save_picture(ax, tmp_path / "spectrum.png")
    dkfm.build_gram(K, ROWS, tmp_path / "gram-mine.zarr", progress=False)
    (tmp_path / "components.png").write_text("mine")
    with pytest.raises(StoreExistsError, match="not a picture of dkfm's"):
        demo._prepare_folder(tmp_path)
    assert (tmp_path / "spectrum.png").exists()
    (tmp_path / "components.png").unlink()
    demo._prepare_folder(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dkfm-demo.json", "gram-mine.zarr"]


@pytest.fixture
def group(tmp_path):
    """Return a Zarr group with rows in it, as somebody else wrote it, with a link beside it that leads to it."""
    root = zarr.create_group(tmp_path / "in.zarr", zarr_format=3)
    root.create_array("rows", data=ROWS, chunks=(20, 3))
    (tmp_path / "link.zarr").symlink_to(tmp_path / "in.zarr")
    return tmp_path / "in.zarr"


def tree(folder):
    return sorted(path.relative_to(folder).as_posix() for path in Path(folder).rglob("*"))


@pytest.mark.costly
@pytest.mark.parametrize("read", ["in.zarr", "in.zarr/rows", "link.zarr/rows"])
@pytest.mark.parametrize("written", ["in.zarr/out", "in.zarr/deep/out", "in.zarr/rows/out", "link.zarr/out"])
def test_no_output_lies_in_its_input(pca, group, tmp_path, read, written):
    before = tree(group)
    for use in (
        lambda: dkfm.batch_score(pca, tmp_path / read, tmp_path / written, progress=False),
        lambda: dkfm.plan_score(pca, tmp_path / read, tmp_path / written),
        lambda: dkfm.build_gram(K, tmp_path / read, tmp_path / written, progress=False),
    ):
        with pytest.raises(InvalidInputError, match=r"lies in .*in\.zarr, which this job reads; choose another path"):
            use()
    assert tree(group) == before


def test_a_fit_writes_nothing_into_its_rows(group, tmp_path):
    shutil.copytree(group, tmp_path / "copy.zarr")
    before, words = tree(group), ["fit", group / "rows", "--kernel", "linear", "--no-progress"]
    for model, options in (
        (group / "model", []),
        (tmp_path / "model", ["--workspace", group / "work"]),
        (tmp_path / "model", ["--workspace", tmp_path / "link.zarr"]),
        (tmp_path / "model", ["--scheduler", "127.0.0.1:1", "--report", group / "report.html"]),
    ):
        result = run(words[0], words[1], model, *words[2:], *options)
        assert result.exit_code == 1
        assert "which this job reads; choose another path" in result.output
        assert result.output.count("\n") == 1
    assert tree(group) == before
    assert not (tmp_path / "model").exists()
    assert run(words[0], words[1], tmp_path / "model", *words[2:], "--workspace", tmp_path).exit_code == 0


def test_a_page_lies_in_nothing_that_its_job_uses(pca, group, tmp_path):
    pca.save(tmp_path / "model")
    words = [
        "score",
        tmp_path / "model",
        group / "rows",
        tmp_path / "out.zarr",
        "--scheduler",
        "127.0.0.1:1",
        "--report",
    ]
    for place in (group / "r.html", tmp_path / "model" / "r.html"):
        result = run(*words, place)
        assert result.exit_code == 1
        assert "lies in" in result.output
    np.save(tmp_path / "y.npy", (ROWS[:, 0] > 0).astype(int))
    compare = ["compare", group / "rows", "--labels", tmp_path / "y.npy", "--kernel", "linear", "--html"]
    result = run(*compare, group / "page.html")
    assert result.exit_code == 1
    assert "lies in" in result.output
    assert not list(tmp_path.rglob("*.html"))


def test_an_output_at_a_url_does_not_lie_in_its_input(pca):
    pytest.importorskip("fsspec")
    import fsspec

    store = zarr.storage.FsspecStore.from_url("memory://dkfm-apart/in.zarr")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zarr.create_group(store, zarr_format=3).create_array("rows", data=ROWS, chunks=(20, 3))
    try:
        for written in ("memory://dkfm-apart/in.zarr/out", "memory://dkfm-apart//in.zarr/rows/out"):
            with pytest.raises(InvalidInputError, match="which this job reads"):
                dkfm.plan_score(pca, "memory://dkfm-apart/in.zarr/rows", written)
        assert dkfm.plan_score(pca, "memory://dkfm-apart/in.zarr/rows", "memory://dkfm-apart/out.zarr").rows == 40
    finally:
        fsspec.filesystem("memory").rm("/dkfm-apart", recursive=True)
