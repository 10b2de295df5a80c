"""
A batch job that is killed
==========================

Fit and save a model, score a file, kill the job, resume it, and read and verify the output. See that the second call
scores only the chunks that the first one did not finish. The picture shows the first two columns of the scores.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import dkfm


def begin_and_end(folder: Path) -> str:
    """Start the job as a process of its own, as at night, and tell it to end when some chunks are there."""
    command = ["dkfm", "score", "model", "rows.npy", "scores.zarr", "--chunk-rows", "2000", "--no-progress"]
    with subprocess.Popen([sys.executable, "-m", *command], cwd=folder, stderr=subprocess.PIPE, text=True) as job:
        while job.poll() is None and len(list(folder.glob("scores.zarr/scores/c/*/0"))) < 8:
            time.sleep(0.01)
        job.terminate()
        return job.communicate()[1].strip()


def main(rows: int = 400_000, folder: str | None = None) -> None:
    """Run the job in a folder, by default one that is removed at the end."""
    with tempfile.TemporaryDirectory() as temporary:
        run(Path(folder or temporary), rows)


def run(folder: Path, rows: int) -> None:
    """Run the job."""
    rng = np.random.default_rng(0)
    np.save(folder / "rows.npy", rng.normal(size=(rows, 20)))
    pca = dkfm.KernelPCA(20, kernel=dkfm.kernels.Gaussian(4.0)).fit(rng.normal(size=(1000, 20)))
    pca.save(folder / "model")

    print(f"killed      {begin_and_end(folder)}")
    try:
        dkfm.open_scores(folder / "scores.zarr")
    except dkfm.errors.StoreError as error:
        print(f"not read    {error}")

    # The same call goes on: chunks that have a receipt stay. Here on threads of this process; on a cluster it is
    # the same with client=, and with the command again.
    where = (folder / "model", folder / "rows.npy", folder / "scores.zarr")
    report = dkfm.batch_score(*where, chunk_rows=2000, progress=False)
    print(f"resumed     {report.scored_chunks} of {report.chunks} chunks, {report.rows_per_second:,.0f} rows a second")

    scores = dkfm.open_scores(folder / "scores.zarr")  # a dask array
    print(f"scores      {scores.shape}, variance of the first {float(scores[:, 0].var()):.4f}")
    dkfm.plotting.components(scores)
    found = dkfm.verify_scores(folder / "scores.zarr", folder / "rows.npy", sample=500)
    print(f"verified    {found.chunks} chunks; {found.sampled} rows anew, {found.worst:.3f} of what rounding allows")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:3])
