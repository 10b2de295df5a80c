"""What scheduler and driver take for a task as workers grow more: tasks that do nothing, through dkfm's own window.

    python tests/benchmarks/scheduler.py [--quick] [--workers 10 100 1000] [--tasks N] [--profile]

A scheduler runs in a process of its own, and all workers, real ones of one thread each, in another; the tasks carry the
arguments of a scoring job's. Every line is of a scheduler, workers and a driver of its own. The milliseconds are those
that the scheduler's two threads, and the driver's process, worked: they do not depend on how many cores they have.
"""

import argparse
import asyncio
import cProfile
import json
import logging
import pstats
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import dask
import distributed

from dkfm.bench.bench_environment import BenchEnvironment
from dkfm.bench.calibration import measure_scheduler_seconds
from dkfm.core.display.text_tables import Table
from dkfm.execution.clusters.connect import connect
from dkfm.execution.clusters.current_client import fetch_workers
from dkfm.execution.executors import ClientExecutor
from dkfm.execution.memory import peak_memory

QUIET = {
    "distributed.admin.system-monitor.interval": "1h",
    "distributed.admin.tick.interval": "1s",
    "distributed.admin.tick.limit": "1h",
    "distributed.worker.profile.enabled": False,
    "distributed.worker.memory.monitor-interval": "1h",
}
"""What a thousand workers in one process would do all the time, and those of a cluster do on machines of their own."""

ARRIVAL = 300


@contextmanager
def process(*arguments):
    """Run a part of this in a process that ends when its standard input does."""
    started = subprocess.Popen([sys.executable, __file__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield started.stdout.readline().decode().strip()
    finally:
        started.stdin.close()
        try:
            started.wait(60)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


async def told_to_end():
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


async def scheduler():
    async with distributed.Scheduler(host="127.0.0.1", port=0, dashboard_address="127.0.0.1:0") as running:
        print(running.address, flush=True)
        await told_to_end()


async def workers(address, count, folder):
    pool = ThreadPoolExecutor(4)
    options = {
        "nthreads": 1,
        "executor": pool,
        "memory_limit": 0,
        "dashboard_address": "127.0.0.1:0",
        "local_directory": folder,
    }
    crew = [distributed.Worker(address, name=number, host="127.0.0.1", **options) for number in range(count)]
    for few in range(0, count, 50):
        await asyncio.gather(*crew[few : few + 50])
    print(count, flush=True)
    await told_to_end()
    await asyncio.gather(*(worker.close(nanny=False) for worker in crew), return_exceptions=True)


def measured(count, tasks, profile):
    """Return a line of the table."""
    profiler = cProfile.Profile()
    with (
        tempfile.TemporaryDirectory() as folder,
        process("scheduler") as address,
        process("workers", address, str(count), folder),
        connect(address, set_as_default=False, wait_for_workers=ARRIVAL) as client,
    ):
        client.wait_for_workers(count, timeout=ARRIVAL)
        empty = client.run_on_scheduler(peak_memory)
        site = BenchEnvironment(client, Path(folder), (1000,), 1)
        measure_scheduler_seconds(site, 10)
        start, worked = time.perf_counter(), time.process_time()
        if profile:
            profiler.enable()
        seconds = measure_scheduler_seconds(site, tasks)
        profiler.disable()
        wall, driver = time.perf_counter() - start, time.process_time() - worked
        peak = client.run_on_scheduler(peak_memory)
        row = {
            "workers": count,
            "tasks": tasks,
            "tasks_a_second": tasks / wall,
            "scheduler_ms_a_task": 1e3 * seconds,
            "driver_ms_a_task": 1e3 * driver / tasks,
            "scheduler_MB": peak / 1e6,
            "of_it_workers'": (peak - empty) / 1e6,
            "driver_MB": peak_memory() / 1e6,
            **looks(client),
        }
    if profile:
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("cumulative").print_stats(45)
    return row


def looks(client):
    """Return what it takes the driver to see how the workers are, as it does every two seconds."""
    executor, taken = ClientExecutor(client), {}
    for name, look in (("facts", lambda: fetch_workers(client)), ("health", executor.update_health)):
        start = time.perf_counter()
        for _ in range(5):
            look()
        taken[f"{name}_ms"] = 1e3 * (time.perf_counter() - start) / 5
    return taken


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--profile", action="store_true", help="The driver's own profile, on standard error.")
    parser.add_argument("--workers", type=int, nargs="+")
    parser.add_argument("--tasks", type=int)
    given = parser.parse_args()
    counts = given.workers or ([2, 20] if given.quick else [10, 100, 1000])
    rows = []
    for count in counts:
        tasks = given.tasks or (500 if given.quick else max(10_000, 100 * count))
        command = [sys.executable, __file__, "line", str(count), str(tasks), str(int(given.profile))]
        rows.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
        print(rows[-1], file=sys.stderr, flush=True)
    print(
        "\n".join(
            Table("Tasks that do nothing: a scheduler, its workers and a driver, each a process", rows).format_lines()
        )
    )


if __name__ == "__main__":
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # heartbeats of workers whose scheduler has ended
    part, *arguments = sys.argv[1:] or [""]
    with dask.config.set(QUIET):
        if part == "scheduler":
            asyncio.run(scheduler())
        elif part == "workers":
            asyncio.run(workers(arguments[0], int(arguments[1]), arguments[2]))
        elif part == "line":
            print(json.dumps(measured(int(arguments[0]), int(arguments[1]), arguments[2] == "1")))
        else:
            main()
