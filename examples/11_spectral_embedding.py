"""
Spectral embedding
==================

Compute a spectral embedding as kernel principal components of a degree-normalized kernel, so that new points can be
embedded too. See the difference from a full decomposition. The picture shows the new points in the colours of their
sides.
"""

import sys

import numpy as np
from sklearn.datasets import make_moons
from sklearn.manifold import SpectralEmbedding

import dkfm


def main(rows: int = 600) -> None:
    """Embed two moons, beside scikit-learn, and place new points by the eigenvectors' own rule."""
    X, _ = make_moons(rows, noise=0.05, random_state=0)
    Z, moon = make_moons(rows, noise=0.05, random_state=1)
    kernel = dkfm.kernels.Gaussian(0.15)
    K, degrees = kernel(X), kernel(X).sum(axis=1)

    pca = dkfm.KernelPCA(3, kernel="precomputed", centered=False).fit(K / np.sqrt(np.outer(degrees, degrees)))
    embedded = pca.eigenvectors_[:, 1:] / np.sqrt(degrees)[:, np.newaxis]  # the first is constant
    theirs = SpectralEmbedding(2, affinity="precomputed", random_state=0).fit_transform(K)
    cosines = np.abs(np.sum(embedded * theirs, axis=0)) / np.linalg.norm(embedded, axis=0)
    print(f"cosines with scikit-learn's    {(cosines / np.linalg.norm(theirs, axis=0)).round(6)}")

    # A new point: its kernel values, scaled alike. What its own degree scales is the same for all of its coordinates.
    new = kernel(Z, X)
    placed = pca.transform(new / np.sqrt(np.outer(new.sum(axis=1), degrees)))[:, 1]
    right = np.mean((placed > 0) == (moon == 1))
    print(f"new points on the right moon   {max(right, 1 - right):.3f} by the sign of the first coordinate")
    picture = dkfm.plotting.components(Z, placed > 0)
    picture.set(title="New points, by the sign of the first coordinate", xlabel="", ylabel="")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
