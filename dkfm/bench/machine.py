"""What a figure was measured on: processor, threads, versions."""

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distributed import Client

_LIBRARIES = ("numpy", "scipy", "scikit-learn", "dask", "distributed", "zarr")


def describe_machine(client: "Client") -> dict[str, str | int]:
    """Return the facts of this machine and of a cluster; jobs on it compute with one BLAS thread a task."""
    from dask.system import CPU_COUNT

    threads = client.nthreads()
    return {
        "cpu": _processor(),
        "cores": os.cpu_count() or 1,
        "workers": len(threads),
        "dask_threads": sum(threads.values()),
        "blas_threads_per_task": 1,
        "pool_threads": CPU_COUNT,
        "blas": _blas(),
        "python": platform.python_version(),
        **{name: version(name) for name in _LIBRARIES},
    }


def _processor() -> str:
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _blas() -> str:
    """Name every BLAS of this process, and the threads that fits have."""
    import scipy.linalg  # noqa: F401  # SciPy brings a BLAS of its own
    from threadpoolctl import threadpool_info

    found = [library for library in threadpool_info() if library["user_api"] == "blas"]
    words = [
        f"{b['internal_api']} {b['version']} {b.get('architecture', '')}, {b['num_threads']} threads" for b in found
    ]
    return "; ".join(dict.fromkeys(words))
