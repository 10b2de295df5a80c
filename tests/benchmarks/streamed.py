"""Full features of more landmarks than a worker's memory holds the weights of: read from the store, column by column.

    python tests/benchmarks/streamed.py [--quick]

Fits N = 20,000 rows of 10 columns in the cholesky basis (weights of 3.2 GB), and scores 2,000 more in a worker process
that is held to 2 GB. Prints the largest difference from `transform` in this process, as a share of what rounding
allows, the peak of the worker, and the time beside that of `transform`. --quick: N = 7,000 (390 MB) in 600 MB.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

import dkfm
from dkfm import kernels
from dkfm.execution import memory


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rows")
    quick = parser.parse_args().quick
    n, rows, limit = (7_000, 500, "600MB") if quick else (20_000, 2_000, "2GB")
    from distributed import Client, LocalCluster

    rng = np.random.default_rng(0)
    X, Z = rng.normal(size=(n, 10)), rng.normal(size=(rows, 10))
    start = time.perf_counter()
    phi = dkfm.ExactFeatureMap(kernels.Gaussian(2.0), basis="cholesky").fit(X)
    seconds = time.perf_counter() - start
    print(f"N = {n:,}: fitted in {seconds:.0f} s, rank {phi.rank_:,}, certificate {phi.certificate_}", flush=True)
    start = time.perf_counter()
    expected = phi.transform(Z)
    here = time.perf_counter() - start
    with tempfile.TemporaryDirectory(prefix="dkfm-streamed-") as folder:
        model, out = Path(folder) / "model", Path(folder) / "scores.zarr"
        phi.save(model)
        cluster = LocalCluster(
            n_workers=1, threads_per_worker=2, memory_limit=limit, host="127.0.0.1", dashboard_address=None
        )
        with cluster, Client(cluster) as client:
            report = dkfm.batch_score(model, Z, out, client=client, progress=False)
            peak = max(client.run(memory.peak_memory).values())
        found = dkfm.open_scores(out).compute(scheduler="synchronous")
    values, W = np.abs(phi.kernel_(Z, phi.model_.original_landmarks)), np.abs(phi.model_.heads["features"].weights)
    allowed = 64 * np.finfo(float).eps * (values @ W)
    print(f"{report.rows:,} rows in {report.chunks} tasks: {report.seconds:.0f} s beside {here:.0f} s in this process")
    print(f"differences are {np.max(np.abs(found - expected) / allowed):.3f} of what rounding allows, at most")
    print(f"peak of the worker {peak / 1e6:,.0f} MB of {limit}")


if __name__ == "__main__":
    main()
