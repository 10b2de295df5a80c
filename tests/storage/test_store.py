"""Stores: validated before anything of them is read, complete or refused, and nothing of others is touched."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import contracts
import dkfm
from dkfm import kernels
from dkfm.errors import (
    DamagedStoreError,
    DkfmError,
    IncompleteStoreError,
    KernelError,
    StoreError,
    StoreExistsError,
    UnsupportedStoreError,
)
from dkfm.files import local
from dkfm.storage import store_metadata, zarr_store

ESTIMATORS = [
    dkfm.ExactFeatureMap(kernels.Gaussian(2.0)),
    dkfm.ExactFeatureMap(kernels.Gaussian(0.3)),
    dkfm.ExactFeatureMap(kernels.Linear(), basis="spectral"),
    dkfm.KernelPCA(3, kernel=kernels.Gaussian(2.0) + 0.5 * kernels.Polynomial(2)),
    dkfm.KernelPCA(),
]


@pytest.fixture
def rows(rng):
    return rng.normal(size=(40, 3))


@pytest.fixture
def saved(rows, tmp_path):
    dkfm.KernelPCA(2, kernel=kernels.Gaussian(2.0)).fit(rows).save(tmp_path / "model")
    return tmp_path / "model"


def edit(path, change):
    metadata = json.loads(path.read_text())
    change(metadata)
    path.write_text(json.dumps(metadata))


def contents(folder):
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.costly
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
def test_a_loaded_estimator_is_the_saved_one(estimator, rows, rng, tmp_path):
    contracts.check_store(estimator.fit(rows), rng.normal(size=(9, 3)), tmp_path / "model")


def test_attributes_survive_a_store(rows, tmp_path):
    phi = dkfm.ExactFeatureMap(kernels.Linear(), basis="spectral").fit(rows)
    phi.save(tmp_path / "m")
    loaded = dkfm.load(tmp_path / "m")
    assert (loaded.rank_, loaded.n_negative_, loaded.condition_) == (phi.rank_, phi.n_negative_, phi.condition_)
    np.testing.assert_array_equal(loaded.dropped_, phi.dropped_)
    np.testing.assert_array_equal(loaded.residual(rows), phi.residual(rows))
    loaded.save(tmp_path / "again")
    assert dkfm.load(tmp_path / "again").basis == "spectral"


def test_a_model_holds_no_pickle_and_every_chunk_has_a_checksum(saved):
    for path in saved.rglob("zarr.json"):
        metadata = json.loads(path.read_text())
        if metadata["node_type"] == "array":
            assert [codec["name"] for codec in metadata["codecs"]] == ["bytes", "crc32c"]
            assert metadata["fill_value"] == "NaN"


def test_an_existing_path_is_refused_and_left_untouched(saved, rows, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before = contents(tmp_path)
    fitted = dkfm.KernelPCA(1).fit(rows)
    for name in ("model", "file", "folder", "link"):
        for overwrite in (False, name != "model"):
            with pytest.raises(StoreExistsError):
                fitted.save(tmp_path / name, overwrite=overwrite)
    assert contents(tmp_path) == before


def test_overwrite_replaces_a_model_but_not_one_with_a_strangers_file(saved, rows):
    fitted = dkfm.KernelPCA(1).fit(rows)
    (saved / "notes.txt").write_text("mine")
    before = contents(saved)
    with pytest.raises(StoreExistsError, match=r"notes\.txt"):
        fitted.save(saved, overwrite=True)
    assert contents(saved) == before
    (saved / "notes.txt").unlink()
    fitted.save(saved, overwrite=True)
    np.testing.assert_array_equal(dkfm.load(saved).transform(rows), fitted.transform(rows))


def test_a_model_without_its_marker_is_refused(saved):
    (saved / "_COMPLETE").unlink()
    with pytest.raises(IncompleteStoreError, match="_COMPLETE"):
        dkfm.load(saved)


def test_a_newer_model_is_refused_with_both_versions(saved):
    edit(saved / "zarr.json", lambda m: m["attributes"]["dkfm"].update(version=3))
    with pytest.raises(UnsupportedStoreError, match=r"format 3 .*reads format 2"):
        dkfm.load(saved)


def test_a_store_of_another_kind_is_refused(rows, tmp_path):
    dkfm.build_gram(kernels.Linear(), rows, tmp_path / "gram")
    with pytest.raises(UnsupportedStoreError, match="gram store, and a model store"):
        dkfm.load(tmp_path / "gram")


@pytest.mark.parametrize("name", ["missing", "empty", "foreign"])
def test_what_is_no_store_is_refused(name, tmp_path):
    (tmp_path / "empty").mkdir()
    zarr.create_group(tmp_path / "foreign", attributes={"mine": True})
    with pytest.raises(StoreError):
        dkfm.load(tmp_path / name)


@pytest.mark.slow
def test_any_changed_byte_of_any_file_is_found(saved, rng):
    local = [p for p in saved.rglob("*") if p.is_file()]
    assert len(local) >= 9
    for path in local:
        original = path.read_bytes()
        for position in {0, len(original) - 1, *rng.integers(len(original), size=12).tolist()}:
            changed = bytearray(original)
            changed[position] ^= 1 << int(rng.integers(8))
            path.write_bytes(bytes(changed))
            with pytest.raises(StoreError):
                dkfm.load(saved)
        path.write_bytes(original)
    dkfm.load(saved)


@pytest.mark.parametrize("damage", ["truncate", "delete", "extra", "link", "outside"])
def test_lost_gained_cut_or_linked_files_are_found(saved, damage, tmp_path):
    chunk = saved / "landmarks" / "c" / "0" / "0"
    if damage == "truncate":
        os.truncate(chunk, 20)
    elif damage == "delete":
        chunk.unlink()
    elif damage == "extra":
        (saved / "landmarks" / "c" / "1").mkdir()
        (saved / "landmarks" / "c" / "1" / "0").write_bytes(b"x")
    elif damage == "link":
        shutil.copy(chunk, tmp_path / "copy")
        chunk.unlink()
        chunk.symlink_to(tmp_path / "copy")
    else:
        shutil.move(saved / "landmarks", tmp_path / "landmarks")
        (saved / "landmarks").symlink_to(tmp_path / "landmarks")
    words = {"delete": "has lost landmarks/c/0/0", "extra": "has gained landmarks/c/1/0 .*; remove it"}.get(damage)
    with pytest.raises((DamagedStoreError, UnsupportedStoreError), match=words):
        dkfm.load(saved)


HOSTILE = {
    "pickle filter": lambda m: m["codecs"].insert(0, {"name": "numcodecs.pickle"}),
    "unknown codec": lambda m: m.update(codecs=[{"name": "bytes", "configuration": {"endian": "little"}}]),
    "compression bomb": lambda m: m["codecs"].append({"name": "zstd", "configuration": {"level": 1}}),
    "petabytes": lambda m: m.update(shape=[2**46, 3]),
    "huge chunk": lambda m: m["chunk_grid"]["configuration"].update(chunk_shape=[2**46, 3]),
    "zero chunk": lambda m: m["chunk_grid"]["configuration"].update(chunk_shape=[0, 3]),
    "negative shape": lambda m: m.update(shape=[-1, 3]),
    "text shape": lambda m: m.update(shape="many"),
    "five axes": lambda m: m.update(shape=[1] * 5),
    "version 2": lambda m: m.update(zarr_format=2),
    "object dtype": lambda m: m.update(data_type={"name": "object"}),
    "fill that is data": lambda m: m.update(fill_value=0.0),
    "dotted keys": lambda m: m["chunk_key_encoding"]["configuration"].update(separator="."),
    "transformers": lambda m: m.update(storage_transformers=[{"name": "x"}]),
    "no transformers, as a number": lambda m: m.update(storage_transformers=False),
    "grid of lists": lambda m: m.update(chunk_grid=[1, 2]),
}


@pytest.mark.alike
@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_metadata_that_dkfm_does_not_write_are_refused_before_any_chunk_is_read(saved, change):
    edit(saved / "landmarks" / "zarr.json", change)
    with pytest.raises((UnsupportedStoreError, DamagedStoreError)):
        store_metadata.require_chunks(saved / "landmarks", store_metadata.read_array_info(saved / "landmarks"))


@pytest.mark.slow
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)
    )
)
@settings(max_examples=25)
def test_json_that_is_not_the_schemas_is_refused_by_name(tmp_path_factory, value):
    folder = tmp_path_factory.mktemp("store")
    (folder / "zarr.json").write_text(json.dumps(value))
    for read in (store_metadata.read_own_attributes, store_metadata.read_array_info):
        with pytest.raises(DkfmError):
            read(folder)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "[]", "\xff"])
def test_text_that_is_not_json_is_refused(tmp_path, text):
    (tmp_path / "zarr.json").write_text(text, encoding="utf-8")
    with pytest.raises(DkfmError):
        store_metadata.read_own_attributes(tmp_path)


def _forge(saved, change):
    """Change a model's attributes and make the marker agree, as a stranger could."""
    from dkfm.storage.model_store import _manifest_digest, compute_sha256

    edit(saved / "zarr.json", lambda m: change(m["attributes"]["dkfm"]))
    sums = {n: compute_sha256(saved / n) for n in sorted(store_metadata.list_files(saved)) if n != "_COMPLETE"}
    (saved / "_COMPLETE").write_text(json.dumps({"files": sums, "digest": _manifest_digest(sums)}))


FORGED = {
    "estimator": lambda a: a.update(estimator="os.system"),
    "kernel": lambda a: a.update(kernel={"name": "function", "function": "os:system"}),
    "kernel parameter": lambda a: a["kernel"].update(sigma=-1),
    "link": lambda a: a["heads"]["scores"].update(link="eval"),
    "path out": lambda a: a["heads"]["scores"].update(weights="../../secret"),
    "absolute path": lambda a: a["heads"]["scores"].update(weights="/etc/passwd"),
    "heads": lambda a: a.update(heads=3),
    "no heads": lambda a: a.pop("heads"),
    "extra": lambda a: a.update(extra="eigenvalues"),
    "missing output": lambda a: a.update(heads={"features": a["heads"]["scores"]}),
    "no outputs": lambda a: a.update(heads={}),
    "endless pairs": lambda a: a["fitted"]["certificates"]["certificate"].update(pairs=float("inf")),
    "certificate of nothing": lambda a: a["fitted"]["certificates"]["certificate"].update(error=float("nan")),
    "tiny sigma": lambda a: a["kernel"].update(sigma=1e-170),
    "huge sigma": lambda a: a["kernel"].update(sigma=10**400),
    "fitted": lambda a: a.update(fitted=[]),
    "certificate": lambda a: a["fitted"].update(certificates={"certificate": [1]}),
    "no certificate": lambda a: a["fitted"].update(certificates={}),
    "parameters": lambda a: a.update(parameters={}),
    "wrong weights": lambda a: a["heads"]["scores"].update(weights="eigenvalues"),
    "columns that are not there": lambda a: a["heads"]["scores"].update(first=99),
    "columns of a head with an offset": lambda a: a["heads"]["scores"].update(first=1),
    "no triangle": lambda a: a["heads"]["scores"].update(triangular=True),
    "a shift of another width": lambda a: a.update(shift="eigenvalues"),
    "missing weights": lambda a: a["heads"]["scores"].update(weights=None),
}


@pytest.mark.alike
@pytest.mark.parametrize("change", FORGED.values(), ids=FORGED)
def test_a_strangers_model_is_data_and_what_is_not_is_refused_by_name(saved, change):
    _forge(saved, change)
    with pytest.raises((UnsupportedStoreError, KernelError)):
        dkfm.load(saved)


def test_a_model_with_a_function_cannot_be_saved_and_leaves_nothing(rows, tmp_path):
    fitted = dkfm.KernelPCA(1, kernel=kernels.Function(lambda X, Y: X @ Y.T)).fit(rows)
    with pytest.raises(KernelError, match="no other process can import it"):
        fitted.save(tmp_path / "m")
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("value", [np.int64(3), np.int32(1)])
def test_numpy_scalars_are_saved_as_the_numbers_they_are(rows, tmp_path, value):
    dkfm.KernelPCA(value).fit(rows).save(tmp_path / "m")
    assert dkfm.load(tmp_path / "m").n_components == value


@pytest.mark.costly
@pytest.mark.parametrize("moment", ["create_group", "add_array", "write_completion_marker", "sync_tree", "rename"])
def test_a_save_that_fails_at_any_moment_leaves_the_model_before_it(saved, rows, tmp_path, monkeypatch, moment):
    before, model = contents(saved), dkfm.KernelPCA(1).fit(rows)

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as failing:
        if moment == "rename":
            honest = Path.rename
            failing.setattr(Path, "rename", lambda p, to: fail() if p.suffix == ".partial" else honest(p, to))
        else:
            failing.setattr({"create_group": zarr, "sync_tree": local}.get(moment, zarr_store), moment, fail)
        with pytest.raises(StoreError, match="No space left on device"):
            model.save(tmp_path / "new")
        assert not (tmp_path / "new").exists()
        with pytest.raises(StoreError, match="No space left on device"):
            model.save(saved, overwrite=True)
    assert contents(saved) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_weights_that_are_not_finite_are_refused(rows, tmp_path):
    fitted = dkfm.KernelPCA(2).fit(rows)
    fitted.model_.heads["scores"].weights[3] = np.nan
    fitted.save(tmp_path / "m")
    with pytest.raises(UnsupportedStoreError, match="not finite"):
        dkfm.load(tmp_path / "m")


def test_consolidated_metadata_are_refused(saved):
    edit(saved / "zarr.json", lambda m: m.update(consolidated_metadata={"metadata": {}}))
    with pytest.raises(UnsupportedStoreError):
        store_metadata.read_own_attributes(saved)


def test_a_store_of_another_kind_is_named_and_not_overwritten(saved, rows, tmp_path):
    dkfm.batch_score(saved, rows, tmp_path / "scores", progress=False)
    before = contents(tmp_path / "scores")
    for overwrite in (False, True):
        with pytest.raises(StoreExistsError, match="complete dkfm scores store; choose another path"):
            dkfm.KernelPCA(1).fit(rows).save(tmp_path / "scores", overwrite=overwrite)
    assert contents(tmp_path / "scores") == before


def test_a_link_to_a_model_is_not_overwritten(saved, rows, tmp_path):
    (tmp_path / "link").symlink_to(saved)
    with pytest.raises(StoreExistsError, match="is a link, which was left untouched; give the path that it points to"):
        dkfm.KernelPCA(1).fit(rows).save(tmp_path / "link", overwrite=True)
    dkfm.load(tmp_path / "link")


def test_an_exchange_that_cannot_be_undone_says_where_the_old_store_lies(saved, rows, monkeypatch):
    model, before, honest = dkfm.KernelPCA(1).fit(rows), dkfm.load(saved).transform(rows), Path.rename

    def rename(path, target):
        if path.suffix in (".partial", ".old"):
            raise OSError(5, "Input/output error")
        return honest(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(StoreError, match="could not be replaced") as caught:
        model.save(saved, overwrite=True)
    aside = str(caught.value).split("the earlier store is ")[1].rstrip(".")
    np.testing.assert_array_equal(dkfm.load(aside).transform(rows), before)


def test_a_replacement_whose_last_sync_fails_says_so_and_is_whole(saved, rows, monkeypatch):
    model, honest = dkfm.KernelPCA(1).fit(rows), zarr_store.sync_folder
    monkeypatch.setattr(
        zarr_store,
        "sync_folder",
        lambda p: (_ for _ in ()).throw(OSError(5, "EIO")) if p == saved.parent else honest(p),
    )
    with pytest.raises(StoreError, match="EIO") as caught:
        model.save(saved, overwrite=True)
    np.testing.assert_array_equal(dkfm.load(saved).transform(rows), model.transform(rows))
    assert dkfm.load(str(caught.value).split("the earlier store is ")[1].rstrip(".")).transform(rows).shape[1] > 1


def test_a_url_of_no_known_file_system_is_refused_by_name():
    with pytest.raises(StoreError, match=r"nowhere://bucket/.* is on no file system"):
        dkfm.load("nowhere://bucket/m")


def test_a_killed_writers_partial_file_is_no_part_of_a_store(saved):
    (saved / f"zarr.json.{'0' * 32}.partial").write_text("half")
    dkfm.load(saved)


def test_a_missing_chunk_reads_as_nan_and_zeros_are_written(tmp_path):
    with zarr_store.new_store(tmp_path / "s", "scores", {}, ["x"]) as group:
        zarr_store.add_array(group, "x", (4, 2), (2, 2))
    array = zarr_store.open_array(tmp_path / "s", "x", "r+")
    array[:2] = 0.0
    assert (tmp_path / "s" / "x" / "c" / "0" / "0").exists()
    assert np.isnan(array[2:]).all()


def test_a_chunk_that_cannot_be_written_leaves_nothing_and_one_in_the_wrong_place_is_not_written(tmp_path, monkeypatch):
    with zarr_store.new_store(tmp_path / "s", "scores", {}, ["x"]) as group:
        zarr_store.add_array(group, "x", (25, 2), (10, 2))
    array = tmp_path / "s" / "x"
    for place, rows in (((0, 0), 5), ((2, 0), 10), ((3, 0), 5)):
        with pytest.raises(AssertionError, match="are not chunk"):
            zarr_store.write_chunk(array, place, np.ones((rows, 2)))
    zarr_store.write_chunk(array, (2, 0), np.full((5, 2), 7.0))
    np.testing.assert_array_equal(zarr_store.open_array(tmp_path / "s", "x")[20:], np.full((5, 2), 7.0))

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="No space"):
        zarr_store.write_chunk(array, (2, 0), np.zeros((5, 2)))
    assert [path.name for path in (array / "c" / "2").iterdir()] == ["0"]
    np.testing.assert_array_equal(zarr_store.open_array(tmp_path / "s", "x")[20:], np.full((5, 2), 7.0))
