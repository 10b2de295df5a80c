"""CPUs and memory are counted as Dask counts them, whatever the limits of a container are."""

import os
from pathlib import Path

import dask.system
import distributed.system
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dkfm.core import cpus
from dkfm.execution import memory
from dkfm.files import process_records
from helpers.versions import needs_dask_2026_3

QUOTAS = {
    "/sys/fs/cgroup/cpuacct,cpu/cpu.cfs_quota_us": 0,
    "/sys/fs/cgroup/cpuacct,cpu/cpu.cfs_period_us": 1,
    "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": 0,
    "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": 1,
}
LIMITS = [
    "memory/memory.limit_in_bytes",
    "memory/memory.soft_limit_in_bytes",
    *(f"memory.{name}" for name in ("max", "high", "low")),
]
NUMBERS = st.sampled_from(["-1", "max", "50000", "100000", "100001", "1000000", ""])
SIZES = st.sampled_from(["max", "", "0", "-1", "1000000", "123456789", str(2**60), str(2**63 - 1)])


def serve(patch, files):
    """Let files of the system have other contents, or not exist, for all who open them."""
    import builtins
    import io

    honest, honest_text = builtins.open, Path.read_text

    def read(path):
        path = str(path)
        if path.startswith("/sys/fs/cgroup") or path == "/proc/self/cgroup":
            if path not in files:
                raise FileNotFoundError(path)
            return files[path]
        return None

    def opened(path, *arguments, **options):
        text = read(path)
        return honest(path, *arguments, **options) if text is None else io.StringIO(text)

    def read_text(path, *arguments, **options):
        text = read(path)
        return honest_text(path, *arguments, **options) if text is None else text

    patch.setattr(builtins, "open", opened)
    patch.setattr(Path, "read_text", read_text)


@pytest.mark.slow
@needs_dask_2026_3("Dask reads the limits of the group of the process itself alone")
@settings(max_examples=300)
@given(
    old=st.dictionaries(st.sampled_from(sorted(QUOTAS)), NUMBERS),
    group=st.sampled_from(["0::/", "0::/user.slice/job", "1:cpu:/a\n0::/b/", ""]),
    new=st.none() | st.tuples(NUMBERS, NUMBERS).map(" ".join),
)
def test_cpus_are_as_many_as_dask_counts(old, group, new):
    files = {**old, "/proc/self/cgroup": group + "\n"}
    name = group.split(":")[-1]
    if new is not None:
        files[f"/sys/fs/cgroup{name}{'' if name.endswith('/') else '/'}cpu.max"] = new
    with pytest.MonkeyPatch.context() as patch:
        serve(patch, files)
        patch.setattr("os.sched_getaffinity", lambda _: range(7))
        patch.setattr(psutil.Process, "cpu_affinity", lambda _: list(range(7)))
        patch.setattr("os.process_cpu_count", lambda: 7, raising=False)
        assert cpus.count_cpus() == dask.system.cpu_count()


@pytest.mark.slow
@settings(max_examples=300)
@given(
    limits=st.dictionaries(st.sampled_from(LIMITS), SIZES),
    resident=st.sampled_from([-1, 0, 1000, 10**9, 2**62]),
)
def test_the_limit_of_memory_is_that_of_dask(limits, resident):
    with pytest.MonkeyPatch.context() as patch:
        serve(patch, {f"/sys/fs/cgroup/{name}": text for name, text in limits.items()})
        patch.setattr("resource.getrlimit", lambda _: (resident, resident))
        assert memory.memory_limit.__wrapped__() == distributed.system.memory_limit()


def test_what_was_counted_at_the_import_is_what_dask_counted():
    assert cpus.COUNT == dask.system.CPU_COUNT


def test_the_name_of_a_process_may_end_within_a_character():
    """As that of a long script: Linux keeps 15 bytes of it."""
    name = Path("/proc/self/comm")
    before = name.read_bytes().rstrip(b"\n") if name.exists() else None
    try:
        if before is not None:
            name.write_bytes("Berechnungs-größe".encode())
        assert process_records._start_time(os.getpid()) is not None
        assert memory.peak_memory() > 0
    finally:
        if before is not None:
            name.write_bytes(before)
