"""Keep the state of a long fit in a workspace, so that a killed fit can resume.

A state is a JSON file with a digest, and the .npy files that it names, with their digests. The JSON file is replaced
atomically after the arrays are on disk, so a kill leaves either the previous or the new state. Files that a kill leaves
behind are removed by the next state or at the end of the fit.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from dkfm.core.chunking import row_slices
from dkfm.core.rows import Array
from dkfm.errors import DkfmError, UnsupportedStoreError
from dkfm.execution.stage_log import log_stage
from dkfm.files import local
from dkfm.kernels import serialization
from dkfm.kernels.base import Kernel
from dkfm.numerics.eigensolvers.lanczos import LanczosState
from dkfm.sources.base import NamedColumns, Source, digest_rows
from dkfm.sources.blocks import BlockRows
from dkfm.sources.npy import NpySource, load_npy, write_npy
from dkfm.storage.json_reading import read_json
from dkfm.storage.model_store import compute_sha256

AnyArray = npt.NDArray[np.generic]

_STATE, _LOCK = "state.json", "lock"
_ARRAY_NAME = re.compile(r"[a-z]+(-[0-9]+)?-[0-9a-f]{16}\.npy")
_READ_ROWS = 2**16
"""Number of rows of an array that are read at a time."""

_FORMAT = 3
"""Version of the content of a state, which is a part of its identity."""


class Checkpoint:
    """State of a fit in a folder of a workspace; `open_checkpoint` creates one.

    Parameters
    ----------
    folder : Path, optional
        Folder of the state; without one, nothing is kept.
    identity : mapping
        JSON values that identify the fit; the state of another fit is not read.

    Attributes
    ----------
    numbers : mapping
        Numbers of the state that was found; empty if there is none.
    """

    def __init__(self, folder: Path | None, identity: Mapping[str, object]) -> None:
        self._folder, self._identity = folder, identity
        self._files: dict[str, dict[str, str]] = {}
        self.numbers: Mapping[str, float] = {}
        if folder is not None:
            with suppress(DkfmError, KeyError, TypeError, AttributeError):  # no state, or a damaged one
                self._read(folder)

    def _read(self, folder: Path) -> None:
        stored = read_json(folder / _STATE)
        content = cast("dict[str, object]", stored["content"])
        files = cast("dict[str, dict[str, str]]", content["arrays"])
        is_ours = stored["sha256"] == _digest(content) and content["identity"] == self._identity
        if is_ours and all(_is_intact(folder, **file) for file in files.values()):
            self._files, self.numbers = files, cast("dict[str, float]", content["numbers"])

    def load_array(self, name: str) -> AnyArray:
        """Read an array of the state."""
        return load_npy(self._array_path(name))

    def read_into(self, columns: Array, name: str) -> int:
        """Read an array (n, p) of the state into the first columns (n, c), some rows at a time; return p."""
        source = NpySource.open(self._array_path(name))
        for rows in row_slices(source.shape[0], _READ_ROWS):
            columns[rows, : source.shape[1]] = source.read(rows)
        return source.shape[1]

    def _array_path(self, name: str) -> Path:
        return cast("Path", self._folder) / self._files[name]["name"]

    def save(self, numbers: Mapping[str, float], arrays: Mapping[str, AnyArray], kept: Collection[str] = ()) -> None:
        """Replace the state by numbers and arrays; `kept` names arrays of the previous state that stay."""
        if self._folder is None:
            return
        before, files = self._files, {name: self._files[name] for name in kept}
        is_committing = False
        try:
            for name, array in arrays.items():
                files[name] = _write_array(self._folder, name, array)
            content = {"identity": self._identity, "numbers": numbers, "arrays": files}
            with local.new_file(self._folder / _STATE, self._folder) as new:
                new.file.write(json.dumps({"content": content, "sha256": _digest(content)}).encode())
                is_committing = True
                new.commit()
        except BaseException:
            if not is_committing:  # afterwards either state may be the current one, and the arrays of both stay
                _remove_others(self._folder, before)  # free space, because the disk may be full
            raise
        self._files = files
        _remove_others(self._folder, files)


NO_CHECKPOINT = Checkpoint(None, {})
"""Checkpoint that keeps nothing."""


def _digest(content: Mapping[str, object]) -> str:
    """Return the digest of JSON values; it does not change if they are written and read."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _write_array(folder: Path, name: str, array: AnyArray) -> dict[str, str]:
    """Write an array durably to a file; return its name and digest."""
    path = folder / f"{name}-{os.urandom(8).hex()}.npy"
    with local.new_file(path, folder) as new:
        write_npy(new.file, array)
        new.commit()
    return {"name": path.name, "sha256": compute_sha256(path)}


def _is_intact(folder: Path, name: str, sha256: str) -> bool:
    return Path(name).name == name and compute_sha256(folder / name) == sha256


def _remove_others(folder: Path, files: Mapping[str, Mapping[str, str]]) -> None:
    """Remove the files of dkfm in a folder, except those of a state."""
    names = {file["name"] for file in files.values()}
    with suppress(OSError):  # files that stay are removed at the end of the fit
        for path in folder.iterdir():
            if path.name not in names and _is_own(path):
                path.unlink()


def _is_own(path: Path) -> bool:
    """Return whether a file of a folder is an array of a state, or a part of a file that was not finished."""
    return bool(_ARRAY_NAME.fullmatch(path.name) or local.is_partial(path.name)) and not path.is_dir()


@contextmanager
def keep_states_until_end() -> Iterator[None]:
    """Keep the states of fits until this context ends, and also afterwards if it fails.

    A caller uses it if work, such as saving the model, follows the fit. In nested contexts, the outer one counts.
    """
    if _ends.get() is not None:
        yield
        return
    with ExitStack() as stack:
        try:
            _ends.set(stack)
            yield
        finally:
            _ends.set(None)


_ends: ContextVar[ExitStack | None] = ContextVar("dkfm_checkpoints", default=None)


@contextmanager
def open_checkpoint(
    workspace: str | Path | None, kind: str, kernel: Kernel, source: Source, parameters: Mapping[str, object]
) -> Iterator[Checkpoint]:
    """Yield the state of a fit in a workspace, which is removed when the fit ends and stays when it fails.

    The fit ends with this context, or with that of `keep_states_until_end`. Nothing is kept without a workspace, for a
    kernel with user functions, whose code cannot be compared, or while another process runs the same fit.

    Parameters
    ----------
    workspace : str or Path, optional
        Folder in which the state has a folder of its own.
    kind : str
        First part of the name of that folder.
    kernel : Kernel
        Kernel of the fit.
    source : Source
        Training rows.
    parameters : mapping
        Everything else that the state depends on, as texts and numbers.

    Raises
    ------
    UnsupportedStoreError
        The folder of the state is a link.
    """
    if workspace is None or not serialization.is_code_free(kernel):
        yield NO_CHECKPOINT
        return
    content = {"kernel": serialization.to_config(kernel), "rows": _make_rows_identity(source), **parameters}
    text = json.dumps({"format": _FORMAT, **content}, sort_keys=True, default=lambda number: number.item())
    identity, digest = json.loads(text), hashlib.sha256(text.encode()).hexdigest()
    folder = local.make_folder(local.as_local_path(workspace)).absolute() / f"{kind}-{digest[:16]}"
    with ExitStack() as own:
        if not (_ends.get() or own).enter_context(_locked_folder(folder)):
            log_stage("checkpoint", f"nothing is kept: {folder} is that of another process, or cannot be locked")
            yield NO_CHECKPOINT
            return
        checkpoint = Checkpoint(folder, identity)
        if checkpoint.numbers:
            counts = {what: int(checkpoint.numbers.get(what, 0)) for what in ("products", "pivots")}
            done = "".join(f" after {count:,} {what}," for what, count in counts.items() if count)
            log_stage("checkpoint", f"the fit goes on{done} from its state in {folder}")
        yield checkpoint


def _make_rows_identity(source: Source) -> list[object]:
    """Return what identifies the rows of a source: a digest of values, or location, columns and time of change."""
    columns = list(source.columns) if isinstance(source, NamedColumns) else None
    if source.location is None:
        return [digest_rows(source), columns, source.shape]
    if isinstance(source, BlockRows):  # a copy in a temporary folder
        return [source.content_digest, columns, source.shape]
    return [str(source.location), source.stamp(include_ctime=True), columns, source.shape]


@contextmanager
def _locked_folder(folder: Path) -> Iterator[bool]:
    """Create a folder and lock it for this process; remove it at the end unless an error leaves a state in it.

    Yield False, and do nothing, if another process holds the lock or the file system has no locks.
    """
    descriptor = _lock(folder)
    if descriptor is None:
        yield False
        return
    is_done = False
    try:
        yield True
        is_done = True
    finally:
        if is_done or not (folder / _STATE).exists():
            _remove(folder)  # only once, because another process may then create a folder of the same name
        os.close(descriptor)


def _lock(folder: Path) -> int | None:
    """Return a descriptor of the locked file in a folder, which is created unless it exists; None without the lock."""
    with local.translate_write_errors(folder):
        while True:
            folder.mkdir(exist_ok=True)
            if folder.is_symlink():
                raise UnsupportedStoreError(f"{folder} is a link, and a state is not kept behind one.")
            try:
                descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except FileNotFoundError:  # the process that held the folder has just removed it
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(descriptor), (folder / _LOCK).stat()):
                    return descriptor
            except FileNotFoundError:  # as above
                pass
            except OSError:  # another process holds the lock, or the file system has no locks
                os.close(descriptor)
                return None
            os.close(descriptor)


def _remove(folder: Path) -> None:
    """Remove a folder that this process has locked; other processes see all of it under its name, or nothing.

    Files that dkfm did not write stay where they are.
    """
    with suppress(OSError):
        found = list(folder.iterdir())
        own = [path for path in found if path.name in (_STATE, _LOCK) or _is_own(path)]
        if len(own) < len(found):
            for path in sorted(own, key=lambda path: (path.name != _STATE, path.name == _LOCK)):  # the lock goes last
                path.unlink()
            return
        aside = local.hidden_sibling(folder, "removed")
        folder.rename(aside)
        shutil.rmtree(aside)
    for left in folder.parent.glob(f".{folder.name}.*.removed"):  # of a process that was killed
        shutil.rmtree(left, ignore_errors=True)


class LanczosCheckpoint:
    """Keep the steps of Lanczos in a checkpoint: each adds a block of columns to the basis.

    Parameters
    ----------
    checkpoint : Checkpoint
        Checkpoint in which the steps are kept.

    Attributes
    ----------
    capacity : int
        Capacity of the basis in columns. A resumed fit keeps it, because it determines when the basis is restarted.
    means : ndarray of shape (N,), optional
        Means of the rows of the Gram matrix, whose computation costs a product; set before the first step.
    """

    def __init__(self, checkpoint: Checkpoint, capacity: int) -> None:
        self._checkpoint, self._blocks = checkpoint, int(checkpoint.numbers.get("blocks", 0))
        self.capacity = int(checkpoint.numbers.get("capacity", capacity))
        self.means = self._load("means") if checkpoint.numbers else None
        self._keeps_means = self.means is not None

    def _load(self, name: str) -> Array:
        return cast("Array", self._checkpoint.load_array(name))

    def load(self, basis: Array) -> LanczosState | None:
        """Return the state that was found, if any; its basis is written to the first columns of `basis` (n, c)."""
        numbers, count = self._checkpoint.numbers, 0
        if not numbers:
            return None
        for number in range(self._blocks):
            count += self._checkpoint.read_into(basis[:, count:], f"basis-{number}")
        products, next_test = int(numbers["products"]), int(numbers["next_test"])
        projected, block = self._load("projected"), self._load("block")
        return LanczosState(basis[:, :count], projected, block, products, next_test, float(numbers["lowest"]))

    def save(self, state: LanczosState, first_new: int) -> None:
        """Keep a state whose basis has new columns from `first_new` on."""
        self._blocks = self._blocks if first_new else 0
        kept = [f"basis-{number}" for number in range(self._blocks)]
        arrays = {"projected": state.projected, "block": state.block}
        if self._keeps_means:
            kept.append("means")
        elif self.means is not None:
            arrays["means"] = self.means
        if state.basis.shape[1] > first_new:
            arrays[f"basis-{self._blocks}"] = state.basis[:, first_new:]
            self._blocks += 1
        numbers = {"products": state.n_products, "next_test": state.next_test, "lowest": state.lowest}
        numbers |= {"blocks": self._blocks, "capacity": self.capacity}
        self._checkpoint.save(numbers, arrays, kept)
        self._keeps_means = self.means is not None
