"""An input that changes completes nothing, whatever is done to its times; a copy that keeps them goes on."""

import contextlib
import os
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
from click.testing import CliRunner
from scipy import sparse

import dkfm
from dkfm import kernels
from dkfm.cli.app import main
from dkfm.errors import DkfmWarning, IncompleteStoreError, InvalidInputError
from dkfm.files.object_store import Remote
from dkfm.gram import build
from dkfm.scoring import tasks, verification
from dkfm.sources.npy import NpySource
from dkfm.sources.opening import open_source

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = ["a", "b", "c", "d"]
FORMS = ["rows.npy", "rows.npz", "rows.zarr", "rows"]


def rows_of(seed, n=60):
    return np.random.default_rng(seed).normal(size=(n, 4))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model"
    dkfm.KernelPCA(2, kernel=kernels.Gaussian(2.0)).fit(rows_of(0, 30)).save(path)
    return path


def write(path, rows):
    """Write rows, of any values in as many bytes."""
    if path.suffix == ".npy":
        np.save(path, rows)
    elif path.suffix == ".npz":
        sparse.save_npz(path, sparse.csr_array(rows), compressed=False)
    elif path.suffix == ".zarr":
        zarr.create_array(path, data=rows, chunks=(20, 4), compressors=None)
    else:
        path.mkdir()
        plain = {"compression": "none", "use_dictionary": False, "write_statistics": False}
        for number, part in enumerate(np.split(rows, 2)):
            pq.write_table(pa.table(dict(zip(NAMES, part.T, strict=True))), path / f"{number}.parquet", **plain)


def files_of(path):
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def rewrite(path, rows, *, replace=False):
    """Write other rows into the files of a path, in place or in their places, and put their times back."""
    beside = path.with_name(f"other{path.suffix}")
    write(beside, rows)
    for file, other in zip(files_of(path), files_of(beside), strict=True):
        status = file.stat()
        assert other.stat().st_size == status.st_size
        times = (status.st_atime_ns, status.st_mtime_ns)
        if replace:
            os.utime(other, ns=times)
            other.replace(file)
        else:
            file.write_bytes(other.read_bytes())
            os.utime(file, ns=times)
    if beside.is_dir():
        shutil.rmtree(beside)
    else:
        beside.unlink(missing_ok=True)


def score(model, source, target, **options):
    with contextlib.nullcontext() if source.suffix else pytest.warns(DkfmWarning, match="without names of columns"):
        return dkfm.batch_score(model, source, target, **{"chunk_rows": 10, "progress": False} | options)


def before_chunk(monkeypatch, number, act):
    score_chunk, done = tasks.score_chunk, []

    def acting(work, at):
        if at == number and not done:
            done.append(at)
            act()
        return score_chunk(work, at)

    monkeypatch.setattr("dkfm.scoring.run.score_chunk", acting)


def interrupt():
    raise KeyboardInterrupt


def values(target):
    return dkfm.open_scores(target).compute(scheduler="synchronous")


def require_scores(model, target, rows):
    np.testing.assert_allclose(values(target), dkfm.load(model).transform(rows), rtol=1e-10, atol=1e-12)


@pytest.mark.costly
@pytest.mark.parametrize("replace", [False, True], ids=["in place", "by another file"])
@pytest.mark.parametrize("form", FORMS)
def test_rows_that_change_during_a_job_complete_nothing_though_their_times_are_put_back(
    model, tmp_path, monkeypatch, form, replace
):
    source, target = tmp_path / form, tmp_path / "out"
    write(source, rows_of(1))
    before_chunk(monkeypatch, 3, lambda: rewrite(source, rows_of(2), replace=replace))
    with pytest.raises(InvalidInputError, match="changed while it was scored"):
        score(model, source, target)
    with pytest.raises(IncompleteStoreError):
        dkfm.open_scores(target)
    with pytest.warns(DkfmWarning, match="copied or written to since 6 chunks"):
        assert score(model, source, target).scored_chunks == 6
    require_scores(model, target, rows_of(2))


@pytest.mark.parametrize("form", ["rows.npy", "rows.zarr"])
def test_a_link_that_leads_to_another_input_during_a_job_completes_nothing(model, tmp_path, monkeypatch, form):
    source, other = tmp_path / f"one{form}", tmp_path / f"two{form}"
    write(source, rows_of(1))
    write(other, rows_of(2))
    for file, twin in zip(files_of(source), files_of(other), strict=True):
        os.utime(twin, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    link = tmp_path / form
    link.symlink_to(source)

    def swap():
        link.unlink()
        link.symlink_to(other)

    before_chunk(monkeypatch, 3, swap)
    with pytest.raises(InvalidInputError, match="changed while it was scored"):
        score(model, link, tmp_path / "out")


@pytest.mark.costly
@pytest.mark.parametrize("form", ["rows.npy", "rows"])
def test_rows_that_change_between_two_runs_leave_no_chunk_of_the_first(model, tmp_path, monkeypatch, form):
    source, target = tmp_path / form, tmp_path / "out"
    write(source, rows_of(1))
    before_chunk(monkeypatch, 3, interrupt)
    with pytest.raises(KeyboardInterrupt):
        score(model, source, target)
    rewrite(source, rows_of(2))
    with pytest.warns(DkfmWarning, match="since 3 chunks"):
        score(model, source, target)
    require_scores(model, target, rows_of(2))


def test_a_lost_chunk_of_a_finished_output_is_not_made_of_other_rows_than_the_rest(model, tmp_path):
    source, target = tmp_path / "rows.npy", tmp_path / "out"
    write(source, rows_of(1))
    score(model, source, target)
    rewrite(source, rows_of(2))
    assert score(model, source, target).scored_chunks == 0  # nothing is added: it is of the input as it was
    (target / "scores" / "c" / "2" / "0").unlink()
    with pytest.warns(DkfmWarning, match="since 5 chunks"):
        score(model, source, target)
    require_scores(model, target, rows_of(2))


def test_an_unchanged_input_goes_on_where_it_was_without_a_word(model, tmp_path, monkeypatch):
    source, target = tmp_path / "rows.npy", tmp_path / "out"
    write(source, rows_of(1))
    before_chunk(monkeypatch, 3, interrupt)
    with pytest.raises(KeyboardInterrupt):
        score(model, source, target)
    assert score(model, source, target).scored_chunks == 3
    require_scores(model, target, rows_of(1))


def test_a_copy_that_keeps_its_times_is_the_same_input(model, tmp_path):
    source, target = tmp_path / "rows.npy", tmp_path / "out"
    write(source, rows_of(1))
    score(model, source, target)
    stamp, state = open_source(source).stamp(), open_source(source).stamp(include_ctime=True)
    shutil.copy2(source, tmp_path / "copy.npy")
    (tmp_path / "copy.npy").replace(source)
    assert open_source(source).stamp() == stamp
    assert open_source(source).stamp(include_ctime=True) != state
    assert score(model, source, target).scored_chunks == 0


@pytest.mark.parametrize("form", FORMS)
def test_rows_that_are_replaced_between_opening_and_stamping_are_refused(model, tmp_path, monkeypatch, form):
    source = tmp_path / form
    write(source, rows_of(1))

    def opened(*arguments, **options):
        found = open_source(*arguments, **options)
        shutil.rmtree(source) if source.is_dir() else source.unlink()
        write(source, rows_of(2, 80))
        return found

    monkeypatch.setattr("dkfm.execution.job_input.open_source", opened)
    with pytest.raises(InvalidInputError, match="changed since it was opened"):
        score(model, source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_object_that_is_replaced_between_opening_and_stamping_is_refused(model, tmp_path, monkeypatch):
    place = Remote("memory://changed-inputs")

    def put(rows):
        write(tmp_path / "rows.npy", rows)
        place.replace("rows.npy", (tmp_path / "rows.npy").read_bytes())

    def opened(*arguments, **options):
        found = open_source(*arguments, **options)
        put(rows_of(2, 80))
        return found

    put(rows_of(1))
    monkeypatch.setattr("dkfm.execution.job_input.open_source", opened)
    with pytest.raises(InvalidInputError, match="changed since it was opened"):
        dkfm.batch_score(model, f"{place.url}/rows.npy", tmp_path / "out", progress=False)
    place.remove_objects("rows.npy")


def test_a_gram_of_rows_that_change_under_way_is_not_kept(tmp_path, monkeypatch):
    from dkfm.gram import build

    source, root, write_tile = tmp_path / "rows.npy", tmp_path / "gram.zarr", build.write_tile
    write(source, rows_of(1))

    def changing(kernel, rows, path, pair, *others):
        if pair == (1, 1):
            rewrite(source, rows_of(2))
        return write_tile(kernel, rows, path, pair, *others)

    monkeypatch.setattr(build, "write_tile", changing)
    with pytest.raises(InvalidInputError, match="changed while it was read"):
        dkfm.build_gram(kernels.Gaussian(2.0), source, root, tile_rows=30)
    assert not root.exists()
    monkeypatch.undo()
    K = dkfm.build_gram(kernels.Gaussian(2.0), source, root, tile_rows=30)
    np.testing.assert_allclose(K[:], kernels.Gaussian(2.0)(rows_of(2), rows_of(2)), atol=1e-12)


def test_an_input_that_changes_while_an_output_is_held_against_it_proves_nothing(model, tmp_path, monkeypatch):
    source, target, worst = tmp_path / "rows.npy", tmp_path / "out", verification._compute_max_error_ratio
    write(source, rows_of(1))
    score(model, source, target)

    def changing(output, receipts, loaded, rows, part):
        found = worst(output, receipts, loaded, rows, part)
        if part.start == 0:
            rewrite(source, rows_of(1))
        return found

    monkeypatch.setattr(verification, "_compute_max_error_ratio", changing)
    with pytest.raises(InvalidInputError, match="changed while it was compared"):
        dkfm.verify_scores(target, source)


def test_a_model_of_rows_that_change_while_they_are_read_is_not_saved(tmp_path, monkeypatch):
    source, read = tmp_path / "rows.npy", NpySource.read
    write(source, rows_of(1))

    def changing(of, rows):
        found = read(of, rows)
        rewrite(source, rows_of(2))
        return found

    monkeypatch.setattr(NpySource, "read", changing)
    line = ["fit", str(source), str(tmp_path / "model"), "--method", "pca", "--kernel", "linear"]
    done = CliRunner().invoke(main, line)
    assert (done.exit_code, "changed while it was read" in done.stderr) == (1, True)
    assert not (tmp_path / "model").exists()


def test_a_gram_matrix_of_rows_whose_mode_changes_is_built(tmp_path, monkeypatch):
    source, write_tile = tmp_path / "rows.npy", build.write_tile
    write(source, rows_of(1))

    def changing(*given):
        source.chmod(0o600 if source.stat().st_mode & 0o044 else 0o644)
        return write_tile(*given)

    monkeypatch.setattr(build, "write_tile", changing)
    K = dkfm.build_gram(dkfm.kernels.Gaussian(1.0), source, tmp_path / "K", tile_rows=len(rows_of(1)) // 2, client=None)
    np.testing.assert_allclose(K[:], dkfm.kernels.Gaussian(1.0)(rows_of(1)), rtol=1e-12)
