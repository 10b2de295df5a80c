"""Jobs of dask-jobqueue's, mended in two places: that they ended is noted, and a submission that failed is repeated."""

import asyncio

from dask_jobqueue.slurm import SLURMCluster, SLURMJob
from distributed import Status

_AGAIN = 30.0
"""Seconds after which a submission that failed is tried again: Slurm's controller may be restarting."""


class SlurmJob(SLURMJob):
    """A worker's job in Slurm's queue."""

    async def start(self) -> None:
        """Submit it; if that fails, let the cluster forget it after a while, so that it submits another one."""
        try:
            await super().start()  # type: ignore[no-untyped-call]  # dask-jobqueue says nothing of types
        except (OSError, RuntimeError):
            self.status = Status.failed
            asyncio.get_running_loop().call_later(_AGAIN, self._forget)
            raise

    def _forget(self) -> None:
        cluster = getattr(self, "_cluster", lambda: None)()  # a weak reference, which the cluster puts there
        if cluster is not None and cluster.workers.get(self.name) is self:
            del cluster.workers[self.name]

    async def close(self) -> None:
        """Cancel it; a cluster that closes fails over a job that is not known to be closed."""
        await super().close()  # type: ignore[no-untyped-call]  # dask-jobqueue says nothing of types
        self.status = Status.closed


class SlurmCluster(SLURMCluster):
    """A cluster of such jobs."""

    job_cls = SlurmJob
