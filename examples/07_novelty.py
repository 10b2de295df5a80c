"""
Novelty
=======

Train on the digits 0 to 8 and find the 9, by two distances in feature space, and by two detectors of scikit-learn. See
the area under the ROC curve of each. The picture shows the reconstruction errors of new digits 0 to 8 and of nines.
"""

import sys

import numpy as np
from sklearn.datasets import load_digits
from sklearn.ensemble import IsolationForest
from sklearn.metrics import roc_auc_score
from sklearn.svm import OneClassSVM

import dkfm


def main(rows: int = 1000) -> None:
    """Fit detectors to some of the digits 0 to 8 and rank all others, the 9 among them."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order] / 16, labels[order]
    known = np.flatnonzero(labels != 9)[:rows]
    train, rest = images[known], np.setdiff1d(np.arange(len(images)), known)
    test, is_nine = images[rest], labels[rest] == 9
    forest = IsolationForest(n_estimators=200, random_state=0).fit(train)
    print(
        f"{len(train)} digits 0 to 8 known; {is_nine.sum()} times 9 among {len(test)} others; area under the ROC curve"
    )
    print(f"{'IsolationForest':<52} {roc_auc_score(is_nine, -forest.score_samples(test)):.3f}")
    for sigma in (0.5, 1.0, 2.0):
        kernel = dkfm.kernels.Gaussian(sigma)
        pca = dkfm.KernelPCA(min(200, rows // 2), kernel=kernel).fit(train)
        phi = dkfm.ExactFeatureMap(kernel).fit(train)
        svm = OneClassSVM(gamma=1 / (2 * sigma**2), nu=0.1).fit(train)
        found = {
            f"reconstruction error of {len(pca.eigenvalues_)} components": pca.reconstruction_error(test),
            "residual of the feature map": phi.residual(test),
            "OneClassSVM": -svm.decision_function(test),
        }
        for name, score in found.items():
            print(f"{name:<40} sigma = {sigma:<3} {roc_auc_score(is_nine, score):.3f}")
    dkfm.plotting.novelty(test[~is_nine], test[is_nine], estimator=pca)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
