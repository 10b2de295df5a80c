"""What in a store is dkfm's own: files and folders of exact names, which its attributes tell; nothing else is removed.

Whoever writes beside them, under whatever name, keeps it.
"""

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from dkfm.errors import StoreExistsError
from dkfm.files.local import translate_write_errors
from dkfm.storage import zarr_schema

_INNER = re.compile(r"zarr\.json|c(/[0-9]+)*")
_INNER_FOLDER = re.compile(r"(c(/[0-9]+)*)?")
_HIDDEN = re.compile(r"\.?(.+)\.[0-9a-f]{32}\.partial")
"""A file that dkfm (with a dot before it) or Zarr (without its suffix) is writing."""

_WORKERS = "workers"
"""What a mark for the workers of a build is called, beside its 32 digits."""

Own = Mapping[str, object]
"""Attributes of a store."""


def foreign_name(names: Iterable[str], own: Own) -> str | None:
    """Return the first name that is not of a file which a store's own attributes tell of, if any."""
    return next((name for name in names if not _is_own(name, own)), None)


def foreign_entry(root: Path, own: Own) -> str | None:
    """Return a file, link or folder of a store that is not dkfm's, if any; what killed writers left is dkfm's."""
    for name, is_folder in _entries(root):
        if not (_is_own_folder(name, own) if is_folder else _is_own(name, own) or _is_own_hidden(name, own)):
            return name
        if (root / name).is_symlink():
            return name
    return None


def refuse_inside_store(location: object, above: object, own: Own) -> NoReturn:
    """Raise a StoreExistsError: a location lies inside a store of dkfm."""
    raise StoreExistsError(f"{location} lies inside a dkfm {own['kind']} store, {above}, which it would damage.")


def require_own_kind(
    location: object, own: Own, kind: str, *, overwrite: bool, is_complete: Callable[[], bool]
) -> None:
    """Raise a StoreExistsError unless the store at a location may be replaced, and by one of this kind."""
    if overwrite and own["kind"] == kind:
        return
    state = "a complete" if is_complete() else "an unfinished"
    remedy = " or replace it with overwrite=True (--overwrite)" if own["kind"] == kind else ""
    raise StoreExistsError(f"{location} holds {state} dkfm {own['kind']} store; choose another path{remedy}.")


def require_only_own(location: object, foreign: str | None) -> None:
    """Raise a StoreExistsError where a store holds a file that dkfm did not write."""
    if foreign is not None:
        raise StoreExistsError(f"{location} holds {foreign}, which dkfm did not write; it was left untouched.")


def remove_own_files(root: Path, own: Own) -> bool:
    """Remove what is dkfm's in a store, and its folder; return whether it is gone, or holds something else."""
    for name, is_folder in _entries(root):
        if is_folder and _is_own_folder(name, own):
            with suppress(OSError):  # not empty
                (root / name).rmdir()
        elif not is_folder and (_is_own(name, own) or _is_own_hidden(name, own)):
            with suppress(OSError):
                (root / name).unlink()
    with suppress(OSError):
        root.rmdir()
    return not root.exists()


def remove_partial_files(root: Path, own: Own, seconds: float = 0.0) -> None:
    """Remove what killed writers left in a store, where nothing was written to it for so long."""
    before = time.time() - seconds
    with translate_write_errors(root):
        for name, is_folder in _entries(root):
            if not is_folder and not _is_own(name, own) and _is_own_hidden(name, own):
                with suppress(FileNotFoundError):
                    if (root / name).lstat().st_mtime <= before:
                        (root / name).unlink()


def _entries(root: Path) -> Iterator[tuple[str, bool]]:
    """Yield the names of all that is below a folder, and whether it is a folder and no link; the inner ones first."""
    for folder, folders, names in os.walk(root, topdown=False):
        within = Path(folder).relative_to(root)
        for name in names:
            yield (within / name).as_posix(), False
        for name in folders:
            yield (within / name).as_posix(), not Path(folder, name).is_symlink()


def _arrays(own: Own) -> set[str]:
    named = own.get("arrays")
    return {str(name) for name in named} if isinstance(named, list) else set()


def _is_own(name: str, own: Own) -> bool:
    array, _, inner = name.partition("/")
    of_zarr = name == "zarr.json" or (array in _arrays(own) and _INNER.fullmatch(inner))
    of_table = own.get("form") == "parquet" and (name == zarr_schema.TABLE or zarr_schema.is_table_file_name(name))
    of_job = own.get("kind") == "scores" and array == zarr_schema.JOURNAL and zarr_schema.is_segment_name(inner)
    return bool(name == zarr_schema.MARKER or of_zarr or of_table or of_job)


def _is_own_folder(name: str, own: Own) -> bool:
    array, _, inner = name.partition("/")
    of_zarr = array in _arrays(own) and _INNER_FOLDER.fullmatch(inner)
    return bool(of_zarr or (own.get("kind") == "scores" and name == zarr_schema.JOURNAL))


def _is_own_hidden(name: str, own: Own) -> bool:
    folder, slash, last = name.rpartition("/")
    found = _HIDDEN.fullmatch(last)
    if found is None:
        return False
    meant = f"{folder}{slash}{found[1]}"
    mark = own.get("kind") == "gram" and meant == _WORKERS
    return mark or _is_own(meant, own) or _is_own(f"{meant}.json", own) or _is_own_hidden(meant, own)
