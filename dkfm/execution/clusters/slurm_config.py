"""The YAML file of a cluster of Slurm's: Dask's configuration and a section of dkfm's own, read and checked."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dkfm.errors import InvalidInputError, reason, shown
from dkfm.files.local import read_plain

_WAIT = "1h"
"""For the first worker, where the file says nothing: queues are long."""

_MAX_SPEC, _MAX_NODES = 2**16, 2**14
"""Bytes of a file, and values in it once what its aliases repeat is written out."""

_OURS = ("jobs", "minimum-jobs", "maximum-jobs", "wait")
"""What the file's section `dkfm` may have; the rest of the file is Dask's."""

_COUNTS = ("cores", "processes", "job-cpu")
_LISTS = ("worker-extra-args", "job-extra-directives", "job-script-prologue", "job-directives-skip")
_TEXTS = ("memory", "walltime", "job-mem", "local-directory", "shared-temp-directory", "log-directory", "interface")

_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True)
class SlurmSpec:
    """A file that was read and checked: how many jobs, how long to wait for a worker, and Dask's configuration."""

    path: Path
    minimum: int
    maximum: int
    wait: float
    settings: dict[str, Any]


def read_slurm_file(path: str) -> SlurmSpec:
    """Read and check a file; only what dask-jobqueue knows of jobs is left to check."""
    try:
        content = _parsed(read_plain(path, _MAX_SPEC))
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" in line {mark.line + 1}"
        said = getattr(error, "problem", None) or reason(error)
        raise InvalidInputError(f"{path} is no YAML{where}: {said}.") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise InvalidInputError(f"{path} must be a file of Dask's configuration, with sections jobqueue and dkfm.")
    ours = {} if content.get("dkfm") is None else content["dkfm"]
    if not isinstance(ours, dict) or not set(ours) <= set(_OURS):
        raise InvalidInputError(f"dkfm of {path} must be a section of {', '.join(_OURS)}, not {shown(ours)}.")
    if "jobs" in ours and not {"minimum-jobs", "maximum-jobs"}.isdisjoint(ours):
        raise InvalidInputError(f"dkfm of {path} has jobs, or minimum-jobs and maximum-jobs, not both.")
    # None at all would never become one: the driver asks what its workers can hold before it has work for them.
    minimum = _count(path, "dkfm", ours, "jobs" if "jobs" in ours else "minimum-jobs", 1)
    maximum = _count(path, "dkfm", ours, "maximum-jobs", minimum)
    if maximum < minimum:
        raise InvalidInputError(f"dkfm of {path} has minimum-jobs {minimum}, more than maximum-jobs {maximum}.")
    settings = {key: value for key, value in content.items() if key != "dkfm"}
    return SlurmSpec(Path(path), minimum, maximum, _seconds(path, ours.get("wait", _WAIT)), settings)


def _parsed(data: bytes) -> Any:
    """Return what a file holds, once it is seen that its aliases do not multiply it."""
    node = yaml.compose(data, yaml.SafeLoader)
    if node is not None and _nodes(node, {}) > _MAX_NODES:
        raise ValueError(f"it has more than {_MAX_NODES} values")
    return yaml.safe_load(data)


def _nodes(node: yaml.Node, counted: dict[int, int]) -> int:
    """Return the values in a node, repeated ones counted as often as they stand there."""
    if id(node) not in counted:
        counted[id(node)] = _MAX_NODES + 1  # of one that holds itself
        parts = node.value if isinstance(node, yaml.CollectionNode) else []
        inner = [part for entry in parts for part in (entry if isinstance(entry, tuple) else (entry,))]
        counted[id(node)] = 1 + sum(_nodes(part, counted) for part in inner)
    return counted[id(node)]


def _count(path: str | Path, section: str, holder: dict[str, Any], key: str, default: int) -> int:
    value = holder.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidInputError(f"{key} in {section} of {path} must be a whole number from 1 on, not {shown(value)}.")
    return value


def _seconds(path: str, value: object) -> float:
    from dask.utils import parse_timedelta

    try:
        seconds = float(parse_timedelta(value)) if isinstance(value, str | int | float) else math.nan
    except (ValueError, KeyError):
        seconds = math.nan
    if isinstance(value, bool) or not 0 < seconds < math.inf:
        raise InvalidInputError(f"wait in dkfm of {path} must be a time, as 90m or 2h, not {shown(value)}.")
    return seconds


def merge_configuration(spec: SlurmSpec) -> tuple[dict[str, Any], Path]:
    """Return Dask's whole configuration with the file's in it, and the folder where workers find their certificates."""
    import dask

    known = set(dask.config.get("jobqueue.slurm"))
    everything: dict[str, Any] = dask.config.merge(dask.config.config, spec.settings)
    queues = everything["jobqueue"]
    job = queues.get("slurm") if isinstance(queues, dict) else None
    if not isinstance(job, dict):
        raise InvalidInputError(f"jobqueue in {spec.path} must have a section slurm that says what a job is.")
    if unknown := sorted(map(str, set(job) - known)):
        raise InvalidInputError(f"jobqueue.slurm of {spec.path} has {', '.join(unknown)}, unknown to dask-jobqueue.")
    _require_job(spec.path, job)
    # Of a worker too, whose pages ask nobody for a certificate; what the file says comes after it, and stands.
    job["worker-extra-args"] = ["--dashboard-address", "127.0.0.1:0", *job["worker-extra-args"]]
    job["scheduler-options"] = _private(spec.path, job["scheduler-options"])
    shared = job["shared-temp-directory"]
    place = spec.path.parent if shared is None else Path(os.path.expandvars(shared)).expanduser()
    if not place.is_dir():
        raise InvalidInputError(f"shared-temp-directory of {spec.path} must be a folder that is there, not {place}.")
    return everything, place.resolve()


def _require_job(path: Path, job: dict[str, Any]) -> None:
    """Raise an InvalidInputError unless this says what a job is."""
    from dask.utils import parse_bytes

    for key in _COUNTS:
        _count(path, "jobqueue.slurm", job, key, 1)
    for key in _LISTS:
        if not isinstance(job[key], list) or not all(isinstance(item, str) for item in job[key]):
            raise InvalidInputError(
                f"{key} in jobqueue.slurm of {path} must be a list of texts, not {shown(job[key])}."
            )
    for key in _TEXTS:
        if not isinstance(job[key], str | None):
            # YAML reads 12:00:00 as a number of seconds, which Slurm would take for minutes.
            remedy = "; put it in quotes" if key == "walltime" else ""
            raise InvalidInputError(f"{key} in jobqueue.slurm of {path} must be a text, not {shown(job[key])}{remedy}.")
    if job["cores"] is None or job["memory"] is None:
        raise InvalidInputError(f"jobqueue.slurm of {path} must have cores and memory: those of one job.")
    try:
        parse_bytes(job["memory"])
    except ValueError:
        raise InvalidInputError(
            f"memory in jobqueue.slurm of {path} must be as 16GB, not {shown(job['memory'])}."
        ) from None


def _private(path: Path, options: object) -> dict[str, Any]:
    """Return options of a scheduler that lets in nobody else; raise an InvalidInputError where it would."""
    where = f"scheduler-options in jobqueue.slurm of {path}"
    if not isinstance(options, dict):
        raise InvalidInputError(f"{where} must be a section, not {shown(options)}.")
    if refused := sorted({"protocol", "security"}.intersection(options)):
        raise InvalidInputError(f"{where} must not have {', '.join(refused)}: dkfm uses TLS, and makes certificates.")
    address = str(options.get("dashboard_address", "127.0.0.1:0"))
    if address.rpartition(":")[0] not in _LOOPBACK:
        raise InvalidInputError(
            f"dashboard_address in {where} must be on loopback, as 127.0.0.1:8787, not {address}; ssh -L leads there."
        )
    return {**options, "dashboard_address": address}
