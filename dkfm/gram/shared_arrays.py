"""Share arrays with the tasks of an executor: in memory with threads, or through files on a cluster."""

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dkfm.core import budget
from dkfm.core.rows import Rows
from dkfm.execution import memory, worker_checks
from dkfm.execution.executors import Executor
from dkfm.execution.job_input import write_rows
from dkfm.execution.worker_checks import WorkerRequirements
from dkfm.files import local, temporary_folders
from dkfm.sources.base import NamedColumns, Source
from dkfm.sources.memory import MemorySource
from dkfm.storage.output_files import LocalOutput


@dataclass(frozen=True)
class SharedArrays:
    """Share arrays with tasks; `open_shared_arrays` creates an instance."""

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
        source = write_rows(rows, path)
        try:
            yield source
        finally:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextmanager
def open_shared_arrays(
    executor: Executor,
    task_bytes: int,
    need: int,
    what: str,
    workspace: str | Path | None,
    source: Source | None = None,
) -> Iterator[SharedArrays]:
    """Yield an object that shares arrays with tasks; on a cluster, exclude workers that do not see the folder.

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
        Folder in which to create the temporary folder; by default the system's.
    source : Source, optional
        Input that the tasks read and every worker must see.

    Raises
    ------
    BudgetError
        A worker has too little memory for a task, or the disk has too little space for the arrays.
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
        requirements = make_worker_requirements(folder, source, task_bytes)
        with worker_checks.exclude_unfit_with_probe(executor, requirements):
            yield SharedArrays(folder, requirements)


def make_worker_requirements(root: Path, source: Source | None, task_bytes: int) -> WorkerRequirements:
    """Return the requirements of tile tasks on a worker: access to the store and to the rows, and memory."""
    probe, stamp = local.hidden_sibling(root / "workers", "partial").name, "" if source is None else source.stamp()
    versions = worker_checks.local_versions(tables=isinstance(source, NamedColumns))
    return WorkerRequirements(LocalOutput(root), probe, probe.encode(), versions, task_bytes, 0, source, stamp)
