"""Start a Dask cluster on this machine."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dkfm.core import cpus
from dkfm.execution.clusters.current_client import require_dask_version, select_default_overrides
from dkfm.files import temporary_folders

if TYPE_CHECKING:
    from distributed import LocalCluster

_CLOSE_TIMEOUT = 10
"""Seconds to wait for the workers of a local cluster to close."""

_SETTINGS: dict[str, tuple[object, object]] = {
    "distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_": (65536, 2**27),
    "distributed.nanny.pre-spawn-environ.MALLOC_MMAP_THRESHOLD_": (None, 2**25),
    "distributed.nanny.pre-spawn-environ.MALLOC_ARENA_MAX": (None, 2),
    "distributed.admin.tick.interval": ("20ms", "500ms"),
    "distributed.admin.system-monitor.interval": ("500ms", "1s"),
    "distributed.worker.memory.monitor-interval": ("100ms", "250ms"),
    "distributed.worker.profile.interval": ("10ms", "100ms"),
}
"""Settings as pairs of Dask's default and ours.

On two cores, Dask's defaults cost 5 % of the time for returning memory to the system after each use, and 2.5 % for
frequent monitoring.
"""


@contextmanager
def local_cluster() -> Iterator["LocalCluster"]:
    """Start a cluster of one worker process with a thread for each core; it listens only on loopback."""
    require_dask_version()
    import dask
    from distributed import LocalCluster

    from dkfm.execution.clusters.worker_plugins import SilenceClosingWorker

    with (
        temporary_folders.open_temporary_folder("cluster") as folder,
        # The scheduler needs it too, and LocalCluster has no parameter for it.
        dask.config.set({"temporary-directory": str(folder), **select_default_overrides(_SETTINGS)}),
        LocalCluster(
            n_workers=1,
            threads_per_worker=cpus.COUNT,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
            plugins=(SilenceClosingWorker(),),
        ) as cluster,
    ):
        try:
            yield cluster
        finally:
            # Retire the workers first; otherwise they log errors about a missing scheduler.
            cluster.scale(0)
            deadline = time.monotonic() + _CLOSE_TIMEOUT
            while cluster.scheduler_info["workers"] and time.monotonic() < deadline:
                time.sleep(0.02)
