"""What is marked complete is what a reader accepts; nothing is written through links, or above a removed output."""

import shutil

import numpy as np
import pytest

import dkfm
from dkfm import kernels
from dkfm.errors import (
    CertificateError,
    DamagedStoreError,
    DkfmError,
    IncompleteStoreError,
    InvalidInputError,
    StoreError,
    StoreExistsError,
    UnsupportedStoreError,
)
from dkfm.files import local
from dkfm.kernels.pairwise import squared_distances
from dkfm.scoring import tasks
from dkfm.scoring.formats.zarr_chunks import ZarrChunks

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = np.random.default_rng(1).normal(size=(60, 4))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model"
    dkfm.KernelPCA(2, kernel=kernels.Gaussian(2.0)).fit(ROWS[:30]).save(path)
    return path


def score(model, target):
    return dkfm.batch_score(model, ROWS, target, chunk_rows=10, progress=False)


def after_chunk(monkeypatch, number, act):
    score_chunk, done = tasks.score_chunk, []

    def acting(work, at):
        receipt = score_chunk(work, at)
        if at == number and not done:
            done.append(at)
            act()
        return receipt

    monkeypatch.setattr("dkfm.scoring.run.score_chunk", acting)


def remove(folder):
    """Remove a folder that receipts may be written into meanwhile."""
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)


def tree(folder):
    return {path.relative_to(folder): path.stat().st_mtime_ns for path in folder.rglob("*")}


def require_unfinished(target):
    assert not (target / "_COMPLETE").exists()
    for refusing in (dkfm.open_scores, dkfm.verify_scores):
        with pytest.raises(StoreError):
            refusing(target)


def require_finished(model, target):
    dkfm.open_scores(target)
    assert dkfm.verify_scores(target, ROWS).rows == 60
    assert score(model, target).scored_chunks == 0


@pytest.mark.costly
@pytest.mark.parametrize("number", [2, 5])
def test_metadata_that_are_lost_under_way_are_laid_anew(model, tmp_path, monkeypatch, number):
    after_chunk(monkeypatch, number, (tmp_path / "out" / "scores" / "zarr.json").unlink)
    score(model, tmp_path / "out")
    require_finished(model, tmp_path / "out")


def test_an_array_that_is_removed_under_way_is_made_again(model, tmp_path, monkeypatch):
    after_chunk(monkeypatch, 5, lambda: remove(tmp_path / "out" / "scores"))
    score(model, tmp_path / "out")
    require_finished(model, tmp_path / "out")


@pytest.mark.parametrize("number", [2, 5])
@pytest.mark.parametrize("name", ["scores", "scores/c", "_journal"])
def test_a_link_in_an_output_completes_nothing_and_nothing_is_written_through_it(
    model, tmp_path, monkeypatch, name, number
):
    folder, elsewhere, before = tmp_path / "out" / name, tmp_path / "elsewhere", {}

    def swap():
        folder.mkdir(exist_ok=True)
        folder.rename(elsewhere)
        folder.symlink_to(elsewhere)
        before.update(tree(elsewhere))

    after_chunk(monkeypatch, number, swap)
    with pytest.raises(UnsupportedStoreError, match="link"):
        score(model, tmp_path / "out")
    require_unfinished(tmp_path / "out")
    assert tree(elsewhere) == before


def test_an_output_behind_a_link_is_left_untouched_and_named(model, tmp_path):
    score(model, tmp_path / "out")
    (tmp_path / "link").symlink_to(tmp_path / "out")
    before = tree(tmp_path / "out")
    with pytest.raises(StoreExistsError, match="is a link, which was left untouched; give the path"):
        score(model, tmp_path / "link")
    assert tree(tmp_path / "out") == before


@pytest.mark.costly
@pytest.mark.parametrize("linked", ["scores/c/2/0", "scores/zarr.json", "zarr.json", "."])
def test_a_file_or_an_output_that_became_a_link_completes_nothing(model, tmp_path, monkeypatch, linked):
    path = tmp_path / "out" / linked

    def swap():
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")

    after_chunk(monkeypatch, 5, swap)
    with pytest.raises(StoreError):
        score(model, tmp_path / "out")
    assert not (tmp_path / "out" / "_COMPLETE").exists()


@pytest.mark.costly
@pytest.mark.parametrize("target", ["out", "out.parquet"])
@pytest.mark.parametrize("name", ["thesis.txt", "scores/thesis.txt", "scores/c/17/0", "part-00017.parquet"])
def test_a_foreign_file_in_an_output_completes_nothing_and_is_left(model, tmp_path, monkeypatch, target, name):
    path = tmp_path / target / name

    def put():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")

    after_chunk(monkeypatch, 2, put)
    with pytest.raises(DamagedStoreError, match=f"has gained {name}"):
        score(model, tmp_path / target)
    assert path.read_text() == "mine"
    with pytest.raises(IncompleteStoreError):
        dkfm.open_scores(tmp_path / target)
    path.unlink()
    score(model, tmp_path / target)
    require_finished(model, tmp_path / target)


def test_what_verify_refuses_the_next_run_refuses_too(model, tmp_path):
    score(model, tmp_path / "out")
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    for refusing in (dkfm.verify_scores, dkfm.open_scores, lambda path: score(model, path)):
        with pytest.raises(DamagedStoreError, match=r"has gained thesis\.txt"):
            refusing(tmp_path / "out")


@pytest.mark.slow
def test_chunks_are_not_removed_through_a_link(model, tmp_path):
    """Those of an unfinished output without receipts are."""
    for name in ("out", "other"):
        score(model, tmp_path / name)
    shutil.rmtree(tmp_path / "out" / "_journal")
    (tmp_path / "out" / "_COMPLETE").unlink()
    shutil.rmtree(tmp_path / "out" / "scores" / "c")
    (tmp_path / "out" / "scores" / "c").symlink_to(tmp_path / "other" / "scores" / "c")
    with pytest.raises(StoreError, match="link"):
        score(model, tmp_path / "out")
    require_finished(model, tmp_path / "other")


@pytest.mark.parametrize("target", ["out", "out.parquet"])
@pytest.mark.parametrize("number", [2, 5])
def test_an_output_that_is_removed_under_way_is_not_made_again(model, tmp_path, monkeypatch, target, number):
    after_chunk(monkeypatch, number, lambda: remove(tmp_path / target))
    with pytest.raises(StoreError):
        score(model, tmp_path / target)
    assert not (tmp_path / target).exists()


@pytest.mark.parametrize("target", ["out", "out.parquet"])
def test_no_task_makes_an_output_again_that_is_removed_as_it_begins_to_write(model, tmp_path, monkeypatch, target):
    from dkfm.scoring.formats.parquet_chunks import ParquetChunks

    chunk_format = ParquetChunks if target.endswith("parquet") else ZarrChunks
    begin_chunk_files = chunk_format.begin_chunk_files

    def removing(self, chunk, stack):
        if chunk.number == 3:
            remove(tmp_path / target)
        return begin_chunk_files(self, chunk, stack)

    monkeypatch.setattr(chunk_format, "begin_chunk_files", removing)
    with pytest.raises(StoreError, match="was removed meanwhile"):
        score(model, tmp_path / target)
    assert not (tmp_path / target).exists()


def test_a_gram_that_is_removed_under_way_is_not_made_again(tmp_path, monkeypatch):
    from dkfm.gram import build

    root, write_tile = tmp_path / "gram.zarr", build.write_tile

    def removing(kernel, rows, path, pair, *others):
        done = write_tile(kernel, rows, path, pair, *others)
        if pair == (1, 1):
            remove(root)
        return done

    monkeypatch.setattr(build, "write_tile", removing)
    with pytest.raises(DkfmError):
        dkfm.build_gram(kernels.Gaussian(2.0), ROWS, root, tile_rows=20)
    assert not root.exists()


@pytest.mark.costly
@pytest.mark.parametrize("sabotage", ["the attributes", "the attributes of another"])
def test_a_gram_that_no_build_would_find_again_is_not_completed(tmp_path, monkeypatch, sabotage):
    from dkfm.gram import build

    root, write_tile = tmp_path / "gram.zarr", build.write_tile
    dkfm.build_gram(kernels.Gaussian(3.0), ROWS, tmp_path / "other.zarr", tile_rows=20)

    def losing(kernel, rows, path, pair, *others):
        done = write_tile(kernel, rows, path, pair, *others)
        if pair == (2, 2) and sabotage == "the attributes":
            (root / "zarr.json").unlink()
        elif pair == (2, 2):
            shutil.copy(tmp_path / "other.zarr" / "zarr.json", root / "zarr.json")
        return done

    monkeypatch.setattr(build, "write_tile", losing)
    with pytest.raises(StoreError):
        dkfm.build_gram(kernels.Gaussian(2.0), ROWS, root, tile_rows=20)
    assert not (root / "_COMPLETE").exists()


def test_a_root_that_is_removed_while_a_file_is_begun_is_told(tmp_path, monkeypatch):
    root = tmp_path / "root"
    root.mkdir()
    monkeypatch.setattr(local, "require_no_links", lambda *_: remove(root))
    with pytest.raises(StoreError, match="was removed meanwhile"), local.new_file(root / "a" / "file", root):
        pass


def test_a_file_that_another_task_named_first_is_durable_too(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(local, "sync_folder", synced.append)
    with local.new_file(tmp_path / "a" / "file", tmp_path) as new:
        (tmp_path / "a" / "file").touch()
        assert not new.commit(exclusive=True)
    assert synced == [tmp_path / "a", tmp_path]


def test_a_new_file_makes_folders_below_its_root_alone(tmp_path):
    with local.new_file(tmp_path / "a" / "b" / "file", tmp_path) as new:
        new.file.write(b"here")
        assert new.commit(exclusive=True)
    assert (tmp_path / "a" / "b" / "file").read_bytes() == b"here"
    with (
        pytest.raises(StoreError, match="was removed meanwhile"),
        local.new_file(tmp_path / "no" / "file", tmp_path / "no"),
    ):
        pass
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("scored_with_llvm", [False, True])
@pytest.mark.parametrize("d", [5, 8])
def test_an_output_of_other_arithmetic_is_verified(tmp_path, monkeypatch, rng, d, scored_with_llvm):
    """Values of rows that are far from most landmarks have the rounding of k(x, x), and not of their own size."""
    pytest.importorskip("llvmlite", reason="the extra fast is not installed; .ci/run has it")
    X = 40 * rng.normal(size=(60, d))
    Z = X + 2 * rng.normal(size=X.shape)
    dkfm.ExactFeatureMap(kernels.Gaussian(1.0), basis="cholesky").fit(X).save(tmp_path / "model")
    monkeypatch.setattr(squared_distances, "has_llvm", lambda: scored_with_llvm)
    dkfm.batch_score(tmp_path / "model", Z, tmp_path / "out", progress=False)
    monkeypatch.setattr(squared_distances, "has_llvm", lambda: not scored_with_llvm)
    assert 0 < dkfm.verify_scores(tmp_path / "out", Z).worst < 0.5


def test_a_wrong_score_is_named_beside_what_rounding_allows(model, tmp_path):
    score(model, tmp_path / "out")
    shifted = ROWS.copy()
    shifted[17] += 1e-9
    words = r"row 17 .*: column [01] has -?0\.\d+ where the formula gives -?0\.\d+, and rounding allows \d\.\de-1\d\.$"
    with pytest.raises(CertificateError, match=words):
        dkfm.verify_scores(tmp_path / "out", shifted)


@pytest.mark.parametrize("sample", [0, -1, 2.5, True])
def test_a_sample_of_no_rows_is_refused_before_any_chunk_is_read(sample, tmp_path):
    with pytest.raises(InvalidInputError, match="sample must be a positive integer"):
        dkfm.verify_scores(tmp_path / "nothing", ROWS, sample=sample)


@pytest.mark.parametrize("option", ["overwrite", "append"])
def test_nothing_is_replaced_for_an_option_that_is_neither_true_nor_false(model, option, tmp_path):
    score(model, tmp_path / "scores")
    before = tree(tmp_path)
    with pytest.raises(InvalidInputError, match=f"{option} must be True or False, and is 'no'"):
        dkfm.batch_score(model, ROWS, tmp_path / "scores", progress=False, **{option: "no"})
    with pytest.raises(InvalidInputError, match="overwrite must be True or False"):
        dkfm.load(model).save(tmp_path / "scores", overwrite="no")
    assert tree(tmp_path) == before
