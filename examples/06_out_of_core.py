"""
Training out of core
====================

Write the features of 200,000 rows to disk once, and train models with ``partial_fit`` on one chunk after another. See a
linear model learn a chessboard. The picture shows new points in the colours of their predictions.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import zarr
from sklearn.cluster import MiniBatchKMeans
from sklearn.decomposition import IncrementalPCA
from sklearn.linear_model import SGDClassifier

import dkfm

CHUNK = 10_000


def board(rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return points of a chessboard of 4 x 4 fields and their colours, which no line parts."""
    points = rng.uniform(0, 4, size=(rows, 2))
    return points, np.floor(points).sum(axis=1).astype(int) % 2


def write(folder: Path, rows: int) -> np.ndarray:
    """Write points chunk by chunk, as if they came from somewhere, and return their colours."""
    source = zarr.create_array(folder / "points.zarr", shape=(rows, 2), chunks=(CHUNK, 2), dtype="float64")
    colours = np.empty(rows, int)
    for start in range(0, rows, CHUNK):
        stop = min(start + CHUNK, rows)
        source[start:stop], colours[start:stop] = board(np.random.default_rng([0, start]), stop - start)
    return colours


def main(rows: int = 200_000) -> None:
    """Fit a map to few points, score many, and train three models on their features."""
    new, new_colours = board(np.random.default_rng(1), 5000)
    kernel = dkfm.kernels.Gaussian(0.4)
    phi = dkfm.ExactFeatureMap(kernel, landmarks="kmeans", n_landmarks=150, basis="spectral", random_state=0)
    phi.fit(board(np.random.default_rng(2), 3000)[0])
    classifier, pca = SGDClassifier(alpha=1e-5, random_state=0), IncrementalPCA(20)
    clusters = MiniBatchKMeans(16, n_init=1, random_state=0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        colours = write(folder, rows)
        report = dkfm.batch_score(phi, folder / "points.zarr", folder / "features.zarr", progress=False)
        print(f"features      {report.rows:,} x {phi.rank_}, {report.bytes / 1e6:,.0f} MB on disk")
        for block, numbers in dkfm.iter_scores(folder / "features.zarr"):
            classifier.partial_fit(block, colours[numbers], classes=[0, 1])
            clusters.partial_fit(block)
            if len(block) >= pca.n_components:  # it takes no smaller piece
                pca.partial_fit(block)
    features = phi.transform(new)
    plain = SGDClassifier(random_state=0).fit(*board(np.random.default_rng(3), 5000))
    print(f"a line        {plain.score(new, new_colours):.3f} of new points are right")
    print(f"classifier    {classifier.score(features, new_colours):.3f} of new points are right")
    print(f"components    20 of {phi.rank_} explain {pca.explained_variance_ratio_.sum():.3f} of the variance")
    print(f"clusters      {len(np.unique(clusters.predict(features)))} of 16 are in use")
    picture = dkfm.plotting.components(new, classifier.predict(features))
    picture.set(title="A chessboard, learnt out of core", xlabel="", ylabel="")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
