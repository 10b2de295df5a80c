"""What kernel PCA costs beside scikit-learn's solvers, in turn; then with a Gram matrix larger than memory.

    python tests/benchmarks/components.py [--quick]

The first part fits 20 components to N = 4,000 rows of three kinds (Gaussian), the second transforms 200 rows of 10
columns by 5 components; ratios are dkfm's time to scikit-learn's, round by round. The third fits 20 components to
20,000 rows in a process that takes 3 GB for all the memory there is, on a worker of 3 GB; it prints the peaks of both,
and how much of the solver's time reading the Gram matrix took: from the system's cache, which on a larger machine holds
it, and from the disk, as where there is no more memory (the cache is told to forget what was read).
"""

import argparse
import statistics
import subprocess
import sys
import time
from functools import partial

import numpy as np
from sklearn.datasets import make_blobs
from sklearn.decomposition import KernelPCA as Peer

from dkfm import KernelPCA

LARGE = """
import collections, os, resource, sys, tempfile, time
import numpy as np

MEMORY = 3 * 10**9
resource.setrlimit(resource.RLIMIT_RSS, (MEMORY, MEMORY))  # what Dask, and so dkfm, takes for the machine's memory

def main():
    from distributed import Client, LocalCluster
    from dkfm import KernelPCA
    from dkfm.gram import build as gram
    from dkfm.gram import stored_gram
    from dkfm.storage import raw_chunk_reader
    from dkfm.execution.memory import peak_memory

    seconds = collections.Counter()

    def timed(owner, name):
        function = getattr(owner, name)
        def run(*given, **named):
            start = time.perf_counter()
            result = function(*given, **named)
            seconds[name] += time.perf_counter() - start
            return result
        setattr(owner, name, run)

    timed(gram, "build_gram"), timed(stored_gram.StoredGram, "__matmul__")
    timed(stored_gram.raw_chunk_reader, "read_chunk_into_array")
    fill = stored_gram.raw_chunk_reader.read_chunk_into_array

    def forgetful(chunk, file, checked):
        fill(chunk, file, checked)
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)

    if sys.argv[2] == "disk":
        stored_gram.raw_chunk_reader.read_chunk_into_array = forgetful
    n = int(sys.argv[1])
    X = np.random.default_rng(0).normal(size=(n, 50))
    place = {"dashboard_address": "127.0.0.1:0", "memory_limit": MEMORY}
    with LocalCluster(n_workers=1, threads_per_worker=2, **place) as cluster, Client(cluster) as client:
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            pca = KernelPCA(20, kernel="rbf", tile_rows=min(2048, n // 2), workspace=folder).fit(X)
            whole = time.perf_counter() - start
        worker = max(client.run(peak_memory).values())
    built, products, read = seconds["build_gram"], seconds["__matmul__"], seconds["read_chunk_into_array"] / 2
    print(f"{n:,} rows, from the {sys.argv[2]}: {whole:.1f} s; the Gram matrix {built:.1f} to build and write")
    print(f"products with it {products:.1f} s, in which each of two threads read for {read:.1f} s")
    print(f"peak of the driver {peak_memory() / 1e6:,.0f} MB, of the worker {worker / 1e6:,.0f} MB; {pca.certificate_}")

if __name__ == "__main__":
    main()
"""


def seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def ratios(ours, theirs, rounds):
    pairs = [(seconds(ours), seconds(theirs)) for _ in range(rounds)]
    shares = sorted(a / b for a, b in pairs)
    times = [statistics.median(side) for side in zip(*pairs, strict=True)]
    share = f"{statistics.median(shares):.2f} ({shares[0]:.2f} to {shares[-1]:.2f})"
    return f"{times[0]:8.3f} s {times[1]:8.3f} s {share} of its time"


def kinds(n):
    rng = np.random.default_rng(0)
    yield "normal, d = 10", rng.normal(size=(n, 10)), None
    yield "normal, d = 50", rng.normal(size=(n, 50)), None
    yield "15 clusters, d = 20", make_blobs(n, 20, centers=15, random_state=0)[0], 0.01


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rows and rounds")
    quick = parser.parse_args().quick
    n, rounds = (1000, 1) if quick else (4000, 5)
    print(f"20 components of {n:,} rows: dkfm, scikit-learn, and the share; {rounds} rounds in turn")
    for name, X, gamma in kinds(n):
        ours = KernelPCA(20, kernel="rbf", gamma=gamma)
        for solver in ("dense", "arpack"):
            peer = Peer(20, kernel="rbf", gamma=gamma, eigen_solver=solver)
            print(f"{name:<22}{solver:<8}", ratios(partial(ours.fit, X), partial(peer.fit, X), rounds), flush=True)
    X = np.random.default_rng(0).normal(size=(200, 10))
    sides = [partial(cls(5, kernel="rbf").fit_transform, X) for cls in (KernelPCA, Peer)]
    for side in sides:
        side()
    print(f"{'200 rows, transformed':<30}", ratios(*sides, 5 if quick else 50))
    for place in ("cache", "disk"):
        subprocess.run([sys.executable, "-c", LARGE, "1200" if quick else "20000", place], check=True)


if __name__ == "__main__":
    main()
