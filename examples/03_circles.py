"""
Concentric circles
==================

No line separates two rings. A plane does, after three components of a Gaussian (Beeny, figure 4). See the rings at
different heights.
"""

import sys
import tempfile
from math import sqrt
from pathlib import Path

import numpy as np
from sklearn.linear_model import LogisticRegression

import dkfm

BEENY_SIGMA = 3.0
"""Of ``exp(-|x - y|^2 / sigma^2)``, as Beeny writes the Gaussian: dkfm's sigma is smaller by the root of two."""


def circles(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return points on two rings, radius 1 and 2, a little off them, and which ring."""
    rng = np.random.default_rng(0)
    ring, angle = np.arange(rows) % 2, rng.uniform(0, 2 * np.pi, rows)
    radius = 1 + ring + rng.normal(scale=0.08, size=rows)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1), ring


def draw(points: np.ndarray, scores: np.ndarray, ring: np.ndarray, path: Path) -> None:
    """Draw the plane beside the three components."""
    from matplotlib import pyplot as plt

    figure = plt.figure(figsize=(9, 4), layout="constrained")
    plane, space = figure.add_subplot(1, 2, 1, aspect="equal"), figure.add_subplot(1, 2, 2, projection="3d")
    plane.set(title="the plane", xlabel="x", ylabel="y")
    space.set(title="three components", xlabel="1", ylabel="2", zlabel="3")
    for value in (0, 1):
        of_ring = ring == value
        plane.scatter(*points[of_ring].T, s=8, label=f"radius {1 + value}")
        space.scatter(*scores[of_ring].T, s=8)
    plane.legend(loc="center", fontsize="small", frameon=False, handletextpad=0)
    figure.savefig(path, dpi=120)


def main(rows: int = 600, folder: str | None = None) -> None:
    """Fit half of the points, and tell the ring of the other half with a line and with a plane."""
    points, ring = circles(2 * rows)
    train, test = slice(0, rows), slice(rows, None)
    pca = dkfm.KernelPCA(3, kernel=dkfm.kernels.Gaussian(BEENY_SIGMA / sqrt(2))).fit(points[train])
    scores = pca.transform(points)
    for name, columns in (("a line in the plane", points), ("a plane in three components", scores)):
        classifier = LogisticRegression(C=1e4).fit(columns[train], ring[train])
        print(f"{name:<28} {classifier.score(columns[test], ring[test]):.3f} of new points are right")
    path = Path(folder or tempfile.mkdtemp()) / "circles.png"
    draw(points, scores, ring, path)
    print(f"picture                      {path}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:3])
