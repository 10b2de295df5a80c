"""Start a Dask cluster whose workers are Slurm jobs, described by a YAML file; the scheduler runs in this process.

Other nodes must reach the scheduler, so it does not listen on loopback only, and a client that connects can run code.
Therefore all connections use TLS with certificates made for one run. Dashboards listen only on loopback. A job that
ends, by `scancel` or with its node, is replaced by a new one. All jobs are cancelled at the end.
"""

import logging
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dkfm.errors import ClusterError, MissingExtraError, StoreError, extract_reason
from dkfm.execution.clusters.current_client import select_default_overrides
from dkfm.execution.clusters.slurm_config import SlurmSpec, merge_dask_config, read_slurm_file
from dkfm.files import temporary_folders

if TYPE_CHECKING:
    from distributed import Security, SpecCluster

_MAX_INTERRUPTIONS = 5
"""Number of interruptions that `_close` survives; Slurm signals each process of a job, and a shell may repeat it."""

_SETTINGS: dict[str, tuple[object, object]] = {
    "distributed.scheduler.allowed-failures": (3, 10),
    "distributed.adaptive.target-duration": ("5s", "1s"),
    "jobqueue.slurm.processes": (None, 1),
}
"""Settings as pairs of Dask's default and ours.

A task is not blamed for preempted nodes; three tasks per thread are enough to request more workers; and a job has one
process, whose threads share a model.
"""


@contextmanager
def slurm_cluster(path: str) -> "Iterator[tuple[SpecCluster, float]]":
    """Start a cluster whose workers are jobs of Slurm; cancel them at the end, after errors too.

    Parameters
    ----------
    path : str
        A YAML file of Dask's configuration, in force while the cluster exists. Its section `jobqueue.slurm` describes
        one job, with the keys of dask-jobqueue. Its section `dkfm` says how many jobs there are: `jobs`, or
        `minimum-jobs` and `maximum-jobs` for a number that follows the work; and how long to `wait` for the first.

    Yields
    ------
    cluster : distributed.SpecCluster
        A cluster whose first jobs are in the queue.
    wait : float
        Seconds to wait for the first worker, as the file says; 3,600 by default.

    Raises
    ------
    InvalidInputError
        The file cannot be read or has entries that are not valid.
    ClusterError
        Slurm is not installed here, or rejects the job.
    MissingExtraError
        dask-jobqueue or cryptography is not installed.

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

    cluster_class, certificates = _import_cluster_class_and_security()
    with dask.config.set(select_default_overrides(_SETTINGS)):
        settings, shared_folder = merge_dask_config(spec)
    with (
        dask.config.set(settings),
        _write_certificates(certificates, shared_folder) as security,
        _open_cluster(cluster_class, spec, security) as cluster,
    ):
        yield cluster, spec.first_worker_timeout_seconds


def _import_cluster_class_and_security() -> "tuple[type[SpecCluster], Security]":
    """Return the cluster class of dask-jobqueue and new certificates; raise a MissingExtraError without the extra."""
    from distributed import Security

    before = signal.getsignal(signal.SIGINT)
    try:
        from dkfm.execution.clusters.slurm_job_classes import SlurmCluster

        return SlurmCluster, Security.temporary()
    except ImportError as error:
        message = "Slurm needs dask-jobqueue and cryptography; install them with pip install 'dkfm[slurm]'."
        raise MissingExtraError(message) from error
    except ValueError as error:
        raise ClusterError(
            f"A cluster of Slurm's is started in the main thread of a program: {extract_reason(error)}."
        ) from None
    finally:
        # The import replaces the handler of Ctrl-C by one that ends the program as if it had succeeded.
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)


@contextmanager
def _write_certificates(certificates: "Security", shared_folder: Path) -> Iterator["Security"]:
    """Write certificates into a folder that workers of this user can read, and nobody else."""
    from distributed import Security

    with ExitStack() as stack:
        try:
            folder = stack.enter_context(temporary_folders.open_temporary_folder("slurm", shared_folder, hidden=True))
        except StoreError as error:
            message = f"Certificates for workers cannot be written there: {extract_reason(error)}"
            raise ClusterError(f"{message}; name another shared-temp-directory.") from None
        texts = certificates.get_tls_config_for_role("worker")
        files = {field: folder / field for field in ("ca_file", "cert", "key")}
        for field, file in files.items():
            file.touch(mode=0o600)
            file.write_text(texts[field])
        roles = ("client", "scheduler", "worker")
        fields = {f"tls_{role}_{field}": str(files[field]) for role in roles for field in ("cert", "key")}
        yield Security(require_encryption=True, tls_ca_file=str(files["ca_file"]), **fields)


@contextmanager
def _open_cluster(cluster_class: "type[SpecCluster]", spec: SlurmSpec, security: "Security") -> Iterator["SpecCluster"]:
    """Start the scheduler in this process, submit the first jobs, and replace jobs that end."""
    try:
        # Errors are reported in one sentence; the scheduler's own logs would add tracebacks.
        cluster = cluster_class(security=security, silence_logs="critical")
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise ClusterError(f"The cluster of {spec.path} does not start: {extract_reason(error)}.") from None
    try:
        for _ in range(spec.min_jobs):
            cluster.worker_spec.update(cluster.new_worker_spec())
        try:
            cluster.sync(_wait_for_submission, cluster)
        except (OSError, RuntimeError, ValueError) as error:
            answer = extract_reason(RuntimeError(" ".join(str(error).rpartition("stderr:")[2].split())))
            raise ClusterError(f"Slurm does not take the job that {spec.path} describes: {answer}.") from None
        # A fixed number of jobs also uses `adapt`, because it replaces jobs that end.
        cluster.adapt(minimum_jobs=spec.min_jobs, maximum_jobs=spec.max_jobs)
        yield cluster
    finally:
        _close(cluster)


async def _wait_for_submission(cluster: "SpecCluster") -> None:
    await cluster


def is_no_late_connection(record: logging.LogRecord) -> bool:
    """Return False for a log record with the traceback of a worker that connects while the scheduler closes."""
    return "non-started" not in str(record.exc_info[1] if record.exc_info else "")


def _close(cluster: "SpecCluster") -> None:
    """Cancel all jobs; raise an interruption only after that is done."""
    logging.getLogger("tornado.application").addFilter(is_no_late_connection)
    interruption: BaseException | None = None
    is_started, closing = threading.Lock(), Future[object]()

    def close_once() -> None:
        if is_started.acquire(blocking=False):
            try:
                closing.set_result(cluster.close())
            except BaseException as error:  # whatever it is, `closing.result()` raises it
                closing.set_exception(error)

    # In another thread: an interruption in this one would leave the cancellation unfinished.
    with ThreadPoolExecutor(1, thread_name_prefix="dkfm-slurm") as pool:
        for _ in range(_MAX_INTERRUPTIONS):
            try:
                pool.submit(close_once)  # again after each interruption, because one may prevent that this is done
                closing.result()
                break
            except (KeyboardInterrupt, SystemExit) as error:
                interruption = error
    if interruption is not None:
        raise interruption
