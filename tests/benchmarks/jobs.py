"""What batch jobs take beside their scores: a kill and its resume, journal and receipts, a plan, and its truth.

Run it as ``python tests/benchmarks/jobs.py [--quick]``. What is compared runs in turn; figures are medians of ratios.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import numpy as np
import zarr

import dkfm
from dkfm import kernels
from dkfm.scoring import completion, receipts
from dkfm.scoring.formats import chunk_files

SCORE = [sys.executable, "-m", "dkfm", "score", "--no-progress", "--json"]


def made(folder, rows):
    """A model of N = 2,000, d = 50, 20 components, and rows for it."""
    rng = np.random.default_rng(0)
    dkfm.KernelPCA(20, kernel=kernels.Gaussian(7.0)).fit(rng.normal(size=(2000, 50))).save(folder / "model")
    np.save(folder / "rows.npy", rng.normal(size=(rows, 50)))
    return str(folder / "model"), str(folder / "rows.npy")


def undisturbed(model, rows, target):
    done = subprocess.run([*SCORE, model, rows, str(target)], capture_output=True, text=True, check=True, timeout=900)
    return json.loads(done.stdout)


def killed_half_way(model, rows, target, count):
    """Return the seconds that a run worked until it was killed, and the report of the one that finished its work."""
    driver = subprocess.Popen([*SCORE, model, rows, str(target)], stdout=subprocess.DEVNULL)
    try:
        while not (target / "zarr.json").exists():
            time.sleep(0.002)
        start = time.perf_counter()
        while sum(1 for _ in target.glob("scores/c/*/0")) < count // 2:
            time.sleep(0.01)
        worked = time.perf_counter() - start
    finally:
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
    return worked, undisturbed(model, rows, target)


def resume(folder, rows, rounds):
    """Print what a kill half-way and a resume cost, beside a run that is not disturbed.

    Start-up is what a job of a few rows takes, in a process of its own as all of them are.
    """
    model, source = made(folder, rows)
    few = folder / "few.npy"
    np.save(few, np.load(source, mmap_mode="r")[:100])
    ratios = []
    for number in range(rounds):
        start_up = undisturbed(model, str(few), folder / f"few{number}")["seconds"]
        whole = undisturbed(model, source, folder / f"whole{number}")
        worked, rest = killed_half_way(model, source, folder / f"killed{number}", whole["chunks"])
        in_flight = whole["seconds"] / whole["chunks"] * (os.cpu_count() or 1)  # a chunk a thread, which run at a time
        most = 1.05 * whole["seconds"] + in_flight
        took = worked + rest["seconds"]
        ratios.append((took / (most + start_up), took / most))
        print(
            f"{rows:,} rows: {start_up:.2f} s start-up, {whole['chunks']} chunks in {whole['seconds']:.2f} s; "
            f"{worked:.2f} s to the kill, {rest['seconds']:.2f} s after it for {rest['scored_chunks']}; "
            f"{ratios[-1][0]:.3f} of what is allowed"
        )
        for chunk in range(whole["chunks"]):
            same = {(folder / f"{kind}{number}/scores/c/{chunk}/0").read_bytes() for kind in ("whole", "killed")}
            assert len(same) == 1
    allowed, strictly = (statistics.median(ratio) for ratio in zip(*ratios, strict=True))
    print(
        f"kill and resume: {allowed:.3f} of 1.05 runs, a chunk in flight on each thread and a start-up; {strictly:.3f} "
        f"without the start-up; medians of {rounds}\n"
    )


def bare_write(self, data):
    """Write without reading back."""
    view = memoryview(data).cast("B")
    self.new.file.write(view)
    self.new.file.flush()
    self.size += len(view)
    if self.size - self._synced >= chunk_files._SYNC_BYTES:
        os.fdatasync(self.new.file.fileno())
        self._synced = self.size
    return len(view)


def time_receipts(folder, rows, rounds):
    """Print what journal and receipts cost: jobs with them and without, in turn, each as often the first."""
    paths, ratios = made(folder, rows), []
    dkfm.batch_score(*paths, folder / "first", progress=False)  # which imports what all of them need
    for number in range(rounds):
        seconds = {}
        for kind in ("with", "without") if number % 2 else ("without", "with"):
            target = folder / f"{kind}{number}"
            nothing = [
                patch.object(receipts.Journal, "flush", lambda self: None),
                patch.object(chunk_files.ReadBackWriter, "write", bare_write),
                patch.object(
                    completion,
                    "find_chunks_to_score",
                    lambda output, receipts: [n for n in range(output.n_chunks) if n not in receipts],
                ),
            ]
            for patched in nothing if kind == "without" else []:
                patched.start()
            try:
                seconds[kind] = dkfm.batch_score(*paths, target, progress=False).seconds
            finally:
                patch.stopall()
        ratios.append(seconds["with"] / seconds["without"])
    print(
        f"journal and receipts, {rows:,} rows: {statistics.median(ratios):.3f} times the time without "
        f"({min(ratios):.3f} to {max(ratios):.3f}, {rounds} rounds)\n"
    )


PLAN = """
import sys, time
import dkfm
from dkfm.execution.memory import peak_memory
start = time.perf_counter()
plan = dkfm.plan_score(sys.argv[1], sys.argv[2], sys.argv[3], chunk_rows=1000)
print(time.perf_counter() - start, peak_memory(), plan.chunks)
"""


def plan(folder, rounds):
    """Print what a plan of 10,000 chunks takes."""
    model, _ = made(folder, 1)
    array = zarr.create_array(folder / "many.zarr", shape=(10_000_000, 50), chunks=(1000, 50), dtype="f8")
    array[:100_000] = 1.0  # rows that the plan scores to predict its time
    for number in range(100, 10_000):
        chunk = folder / "many.zarr" / "c" / str(number) / "0"
        chunk.parent.mkdir(parents=True)
        chunk.touch()
    command = [sys.executable, "-c", PLAN, model, str(folder / "many.zarr"), str(folder / "out")]
    taken = []
    for _ in range(rounds):
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        seconds, peak, count = done.stdout.split()
        taken.append(float(seconds))
    print(
        f"a plan of {int(count):,} chunks, imports included: {statistics.median(taken):.2f} s "
        f"({min(taken):.2f} to {max(taken):.2f}, {rounds} rounds), driver's peak {int(peak) / 1e6:.0f} MB"
    )


def predict(folder, rounds):
    """Print the seconds of jobs that a plan predicts, as a ratio of those that they take."""
    rng = np.random.default_rng(0)
    source, train = str(folder / "rows.npy"), rng.normal(size=(1000, 10))
    np.save(source, rng.normal(size=(40_000, 10)))
    dkfm.KernelPCA(5, kernel=kernels.Gaussian(3.0)).fit(train[:300]).save(folder / "few")
    dkfm.ExactFeatureMap(kernel=kernels.Gaussian(3.0)).fit(train).save(folder / "many")
    error = {"output": ["scores", "reconstruction_error"]}
    jobs = [("few", rows, form, {}) for rows in (20, 100, 1000, None) for form in ("zarr", "parquet")]
    jobs += [("many", rows, form, {}) for rows in (100, 1000, None) for form in ("zarr", "parquet")]
    for model, rows, form, options in [*jobs, ("few", 100, "zarr", error), ("few", 1000, "parquet", error)]:
        ratios = []
        for _ in range(rounds):
            paths = str(folder / model), source, folder / f"out.{form}"
            predicted = dkfm.plan_score(*paths, chunk_rows=rows, **options).seconds
            start = time.perf_counter()
            report = dkfm.batch_score(*paths, chunk_rows=rows, progress=False, **options)
            ratios.append(predicted / (time.perf_counter() - start))
            shutil.rmtree(paths[2])
        print(
            f"{5 if model == 'few' else 1000:,} columns to {form}, {report.chunks:,} chunks of {rows or 'any'} rows"
            f"{', and errors' * bool(options)}: {statistics.median(ratios):.2f} of the seconds are predicted "
            f"({min(ratios):.2f} to {max(ratios):.2f}, {rounds} rounds)"
        )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    for measure, rounds in ((resume, 15), (time_receipts, 15)):
        with tempfile.TemporaryDirectory() as folder:
            measure(Path(folder), 200_000 if quick else 1_000_000, 1 if quick else rounds)
    with tempfile.TemporaryDirectory() as folder:
        plan(Path(folder), 1 if quick else 5)
    with tempfile.TemporaryDirectory() as folder:
        predict(Path(folder), 1 if quick else 5)


if __name__ == "__main__":
    main()
