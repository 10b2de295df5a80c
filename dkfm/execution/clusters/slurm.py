"""Workers as jobs of Slurm's queue, described in a YAML file; the scheduler is a part of the driver's process.

Everything between them goes over TLS, with certificates made for the one run: other nodes must reach the scheduler, so
it listens off loopback, and whoever is let in can run code. Dashboards listen on loopback alone. A worker's job that
ends, be it by `scancel` or with its node, is replaced by a new one; all of them are cancelled at the end.
"""

import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dkfm.errors import ClusterError, MissingExtraError, StoreError, reason
from dkfm.execution.clusters.slurm_config import SlurmSpec, merge_configuration, read_slurm_file
from dkfm.files import temporary

if TYPE_CHECKING:
    from distributed import Security, SpecCluster

_INTERRUPTIONS = 5
"""That the end of a cluster outlasts: Slurm tells all processes of a driver's job to end, and its shell does so too."""

_FITTING: dict[str, tuple[object, object]] = {
    "distributed.scheduler.allowed-failures": (3, 10),
    "distributed.adaptive.target-duration": ("5s", "1s"),
    "jobqueue.slurm.processes": (None, 1),
}
"""Dask's defaults, and ours. A task is not blamed where nodes are taken from under it; a window of three tasks a thread
is enough to ask for more workers; and the threads of one process share one model.
"""


@contextmanager
def slurm_cluster(path: str) -> "Iterator[tuple[SpecCluster, float]]":
    """Start a cluster whose workers are jobs of Slurm's queue; at the end they are cancelled, after errors too.

    Parameters
    ----------
    path : str
        A YAML file of Dask's configuration, in force as long as the cluster is: `jobqueue.slurm` says what one job
        is, as dask-jobqueue has it. Its section `dkfm` says how many there are, `jobs`, or `minimum-jobs` and
        `maximum-jobs` between which they are as many as there is work for, and for how long to `wait` for the first.

    Yields
    ------
    cluster : distributed.SpecCluster
        Its first jobs are in the queue.
    wait : float
        Seconds that the first worker has to come, as the file says; 3,600 where it does not.

    Raises
    ------
    InvalidInputError
        The file cannot be used.
    ClusterError
        Slurm is not here, or takes no such job.
    MissingExtraError
        Without dask-jobqueue or cryptography.

    Examples
    --------
    >>> with slurm_cluster("none.yaml") as (cluster, wait):
    ...     print(cluster.scheduler_address)
    Traceback (most recent call last):
    dkfm.errors.InvalidInputError: none.yaml cannot be read: No such file or directory.
    """
    spec = read_slurm_file(path)
    if shutil.which("sbatch") is None:
        raise ClusterError("Slurm's sbatch is not on the PATH here; run dkfm on a node of the cluster, or in a job.")
    import dask

    cluster_class, made = _required()
    fitting = {key: ours for key, (default, ours) in _FITTING.items() if dask.config.get(key, None) == default}
    with dask.config.set(fitting):
        settings, place = merge_configuration(spec)
    with (
        dask.config.set(settings),
        _stored(made, place) as security,
        _started(cluster_class, spec, security) as cluster,
    ):
        yield cluster, spec.wait


def _required() -> "tuple[type[SpecCluster], Security]":
    """Return dask-jobqueue's cluster and new certificates; raise a MissingExtraError where either is not to be had."""
    from distributed import Security

    before = signal.getsignal(signal.SIGINT)
    try:
        from dkfm.execution.clusters.slurm_jobqueue import SlurmCluster

        return SlurmCluster, Security.temporary()
    except ImportError as error:
        message = "Slurm needs dask-jobqueue and cryptography; install them with pip install 'dkfm[slurm]'."
        raise MissingExtraError(message) from error
    except ValueError as error:
        raise ClusterError(
            f"A cluster of Slurm's is started in the main thread of a program: {reason(error)}."
        ) from None
    finally:
        # Its import takes Ctrl-C away from the program: it would end as if all were done.
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)


@contextmanager
def _stored(made: "Security", place: Path) -> Iterator["Security"]:
    """Write certificates where workers of this user read them, and nobody else."""
    from distributed import Security

    with ExitStack() as stack:
        try:
            folder = stack.enter_context(temporary.temporary_folder("slurm", place, hidden=True))
        except StoreError as error:
            message = f"Certificates for workers cannot be written there: {reason(error)}"
            raise ClusterError(f"{message}; name another shared-temp-directory.") from None
        texts = made.get_tls_config_for_role("worker")
        files = {field: folder / field for field in ("ca_file", "cert", "key")}
        for field, file in files.items():
            file.touch(mode=0o600)
            file.write_text(texts[field])
        roles = ("client", "scheduler", "worker")
        fields = {f"tls_{role}_{field}": str(files[field]) for role in roles for field in ("cert", "key")}
        yield Security(require_encryption=True, tls_ca_file=str(files["ca_file"]), **fields)


@contextmanager
def _started(cluster_class: "type[SpecCluster]", spec: SlurmSpec, security: "Security") -> Iterator["SpecCluster"]:
    """Start the scheduler here, submit the first jobs, and replace those that end."""
    try:
        # What goes wrong is told in one sentence; the scheduler's own words on it are tracebacks.
        cluster = cluster_class(security=security, silence_logs="critical")
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise ClusterError(f"The cluster of {spec.path} does not start: {reason(error)}.") from None
    try:
        for _ in range(spec.minimum):
            cluster.worker_spec.update(cluster.new_worker_spec())
        try:
            cluster.sync(_submitted, cluster)
        except (OSError, RuntimeError, ValueError) as error:
            said = RuntimeError(" ".join(str(error).rpartition("stderr:")[2].split()))
            raise ClusterError(f"Slurm does not take the job that {spec.path} describes: {reason(said)}.") from None
        # Also where their number is fixed: it is what sees that one is missing.
        cluster.adapt(minimum_jobs=spec.minimum, maximum_jobs=spec.maximum)
        yield cluster
    finally:
        _close(cluster)


async def _submitted(cluster: "SpecCluster") -> None:
    await cluster


def _close(cluster: "SpecCluster") -> None:
    """Cancel all jobs; an interruption is put off until that is done."""
    interruption: BaseException | None = None
    # In a thread of its own, since what is interrupted in this one would not be taken up again.
    with ThreadPoolExecutor(1, thread_name_prefix="dkfm-slurm") as pool:
        closing = pool.submit(cluster.close)
        for _ in range(_INTERRUPTIONS):
            try:
                closing.result()
                break
            except (KeyboardInterrupt, SystemExit) as error:
                interruption = error
    if interruption is not None:
        raise interruption
