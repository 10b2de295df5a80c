"""Extend dask-jobqueue's jobs: note that a job has ended, and repeat a submission that failed."""

import asyncio

from dask_jobqueue.slurm import SLURMCluster, SLURMJob
from distributed import Status

_RETRY_AFTER = 30.0
"""Seconds before a failed submission is repeated: Slurm's controller may be restarting."""


class SlurmJob(SLURMJob):
    """Run one worker as a job of Slurm."""

    async def start(self) -> None:
        """Submit the job; if that fails, remove it from the cluster later, so that the cluster submits another."""
        try:
            await super().start()  # type: ignore[no-untyped-call]  # dask-jobqueue has no types
        except (OSError, RuntimeError):
            self.status = Status.failed
            asyncio.get_running_loop().call_later(_RETRY_AFTER, self._remove_from_cluster)
            raise

    def _remove_from_cluster(self) -> None:
        cluster = getattr(self, "_cluster", lambda: None)()  # a weak reference that the cluster sets
        if cluster is not None and cluster.workers.get(self.name) is self:
            del cluster.workers[self.name]

    async def close(self) -> None:
        """Cancel the job and mark it closed: a cluster cannot close before all its jobs are."""
        await super().close()  # type: ignore[no-untyped-call]  # dask-jobqueue has no types
        self.status = Status.closed


class SlurmCluster(SLURMCluster):
    """Run workers as jobs of Slurm."""

    job_cls = SlurmJob
