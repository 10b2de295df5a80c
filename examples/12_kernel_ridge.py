"""
Kernel ridge regression
=======================

Plain ridge regression of the features equals scikit-learn's KernelRidge. See the largest difference. The picture
shows the predictions at new points.
"""

import sys

import numpy as np
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import Ridge

import dkfm


def main(rows: int = 800) -> None:
    """Fit both to noisy values of a function, and compare them on new points."""
    rng = np.random.default_rng(0)
    X, Z = rng.uniform(-3, 3, size=(rows, 2)), rng.uniform(-3, 3, size=(rows, 2))
    y = np.sin(2 * X[:, 0]) * np.cos(X[:, 1]) + 0.1 * rng.normal(size=rows)
    truth = np.sin(2 * Z[:, 0]) * np.cos(Z[:, 1])

    theirs = KernelRidge(alpha=0.1, kernel="rbf", gamma=0.5).fit(X, y).predict(Z)
    print(f"scikit-learn's KernelRidge   root mean squared error {np.sqrt(np.mean((theirs - truth) ** 2)):.4f}")
    for basis in ("symmetric", "cholesky"):
        phi = dkfm.ExactFeatureMap("rbf", kernel_params={"gamma": 0.5}, basis=basis).fit(X)
        ridge = Ridge(alpha=0.1, fit_intercept=False).fit(phi.transform(X), y)
        ours = ridge.predict(phi.transform(Z))
        print(f"Ridge of {ridge.n_features_in_:>4} features       differs by at most {np.abs(ours - theirs).max():.1e}")
    # Folded, it is one product with kernel values: no features are made, and `save` and `batch_score` take it.
    folded = dkfm.fold(phi, ridge)
    print(f"the same, folded             differs by at most {np.abs(folded.predict(Z) - theirs).max():.1e}")
    picture = dkfm.plotting.components(Z, theirs)
    picture.set(title="Predictions of kernel ridge regression", xlabel="", ylabel="")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
