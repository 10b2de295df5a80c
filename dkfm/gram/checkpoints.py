"""Keep the state of a long fit in a workspace, so that the same fit goes on where it was killed.

A state is a JSON file and the .npy files that it names with their digests. It is replaced in one step, after its arrays
are on disk: a kill leaves the state before or after it, and files that the next state or the end of the fit removes.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from dkfm.core.rows import Array
from dkfm.errors import DkfmError, StoreExistsError
from dkfm.execution.stage_log import log_stage
from dkfm.files import local
from dkfm.kernels import serialization
from dkfm.kernels.base import Kernel
from dkfm.numerics.eigensolvers.lanczos import LanczosState
from dkfm.sources.base import Source, digest_rows
from dkfm.sources.npy import load_npy, write_npy
from dkfm.storage.json_reading import read_json
from dkfm.storage.model_store import compute_sha256

AnyArray = npt.NDArray[np.generic]

_STATE, _LOCK = "state.json", "lock"
_FORMAT = 1
"""Version of the content, a part of its identity."""


class Checkpoint:
    """State of a fit in a folder of a workspace; `open_checkpoint` makes one.

    Parameters
    ----------
    folder : Path, optional
        Folder of the state; without one, nothing is kept.
    identity : mapping
        What the state belongs to, as JSON has it: the state of another fit is not read.

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
        content = read_json(folder / _STATE)
        files = cast("dict[str, dict[str, str]]", content["arrays"])
        is_ours = content["identity"] == self._identity
        if is_ours and all(_is_intact(folder, **file) for file in files.values()):
            self._files, self.numbers = files, cast("dict[str, float]", content["numbers"])

    def load_array(self, name: str) -> AnyArray:
        """Read an array of the state."""
        return load_npy(cast("Path", self._folder) / self._files[name]["name"])

    def save(self, numbers: Mapping[str, float], arrays: Mapping[str, AnyArray], kept: Collection[str] = ()) -> None:
        """Replace the state by numbers and arrays, and those arrays of the state before that are `kept`."""
        if self._folder is None:
            return
        files = {name: self._files[name] for name in kept}
        files |= {name: _write_array(self._folder, name, array) for name, array in arrays.items()}
        with local.new_file(self._folder / _STATE, self._folder) as new:
            new.file.write(json.dumps({"identity": self._identity, "numbers": numbers, "arrays": files}).encode())
            new.commit()
        self._files = files
        _remove_others(self._folder, {_STATE, _LOCK, *(file["name"] for file in files.values())})


NO_CHECKPOINT = Checkpoint(None, {})
"""Keeps nothing."""


def _write_array(folder: Path, name: str, array: AnyArray) -> dict[str, str]:
    """Write a file that survives a crash; return its name and digest."""
    path = folder / f"{name}-{os.urandom(8).hex()}.npy"
    with local.new_file(path, folder) as new:
        write_npy(new.file, array)
        new.commit()
    return {"name": path.name, "sha256": compute_sha256(path)}


def _is_intact(folder: Path, name: str, sha256: str) -> bool:
    return Path(name).name == name and compute_sha256(folder / name) == sha256


def _remove_others(folder: Path, names: Collection[str]) -> None:
    with suppress(OSError):  # they are removed at the end
        for path in folder.iterdir():
            if path.name not in names:
                path.unlink()


@contextmanager
def open_checkpoint(
    workspace: str | Path | None, kind: str, kernel: Kernel, source: Source, parameters: Mapping[str, object]
) -> Iterator[Checkpoint]:
    """Yield the state of a fit in a workspace, which is removed when the fit ends and stays when it fails.

    Without a workspace nothing is kept, nor for a kernel that is code, which cannot be compared with that of the state.

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
        All else that the state depends on, as JSON has it.

    Raises
    ------
    StoreExistsError
        Another process is at the same fit in this workspace.
    """
    if workspace is None or not serialization.is_code_free(kernel):
        yield NO_CHECKPOINT
        return
    rows = digest_rows(source) if source.location is None else source.stamp()
    content = {"kernel": serialization.to_config(kernel), "rows": rows, "shape": source.shape, **parameters}
    text = json.dumps({"format": _FORMAT, **content}, sort_keys=True)
    identity, digest = json.loads(text), hashlib.sha256(text.encode()).hexdigest()
    folder = local.make_folder(local.local_path(workspace)).absolute() / f"{kind}-{digest[:16]}"
    with _locked_folder(folder):
        checkpoint = Checkpoint(folder, identity)
        if checkpoint.numbers:
            log_stage("checkpoint", f"the fit goes on from its state in {folder}")
        yield checkpoint
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    """Create a folder and lock it for this process; a folder that stays empty is removed."""
    with local.translate_write_errors(folder):
        while True:
            folder.mkdir(exist_ok=True)
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                raise StoreExistsError(f"Another process is at the same fit, whose state is in {folder}.") from None
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), (folder / _LOCK).stat()):
                    break
            os.close(descriptor)  # the process that had it has just removed the folder
    try:
        yield
    finally:
        if not (folder / _STATE).exists():
            shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


class StepCheckpoint:
    """Keep the steps of Lanczos in a checkpoint: each adds a block of columns to the basis.

    Parameters
    ----------
    checkpoint : Checkpoint
        Where they are kept.

    Attributes
    ----------
    means : ndarray of shape (N,), optional
        Means of the rows of the Gram matrix, which cost a product, too; set before the first step.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint, self._blocks = checkpoint, int(checkpoint.numbers.get("blocks", 0))
        self.means = self._load("means") if checkpoint.numbers else None

    def _load(self, name: str) -> Array:
        return cast("Array", self._checkpoint.load_array(name))

    def load(self, basis: Array) -> LanczosState | None:
        """Return the state that was found, if any; its basis is written to the first columns of `basis` (n, c)."""
        numbers, count = self._checkpoint.numbers, 0
        if not numbers:
            return None
        for number in range(self._blocks):
            part = self._load(f"basis-{number}")
            basis[:, count : count + part.shape[1]] = part
            count += part.shape[1]
        products, next_test = int(numbers["products"]), int(numbers["next_test"])
        projected, block = self._load("projected"), self._load("block")
        return LanczosState(basis[:, :count], projected, block, products, next_test, float(numbers["lowest"]))

    def save(self, state: LanczosState, first_new: int) -> None:
        """Keep a state whose basis has new columns from `first_new` on."""
        kept = [f"basis-{number}" for number in range(self._blocks)] if first_new else []
        arrays = {"projected": state.projected, "block": state.block, f"basis-{len(kept)}": state.basis[:, first_new:]}
        if first_new:
            kept.append("means")
        elif self.means is not None:
            arrays["means"] = self.means
        self._blocks = len([*kept, *arrays]) - 3  # all but three are parts of the basis
        numbers = {"products": state.products, "next_test": state.next_test, "lowest": state.lowest}
        self._checkpoint.save({**numbers, "blocks": self._blocks}, arrays, kept)
