"""A scheduler and a worker in processes of their own, because an open cluster changes the configuration of Dask."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

SCRIPT = """
import os
import sys

from dkfm.execution.clusters.local import local_cluster

if __name__ == "__main__":
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # workers may print
    with local_cluster() as cluster:
        print(cluster.scheduler_address, file=answer, flush=True)
        sys.stdin.read()
"""


@contextmanager
def start_cluster(folder):
    """Start a cluster that imports from where this process does, and has its environment; yield its address."""
    script = folder / "cluster.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, script], **pipes, env=environment, start_new_session=True) as started:
        try:
            address = started.stdout.readline().decode().strip()
            assert address, "the cluster did not start"
            yield address
            started.stdin.close()
            assert started.wait(60) == 0
        finally:
            if started.poll() is None:
                os.killpg(started.pid, signal.SIGKILL)
