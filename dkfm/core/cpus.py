"""Count the CPUs that this process may use, as Dask does; importing Dask for it would take longer than a small job."""

import math
import os
from contextlib import suppress
from pathlib import Path

_CGROUP_V1_FOLDERS = (Path("/sys/fs/cgroup/cpuacct,cpu"), Path("/sys/fs/cgroup/cpu,cpuacct"))
"""Folders of the quota of CPU time under version 1 of cgroups; distributions name them differently."""


def count_cpus() -> int:
    """Return the smallest of the CPUs of this machine, of the affinity of this process, and of its cgroup."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _read_cgroup_quota()
    return count if quota is None else min(count, quota)


def _read_cgroup_quota() -> int | None:
    """Return the quota of CPU time of the cgroup of this process, in CPUs rounded up; None if there is none."""
    for folder in _CGROUP_V1_FOLDERS:
        with suppress(OSError, ValueError):
            return _quota_in_cpus((folder / "cpu.cfs_quota_us").read_text(), (folder / "cpu.cfs_period_us").read_text())
    with suppress(OSError, ValueError):
        group = Path("/proc/self/cgroup").read_text().strip().split(":")[-1]
        return _quota_in_cpus(*(Path("/sys/fs/cgroup") / group.lstrip("/") / "cpu.max").read_text().split(" "))
    return None


def _quota_in_cpus(quota: str, period: str) -> int | None:
    """Return a quota in CPUs, rounded up, from two texts in microseconds; None if it is not positive.

    >>> _quota_in_cpus("150000", "100000")
    2
    """
    cpus = math.ceil(int(quota) / int(period))
    return cpus if cpus > 0 else None


COUNT = count_cpus()
"""CPUs that this process may use, counted at the first import."""
