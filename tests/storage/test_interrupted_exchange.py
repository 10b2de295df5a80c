"""Ctrl-C while one store takes the place of another leaves one of them whole at the path, and nothing beside it."""

from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from dkfm.errors import StoreError
from dkfm.storage import zarr_store


def put(path, text, **options):
    with zarr_store.new_store(path, "gram", {"text": text}, [], **options):
        pass


def told(path):
    return zarr_store.require_own_attributes(path)["text"]


@contextmanager
def interrupted_rename(monkeypatch, number, late):
    """Press Ctrl-C before the rename of that number, or right after it where it is late."""
    rename, seen = Path.rename, []

    def interrupted(self, target):
        seen.append(self)
        if len(seen) == number and not late:
            raise KeyboardInterrupt
        done = rename(self, target)
        if len(seen) == number:
            raise KeyboardInterrupt
        return done

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(Path, "rename", interrupted)
        yield


@pytest.mark.parametrize("number", range(1, 5))
@pytest.mark.parametrize("late", [False, True])
def test_an_interruption_at_any_rename_leaves_a_store_at_the_path(tmp_path, monkeypatch, number, late):
    path = tmp_path / "store"
    put(path, "old")
    with interrupted_rename(monkeypatch, number, late):
        put(path, "new", overwrite=True)
    assert told(path) in ("old", "new")
    assert list(tmp_path.iterdir()) == [path]


def test_the_renames_are_on_the_disk_before_the_earlier_store_goes(tmp_path, monkeypatch):
    put(tmp_path / "store", "old")
    steps, sync, remove = [], zarr_store.sync_folder, zarr_store._remove_renamed_store
    monkeypatch.setattr(zarr_store, "sync_folder", lambda path: steps.append(path.name) or sync(path))
    monkeypatch.setattr(zarr_store, "_remove_renamed_store", lambda *given: steps.append("removed") or remove(*given))
    put(tmp_path / "store", "new", overwrite=True)
    assert steps[-3:] == [tmp_path.name, "removed", tmp_path.name]


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("late", [False, True])
def test_an_interrupted_removal_leaves_the_store_or_nothing(tmp_path, monkeypatch, number, late):
    path = tmp_path / "store"
    put(path, "old")
    with interrupted_rename(monkeypatch, number, late):
        zarr_store.remove_own_store(path, "gram")
    assert [found for found in tmp_path.iterdir() if found != path] == []


def test_a_new_store_that_vanishes_before_its_rename_leaves_the_old_one(tmp_path, monkeypatch):
    path, rename = tmp_path / "store", Path.rename
    put(path, "old")

    def vanishing(self, target):
        if self.suffix == ".partial":
            raise FileNotFoundError(2, "No such file or directory")
        for beside in tmp_path.glob(".dkfm-partial-*/*.partial"):
            rename(beside, tmp_path / "elsewhere")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", vanishing)
    with pytest.raises(StoreError):
        put(path, "new", overwrite=True)
    assert told(path) == "old"
