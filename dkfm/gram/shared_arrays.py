"""Share arrays with the tasks of an executor: in memory with threads, by files that workers see on a cluster."""

import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dkfm.core import budget
from dkfm.core.rows import Array, Rows
from dkfm.execution import memory, worker_checks
from dkfm.execution.executors import Executor
from dkfm.execution.worker_checks import WorkerRequirements
from dkfm.files import local, temporary_folders
from dkfm.sources.base import NamedColumns, Source
from dkfm.sources.memory import MemorySource
from dkfm.sources.npy import NpySource, save_npy
from dkfm.sources.zarr import CsrCopySource
from dkfm.storage import csr, zarr_store
from dkfm.storage.output_files import LocalOutput


@dataclass(frozen=True)
class SharedArrays:
    """Give arrays to tasks; `open_shared_arrays` makes one."""

    folder: Path | None = None
    """Folder that workers see; None if the tasks run in this process."""
    requirements: WorkerRequirements | None = None
    """What a worker must meet; None in this process."""

    @contextmanager
    def share(self, rows: Rows) -> Iterator[Source]:
        """Yield rows where the tasks read them; a file of them is removed at the end."""
        if self.folder is None:
            yield MemorySource(rows)
            return
        path = self.folder / uuid.uuid4().hex
        source = _write_dense(rows, path) if isinstance(rows, np.ndarray) else _write_sparse(rows, path)
        try:
            yield source
        finally:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _write_dense(rows: Array, path: Path) -> Source:
    with local.translate_write_errors(path):
        save_npy(path, rows)
    return NpySource.open(path)


def _write_sparse(rows: Rows, root: Path) -> Source:
    source = MemorySource(rows)
    names = csr.array_names("rows")
    with local.translate_write_errors(root), zarr_store.new_store(root, "rows", {}, names) as group:
        csr.write_csr(group, "rows", rows)  # type: ignore[arg-type]  # CSR
    return CsrCopySource(root, source.shape, source.float64s_per_row, source.max_nnz_per_row_window, "rows")


@contextmanager
def open_shared_arrays(
    executor: Executor,
    task_bytes: int,
    need: int,
    what: str,
    workspace: str | Path | None,
    source: Source | None = None,
) -> Iterator[SharedArrays]:
    """Yield what shares arrays with tasks; on a cluster, leave workers aside that do not see the folder.

    Parameters
    ----------
    executor : Executor
        Runs the tasks.
    task_bytes : int
        Memory of a task, in bytes.
    need : int
        Size of the arrays on disk, in bytes.
    what : str
        Name of the arrays in messages.
    workspace : str or Path, optional
        Folder in which the temporary one is; by default that of the system.
    source : Source, optional
        Input that the tasks read and every worker must see.

    Raises
    ------
    BudgetError
        A worker has no memory for a task, or the disk no room for the arrays.
    UnfitWorkerError
        No worker sees the folder.
    """
    if executor.client is None:
        yield SharedArrays()
        return
    have = memory.task_budget(executor.client, executor.threads, needed=task_bytes)
    remedy = "use a smaller tile_rows, or fewer threads, or more memory"
    budget.require_fits(task_bytes, have, "A tile", remedy)
    parent = None if workspace is None else local.make_folder(local.as_local_path(workspace))
    with temporary_folders.open_temporary_folder("products", parent, need=need, what=what) as folder:
        probe = local.hidden_sibling(folder / "workers", "partial").name
        stamp, versions = "" if source is None else source.stamp(), _read_package_versions(source)
        requirements = WorkerRequirements(
            LocalOutput(folder), probe, probe.encode(), versions, task_bytes, 0, source, stamp
        )
        with worker_checks.exclude_unfit_with_probe(executor, requirements):
            yield SharedArrays(folder, requirements)


def _read_package_versions(source: Source | None) -> Mapping[str, str | None]:
    return worker_checks.local_versions(tables=isinstance(source, NamedColumns))
