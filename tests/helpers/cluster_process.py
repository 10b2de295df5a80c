"""A scheduler and a worker in processes of their own, because an open cluster changes the configuration of Dask."""

import os
import subprocess
import sys
from contextlib import contextmanager

SCRIPT = """
from dkfm.execution.clusters.local import local_cluster

if __name__ == "__main__":
    with local_cluster() as cluster:
        print(cluster.scheduler_address, flush=True)
        input()
"""


@contextmanager
def start_cluster(folder):
    """Start a cluster with this process's environment, and yield its address. Workers can import what tests define."""
    script = folder / "cluster.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, script], **pipes, text=True, env=environment) as started:
        yield started.stdout.readline().strip()
        started.stdin.write("end\n")
        started.stdin.close()
        assert started.wait(60) == 0
