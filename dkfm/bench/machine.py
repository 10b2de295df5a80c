"""Describe the machine of a measurement: processor, threads, versions."""

import os
import platform
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from dkfm.core import cpus

if TYPE_CHECKING:
    from distributed import Client

_LIBRARIES = ("numpy", "scipy", "scikit-learn")
_CLUSTER_LIBRARIES = ("dask", "distributed", "zarr")


def describe_machine(client: "Client") -> dict[str, str | int]:
    """Return facts about this machine and a cluster, whose tasks compute with one BLAS thread each."""
    threads, process = client.nthreads(), describe_process()
    return {
        "cpu": process.pop("cpu"),
        "cores": process.pop("cores"),
        "workers": len(threads),
        "dask_threads": sum(threads.values()),
        "blas_threads_per_task": 1,
        "pool_threads": cpus.COUNT,
        **process,
        **{name: version(name) for name in _CLUSTER_LIBRARIES},
    }


def describe_process() -> dict[str, str | int]:
    """Return facts about this machine, and what computes in this process."""
    return {
        "cpu": _read_processor_name(),
        "cores": os.cpu_count() or 1,
        "blas": _describe_blas(),
        "python": platform.python_version(),
        **{name: version(name) for name in _LIBRARIES},
        **{name: version(name) if find_spec(name) else "absent" for name in ("numba", "llvmlite")},
    }


def _read_processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _describe_blas() -> str:
    """Return the name, version and number of threads of each BLAS library in this process."""
    import scipy.linalg  # noqa: F401  # SciPy loads its own BLAS
    from threadpoolctl import threadpool_info

    libraries = [library for library in threadpool_info() if library["user_api"] == "blas"]
    descriptions = [
        f"{b['internal_api']} {b['version']} {b.get('architecture', '')}, {b['num_threads']} threads" for b in libraries
    ]
    return "; ".join(dict.fromkeys(descriptions))
