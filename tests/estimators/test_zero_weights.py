"""Rows of weight 0 are left out of every fit: of its width, its scales and its classes too."""

import numpy as np
import pytest
from sklearn.base import clone

from dkfm import ExactFeatureMap, KernelFisher, KernelPCA, KernelRidge, KernelRidgeClassifier
from dkfm.errors import InvalidInputError
from dkfm.kernels import Gaussian

WIDTH = Gaussian("median")


@pytest.fixture
def rows(rng):
    """Rows of which the first five are far away, and labels."""
    X = rng.normal(size=(40, 2))
    X[:5] *= 30
    return X, np.arange(40) % 3


@pytest.mark.parametrize(
    "estimator",
    [
        ExactFeatureMap(WIDTH),
        ExactFeatureMap(WIDTH, centered=True),
        ExactFeatureMap(WIDTH, landmarks="uniform", n_landmarks=10, random_state=0),
        KernelPCA(3, kernel=WIDTH),
        KernelFisher(kernel=WIDTH),
        KernelRidge(kernel=WIDTH),
        KernelRidgeClassifier(kernel=WIDTH),
    ],
    ids=repr,
)
def test_the_median_width_is_that_of_the_rows_that_count(estimator, rows):
    (X, y), weights = rows, np.r_[np.zeros(5), np.ones(35)]
    kernel = estimator.fit(X, y, sample_weight=weights).kernel_
    assert kernel == estimator.fit(X[5:], y[5:]).kernel_
    assert kernel != estimator.fit(X, y).kernel_


def test_a_standardized_median_width_is_that_of_the_rows_that_count(rows):
    X, weights = rows[0], np.r_[np.zeros(5), np.ones(35)]
    found = KernelPCA(2, kernel=WIDTH).fit(X, sample_weight=weights, standardize=True).kernel_
    expected = KernelPCA(2, kernel=WIDTH).fit(X[5:], standardize=True).kernel_
    np.testing.assert_allclose(found.kernel.sigma, expected.kernel.sigma, rtol=1e-12)


@pytest.mark.parametrize("class_weight", [None, "balanced", (2, 3, 1)], ids=repr)
@pytest.mark.parametrize("names", [np.array([0, 1, 2]), np.array(["a", "b", "c"])], ids=["numbers", "words"])
def test_a_class_without_a_row_that_counts_is_no_class(rows, class_weight, names):
    X, labels = rows[0], names[rows[1]]
    if isinstance(class_weight, tuple):
        class_weight = dict(zip(names, class_weight, strict=True))
    model = KernelRidgeClassifier(kernel=Gaussian(2.0), class_weight=class_weight)
    for gone in names:
        counts = labels != gone
        expected = clone(model).fit(X[counts], labels[counts])
        found = model.fit(X, labels, sample_weight=counts * 1.0)
        assert found.classes_.tolist() == expected.classes_.tolist() == names[names != gone].tolist()
        assert found.predict(X).tolist() == expected.predict(X).tolist()
        np.testing.assert_allclose(found.decision_function(X), expected.decision_function(X), rtol=1e-9, atol=1e-12)


def test_one_class_that_counts_is_refused(rows):
    X, y = rows
    with pytest.raises(InvalidInputError, match="y has 1 class, 2, and a classifier needs two"):
        KernelRidgeClassifier(kernel=Gaussian(2.0)).fit(X, y, sample_weight=(y == 2) * 1.0)
