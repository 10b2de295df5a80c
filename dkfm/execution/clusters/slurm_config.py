"""Read and check the YAML file of a Slurm cluster: Dask's configuration and a section `dkfm`."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dkfm.errors import InvalidInputError, extract_reason, format_value
from dkfm.files.local import read_plain

_DEFAULT_WAIT = "1h"
"""Time to wait for the first worker: queues are long."""

_MAX_FILE_BYTES = 2**16
"""Largest file that is read, in bytes."""

_MAX_NODES = 2**14
"""Largest number of values in a file after its aliases are expanded."""

_OWN_KEYS = ("jobs", "minimum-jobs", "maximum-jobs", "wait")
"""Keys of the section `dkfm`; all other sections belong to Dask."""

_COUNTS = ("cores", "processes", "job-cpu")
_LISTS = ("worker-extra-args", "job-extra-directives", "job-script-prologue", "job-directives-skip")
_TEXTS = ("memory", "walltime", "job-mem", "local-directory", "shared-temp-directory", "log-directory", "interface")

_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True)
class SlurmSpec:
    """Content of a checked file."""

    path: Path
    """The file."""
    min_jobs: int
    """Smallest number of jobs."""
    max_jobs: int
    """Largest number of jobs."""
    first_worker_timeout_seconds: float
    """Seconds to wait for the first worker."""
    dask_config: dict[str, Any]
    """Dask's configuration in the file."""


def read_slurm_file(path: str) -> SlurmSpec:
    """Read a file and check everything but the section that describes a job: see `merge_dask_config`."""
    try:
        content = _parse(read_plain(path, _MAX_FILE_BYTES))
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" in line {mark.line + 1}"
        problem = getattr(error, "problem", None) or extract_reason(error)
        raise InvalidInputError(f"{path} is no YAML{where}: {problem}.") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise InvalidInputError(f"{path} must be a file of Dask's configuration, with sections jobqueue and dkfm.")
    own = {} if content.get("dkfm") is None else content["dkfm"]
    if not isinstance(own, dict) or not set(own) <= set(_OWN_KEYS):
        raise InvalidInputError(f"dkfm of {path} must be a section of {', '.join(_OWN_KEYS)}, not {format_value(own)}.")
    if "jobs" in own and not {"minimum-jobs", "maximum-jobs"}.isdisjoint(own):
        raise InvalidInputError(f"dkfm of {path} has jobs, or minimum-jobs and maximum-jobs, not both.")
    # At least one job, because the driver asks for the memory of a worker before it submits tasks.
    minimum = _count(path, "dkfm", own, "jobs" if "jobs" in own else "minimum-jobs", 1)
    maximum = _count(path, "dkfm", own, "maximum-jobs", minimum)
    if maximum < minimum:
        raise InvalidInputError(f"dkfm of {path} has minimum-jobs {minimum}, more than maximum-jobs {maximum}.")
    settings = {key: value for key, value in content.items() if key != "dkfm"}
    return SlurmSpec(Path(path), minimum, maximum, _seconds(path, own.get("wait", _DEFAULT_WAIT)), settings)


def _parse(data: bytes) -> Any:
    """Return the content of a file; raise a ValueError if its aliases expand to too many values."""
    node = yaml.compose(data, yaml.SafeLoader)
    if node is not None and _count_yaml_nodes(node, {}) > _MAX_NODES:
        raise ValueError(f"it has more than {_MAX_NODES} values")
    return yaml.safe_load(data)


def _count_yaml_nodes(node: yaml.Node, counted: dict[int, int]) -> int:
    """Return the number of values in a node, with every alias counted as a copy."""
    if id(node) not in counted:
        counted[id(node)] = _MAX_NODES + 1  # for a node that contains itself
        parts = node.value if isinstance(node, yaml.CollectionNode) else []
        inner = [part for entry in parts for part in (entry if isinstance(entry, tuple) else (entry,))]
        counted[id(node)] = 1 + sum(_count_yaml_nodes(part, counted) for part in inner)
    return counted[id(node)]


def _count(path: str | Path, section: str, holder: dict[str, Any], key: str, default: int) -> int:
    value = holder.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidInputError(
            f"{key} in {section} of {path} must be a whole number from 1 on, not {format_value(value)}."
        )
    return value


def _seconds(path: str, value: object) -> float:
    from dask.utils import parse_timedelta

    try:
        seconds = float(parse_timedelta(value)) if isinstance(value, str | int | float) else math.nan
    except (ValueError, KeyError):
        seconds = math.nan
    if isinstance(value, bool) or not 0 < seconds < math.inf:
        raise InvalidInputError(f"wait in dkfm of {path} must be a time, as 90m or 2h, not {format_value(value)}.")
    return seconds


def merge_dask_config(spec: SlurmSpec) -> tuple[dict[str, Any], Path]:
    """Return Dask's configuration merged with the file's, and the folder for the certificates of workers."""
    import dask

    known = set(dask.config.get("jobqueue.slurm"))
    everything: dict[str, Any] = dask.config.merge(dask.config.config, spec.dask_config)
    queues = everything["jobqueue"]
    job = queues.get("slurm") if isinstance(queues, dict) else None
    if not isinstance(job, dict):
        raise InvalidInputError(f"jobqueue in {spec.path} must have a section slurm that says what a job is.")
    if unknown := sorted(map(str, set(job) - known)):
        raise InvalidInputError(f"jobqueue.slurm of {spec.path} has {', '.join(unknown)}, unknown to dask-jobqueue.")
    _require_job(spec.path, job)
    # A worker's dashboard asks for no certificate, so it listens on loopback unless the file's own arguments follow.
    job["worker-extra-args"] = ["--dashboard-address", "127.0.0.1:0", *job["worker-extra-args"]]
    job["scheduler-options"] = _secure_scheduler_options(spec.path, job["scheduler-options"])
    shared = job["shared-temp-directory"]
    folder = spec.path.parent if shared is None else Path(os.path.expandvars(shared)).expanduser()
    if not folder.is_dir():
        raise InvalidInputError(f"shared-temp-directory of {spec.path} must be a folder that is there, not {folder}.")
    return everything, folder.resolve()


def _require_job(path: Path, job: dict[str, Any]) -> None:
    """Raise an InvalidInputError unless the section describes a job."""
    from dask.utils import parse_bytes

    for key in _COUNTS:
        _count(path, "jobqueue.slurm", job, key, 1)
    where = f"in jobqueue.slurm of {path}"
    for key in _LISTS:
        if not isinstance(job[key], list) or not all(isinstance(item, str) for item in job[key]):
            raise InvalidInputError(f"{key} {where} must be a list of texts, not {format_value(job[key])}.")
    for key in _TEXTS:
        if not isinstance(job[key], str | None):
            # YAML reads 12:00:00 as a number of seconds, which Slurm would take for minutes.
            remedy = "; put it in quotes" if key == "walltime" else ""
            raise InvalidInputError(f"{key} {where} must be a text, not {format_value(job[key])}{remedy}.")
    if job["cores"] is None or job["memory"] is None:
        raise InvalidInputError(f"jobqueue.slurm of {path} must have cores and memory: those of one job.")
    try:
        parse_bytes(job["memory"])
    except ValueError:
        raise InvalidInputError(f"memory {where} must be as 16GB, not {format_value(job['memory'])}.") from None


def _secure_scheduler_options(path: Path, options: object) -> dict[str, Any]:
    """Return the options of a scheduler; raise an InvalidInputError if they would let others connect."""
    where = f"scheduler-options in jobqueue.slurm of {path}"
    if not isinstance(options, dict):
        raise InvalidInputError(f"{where} must be a section, not {format_value(options)}.")
    if refused := sorted({"protocol", "security"}.intersection(options)):
        raise InvalidInputError(f"{where} must not have {', '.join(refused)}: dkfm uses TLS, and makes certificates.")
    address = str(options.get("dashboard_address", "127.0.0.1:0"))
    if address.rpartition(":")[0] not in _LOOPBACK:
        raise InvalidInputError(
            f"dashboard_address in {where} must be on loopback, as 127.0.0.1:8787, not {address}; ssh -L leads there."
        )
    return {**options, "dashboard_address": address}
