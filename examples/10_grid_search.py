"""
A grid search
=============

Search over kernels and their parameters in a scikit-learn pipeline. See which kernel wins. The picture shows the
cross-validated accuracy of each.
"""

import sys

import numpy as np
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from sklearn.linear_model import RidgeClassifier
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline

from dkfm import ExactFeatureMap
from dkfm.kernels import Gaussian, Laplacian, Polynomial


def main(rows: int = 600) -> None:
    """Search over kernels, then over the sigma of one, with some digits, and try the best on the others."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order] / 16, labels[order]
    train, test = slice(0, rows), slice(rows, None)
    pipeline = make_pipeline(ExactFeatureMap(Gaussian(), basis="cholesky"), RidgeClassifier(alpha=1e-2))
    grid = [
        {"exactfeaturemap__kernel": [Polynomial(3, scale=1 / 64), Laplacian(10.0), Gaussian() + Gaussian("median")]},
        {"exactfeaturemap__kernel__sigma": [0.1, 1.0, 3.0, "median"]},  # of the Gaussian that the pipeline has
    ]
    search = GridSearchCV(pipeline, grid, cv=3).fit(images[train], labels[train])
    scores = {}
    for parameters, score in zip(search.cv_results_["params"], search.cv_results_["mean_test_score"], strict=True):
        ((name, value),) = parameters.items()
        tried = f"{name.removeprefix('exactfeaturemap__')} = {value}"
        scores[tried] = score
        print(f"{score:.3f}  {tried}")
    print(f"best: {search.best_params_}")
    print(f"{search.score(images[test], labels[test]):.3f} of the others are right")
    axes = plt.figure(figsize=(7, 3), layout="constrained").add_subplot(xlabel="share that is right")
    axes.barh(list(scores), list(scores.values()))
    axes.invert_yaxis()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
