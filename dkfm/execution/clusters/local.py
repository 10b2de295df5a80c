"""A cluster of this machine, with Dask's settings for one."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dkfm.execution.clusters.client import require_dask
from dkfm.files import temporary

if TYPE_CHECKING:
    from distributed import LocalCluster

_GOODBYE = 10
"""Seconds that the workers of a local cluster have to leave it."""

_QUIET: dict[str, tuple[object, object]] = {
    "distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_": (65536, 2**27),
    "distributed.nanny.pre-spawn-environ.MALLOC_MMAP_THRESHOLD_": (None, 2**25),
    "distributed.nanny.pre-spawn-environ.MALLOC_ARENA_MAX": (None, 2),
    "distributed.admin.tick.interval": ("20ms", "500ms"),
    "distributed.admin.system-monitor.interval": ("500ms", "1s"),
    "distributed.worker.memory.monitor-interval": ("100ms", "250ms"),
    "distributed.worker.profile.interval": ("10ms", "100ms"),
}
"""Dask's defaults, and ours. Its own cost a twentieth of two cores for memory that is given back to the system between
any two uses, and a fortieth for looking at itself so often.
"""


def _quiet() -> dict[str, object]:
    """Return the settings of `_QUIET` that are Dask's defaults here: what a user has set stays."""
    import dask
    import distributed  # noqa: F401  # its defaults

    return {key: ours for key, (default, ours) in _QUIET.items() if dask.config.get(key, None) == default}


@contextmanager
def local_cluster() -> Iterator["LocalCluster"]:
    """Start a cluster on this machine: one worker process with a thread a core; it listens on loopback alone."""
    require_dask()
    import dask
    from dask.system import CPU_COUNT
    from distributed import LocalCluster

    from dkfm.execution.clusters.quiet_close import LeaveQuietly

    with (
        temporary.temporary_folder("cluster") as folder,
        # The scheduler's too, which has no parameter for it.
        dask.config.set({"temporary-directory": str(folder), **_quiet()}),
        LocalCluster(
            n_workers=1,
            threads_per_worker=CPU_COUNT,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
            plugins=(LeaveQuietly(),),
        ) as cluster,
    ):
        try:
            yield cluster
        finally:
            # A worker that is told to go says nothing of a scheduler that is gone.
            cluster.scale(0)
            deadline = time.monotonic() + _GOODBYE
            while cluster.scheduler_info["workers"] and time.monotonic() < deadline:
                time.sleep(0.02)
