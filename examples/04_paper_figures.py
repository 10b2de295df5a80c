"""
The paper's figures
===================

t-SNE of the feature spaces of two polynomial kernels, and their Fisher discriminants (figures 1 to 4). See how the
second kernel separates the digits that the first one mixes.
"""

import gzip
import os
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
from sklearn.datasets import fetch_openml, load_digits
from sklearn.metrics import silhouette_score

import dkfm
from dkfm import plotting, tsne
from dkfm.kernels import Affine, Polynomial

SHOWN = (2, 4, 7)


def digits(folder: Path) -> tuple[str, np.ndarray, np.ndarray]:
    """Return images (n, d), pixels in [0, 1], and labels: MNIST of DKFM_MNIST or OpenML, else scikit-learn's digits."""
    if mnist := os.environ.get("DKFM_MNIST"):
        images = gzip.decompress((Path(mnist) / "t10k-images-idx3-ubyte.gz").read_bytes())
        labels = gzip.decompress((Path(mnist) / "t10k-labels-idx1-ubyte.gz").read_bytes())
        pixels = np.frombuffer(images, np.uint8, offset=16).reshape(-1, 784)
        return "MNIST", pixels / 255, np.frombuffer(labels, np.uint8, offset=8)
    try:
        with warnings.catch_warnings(action="ignore"):  # of a network that does not answer
            asked = {"return_X_y": True, "as_frame": False, "data_home": folder, "n_retries": 1, "delay": 0.1}
            pixels, names = fetch_openml("mnist_784", **asked)
        return "MNIST", pixels / 255, names.astype(np.uint8)
    except (OSError, ValueError) as error:  # no network, or no answer
        print(f"MNIST is neither in DKFM_MNIST nor on OpenML ({error}); these are scikit-learn's digits instead.")
    pixels, names = load_digits(return_X_y=True)
    return "scikit-learn's digits", pixels / 16, names


def main(per_digit: int = 500, folder: str | None = None) -> None:
    """Train on some images of each digit, and draw others, as many."""
    from matplotlib import pyplot as plt

    where = Path(folder or tempfile.mkdtemp())
    name, images, labels = digits(where)
    of_each = [np.flatnonzero(labels == digit) for digit in SHOWN]
    cuts = [min(per_digit, 3 * len(numbers) // 5) for numbers in of_each]
    train = np.concatenate([numbers[:cut] for numbers, cut in zip(of_each, cuts, strict=True)])
    test = np.concatenate([numbers[cut : cut + per_digit] for numbers, cut in zip(of_each, cuts, strict=True)])
    X, y, Z, truth = images[train], labels[train], images[test], labels[test]
    d = images.shape[1]
    paper = {  # eqs. (27) and (29)
        "k1": Polynomial(9, scale=1 / d),
        "k2": Polynomial(9, scale=1 / (2 * d), offset=0.5).warp(Affine(2, -1)),
    }
    print(f"{name}: {len(X)} images of {SHOWN} to learn from, {len(Z)} others")
    figure = plt.figure(figsize=(10, 9), layout="constrained")
    panels = figure.subplots(2, 2)
    for column, (kernel_name, kernel) in enumerate(paper.items()):
        phi = dkfm.ExactFeatureMap(kernel, basis="spectral").fit(X)
        places = tsne.embed(phi.transform(X), phi.transform(Z)).test
        fisher = dkfm.KernelFisher(kernel=kernel, shrinkage=1e-3).fit(X, y)
        scores = fisher.transform(Z)
        for panel, points, title in (
            (panels[0, column], places, f"{kernel_name}: t-SNE of the feature space"),
            (panels[1, column], scores, f"{kernel_name}: Fisher discriminants"),
        ):
            plotting.components(points, truth, ax=panel).set(title=title, xlabel="", ylabel="")
        print(
            f"{kernel_name}  accuracy {fisher.score(Z, truth):.3f}, silhouette {silhouette_score(scores, truth):.2f} "
            f"of the Fisher discriminants; silhouette of t-SNE {silhouette_score(places, truth):.2f}"
        )
    figure.savefig(where / "paper_figures.png", dpi=120)
    print(f"picture {where / 'paper_figures.png'}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:3])
