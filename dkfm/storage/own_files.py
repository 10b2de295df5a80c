"""Identify dkfm's own files in a store by their exact names, which the attributes of the store determine.

Only dkfm's own files and folders are removed. Files that others write beside them are kept, whatever their names are.
"""

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from dkfm.errors import StoreExistsError
from dkfm.files.local import translate_write_errors
from dkfm.storage import store_metadata

_ARRAY_FILE = re.compile(r"zarr\.json|c(/[0-9]+)*")
_ARRAY_FOLDER = re.compile(r"(c(/[0-9]+)*)?")
"""Names of files, and of folders, of an array, below its own folder."""

_PARTIAL_NAME = re.compile(r"\.?(.+)\.[0-9a-f]{32}\.partial")
"""Name of a partial file: dkfm adds a dot in front of the name, and Zarr leaves out its suffix."""

_PROBE = "workers"
"""Name, without its 32 digits, of the probe file by which workers of a Gram build check that they see the store."""

Attributes = Mapping[str, object]
"""Attributes of a store, which name its kind and its arrays."""


def find_foreign_name(names: Iterable[str], attrs: Attributes) -> str | None:
    """Return the first name that is not one of dkfm's files in a store; None if all are."""
    return next((name for name in names if not _is_own(name, attrs)), None)


def find_foreign_entry(root: Path, attrs: Attributes) -> str | None:
    """Return a file, link or folder in a store that is not dkfm's; None if all are. Partial files count as dkfm's."""
    for name, is_folder in _walk(root):
        if not (_is_own_folder(name, attrs) if is_folder else _is_own(name, attrs) or _is_own_partial(name, attrs)):
            return name
        if (root / name).is_symlink():
            return name
    return None


def make_foreign_store_error(location: object) -> StoreExistsError:
    """Return the error of a location that holds something other than a dkfm store."""
    return StoreExistsError(
        f"{location} holds something that dkfm did not write there; it was left untouched: choose another location."
    )


def make_inside_store_error(location: object, enclosing_store: object, attrs: Attributes) -> StoreExistsError:
    """Return the error of a location inside a store of dkfm."""
    kind = attrs["kind"]
    return StoreExistsError(f"{location} lies inside a dkfm {kind} store, {enclosing_store}, which it would damage.")


def require_overwritable(
    location: object, attrs: Attributes, kind: str, *, overwrite: bool, is_complete: Callable[[], bool]
) -> None:
    """Raise a StoreExistsError unless `overwrite` is set and the store at a location is of the same kind."""
    if overwrite and attrs["kind"] == kind:
        return
    state = "a complete" if is_complete() else "an unfinished"
    remedy = " or replace it with overwrite=True (--overwrite)" if attrs["kind"] == kind else ""
    raise StoreExistsError(f"{location} holds {state} dkfm {attrs['kind']} store; choose another path{remedy}.")


def require_no_foreign_file(location: object, foreign: str | None) -> None:
    """Raise a StoreExistsError if a store contains a file that dkfm did not write."""
    if foreign is not None:
        raise StoreExistsError(f"{location} holds {foreign}, which dkfm did not write; it was left untouched.")


def remove_own_files(root: Path, attrs: Attributes) -> bool:
    """Remove dkfm's files in a store, and its folder if it is empty then; return whether the folder is gone."""
    for name, is_folder in _walk(root):
        if is_folder and _is_own_folder(name, attrs):
            with suppress(OSError):  # not empty
                (root / name).rmdir()
        elif not is_folder and (_is_own(name, attrs) or _is_own_partial(name, attrs)):
            with suppress(OSError):
                (root / name).unlink()
    with suppress(OSError):
        root.rmdir()
    return not root.exists()


def remove_partial_files(root: Path, attrs: Attributes, seconds: float = 0.0) -> None:
    """Remove partial files of killed writers to which nothing was written for `seconds`."""
    cutoff = time.time() - seconds
    with translate_write_errors(root):
        for name, is_folder in _walk(root):
            if not is_folder and not _is_own(name, attrs) and _is_own_partial(name, attrs):
                with suppress(FileNotFoundError):
                    if (root / name).lstat().st_mtime <= cutoff:
                        (root / name).unlink()


def _walk(root: Path) -> Iterator[tuple[str, bool]]:
    """Yield the name of each entry below a folder, and whether it is a folder and not a link; inner entries first."""
    for folder, folders, names in os.walk(root, topdown=False):
        relative = Path(folder).relative_to(root)
        for name in names:
            yield (relative / name).as_posix(), False
        for name in folders:
            yield (relative / name).as_posix(), not Path(folder, name).is_symlink()


def _array_names(attrs: Attributes) -> set[str]:
    names = attrs.get("arrays")
    return {str(name) for name in names} if isinstance(names, list) else set()


def _is_own(name: str, attrs: Attributes) -> bool:
    array, _, inner = name.partition("/")
    in_zarr = name == "zarr.json" or (array in _array_names(attrs) and _ARRAY_FILE.fullmatch(inner))
    is_table_file = name == store_metadata.TABLE_ATTRIBUTES or store_metadata.is_parquet_part_name(name)
    is_segment = array == store_metadata.JOURNAL and store_metadata.is_journal_segment_name(inner)
    in_table = attrs.get("form") == "parquet" and is_table_file
    in_journal = attrs.get("kind") == "scores" and is_segment
    return bool(name == store_metadata.MARKER or in_zarr or in_table or in_journal)


def _is_own_folder(name: str, attrs: Attributes) -> bool:
    array, _, inner = name.partition("/")
    in_zarr = array in _array_names(attrs) and _ARRAY_FOLDER.fullmatch(inner)
    return bool(in_zarr or (attrs.get("kind") == "scores" and name == store_metadata.JOURNAL))


def _is_own_partial(name: str, attrs: Attributes) -> bool:
    folder, slash, last = name.rpartition("/")
    partial = _PARTIAL_NAME.fullmatch(last)
    if partial is None:
        return False
    final = f"{folder}{slash}{partial[1]}"
    is_probe = attrs.get("kind") == "gram" and final == _PROBE
    return is_probe or _is_own(final, attrs) or _is_own(f"{final}.json", attrs) or _is_own_partial(final, attrs)
