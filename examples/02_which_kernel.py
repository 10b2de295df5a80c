"""
Which kernel?
=============

Rank, condition and accuracy of ten kernels on handwritten digits. See how a Gaussian that is far too narrow has full
rank and no accuracy. The picture shows the accuracy of each.
"""

import sys

import numpy as np
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from sklearn.linear_model import RidgeClassifierCV

from dkfm import ExactFeatureMap
from dkfm.kernels import Affine, ChiSquared, Gaussian, Laplacian, Linear, Matern, Polynomial

KERNELS = {
    "plain inner products": Linear(),
    "products of 9 pixels": Polynomial(9, scale=1 / 64),
    "the same, pixels moved to [-1, 1]": Polynomial(9, scale=1 / 128, offset=0.5).warp(Affine(2, -1)),
    "Gaussian, far too narrow": Gaussian(0.1),
    "Gaussian, median distance": Gaussian("median"),
    "Gaussian, far too wide": Gaussian(1000.0),
    "Matern, rougher": Matern(1.5, "median"),
    "Laplacian": Laplacian(10.0),
    "chi-squared, of histograms": ChiSquared(1.0),
    "a sum": Gaussian("median") + 0.5 * Polynomial(3, scale=1 / 64),
}


def main(rows: int = 1000) -> None:
    """Fit each kernel to some digits and tell the others by a linear model of the features."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order] / 16, labels[order]
    train, test = images[:rows], images[rows:]
    accuracies = []
    print(f"{'kernel':<35}{'rank':>6}{'condition':>12}{'k(x, x)':>22}{'accuracy':>10}")
    for name, kernel in KERNELS.items():
        phi = ExactFeatureMap(kernel, basis="spectral").fit(train)
        similarity = phi.kernel_.diag(train)
        ridge = RidgeClassifierCV(similarity.mean() * np.logspace(-8, 1, 10)).fit(phi.transform(train), labels[:rows])
        accuracies.append(ridge.score(phi.transform(test), labels[rows:]))
        span = f"{similarity.min():.1e} to {similarity.max():.1e}"
        print(f"{name:<35}{phi.rank_:>6}{phi.condition_:>12.1e}{span:>22}{accuracies[-1]:>10.3f}")
    axes = plt.figure(figsize=(7, 4), layout="constrained").add_subplot(xlabel="share of new digits that are right")
    axes.barh(list(KERNELS), accuracies)
    axes.invert_yaxis()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
