"""Columns of training rows are standardized to mean 0 and variance 1 in every estimator, as a part of its kernel."""

import dask.array as da
import numpy as np
import pandas as pd
import pytest
from scipy.sparse import csr_array
from sklearn.base import clone
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import dkfm
from dkfm import ExactFeatureMap, KernelFisher, KernelPCA, KernelRidge, KernelRidgeClassifier
from dkfm.core import chunking
from dkfm.errors import InvalidInputError, NotSupportedError
from dkfm.kernels import Gaussian

KERNEL = Gaussian(2.0)

MODELS = [
    ExactFeatureMap(KERNEL),
    ExactFeatureMap(KERNEL, basis="cholesky", build="rounds"),
    ExactFeatureMap(KERNEL, landmarks="uniform", n_landmarks=20, random_state=0),
    KernelPCA(3, kernel=KERNEL),
    KernelFisher(kernel=KERNEL),
    KernelRidge(kernel=KERNEL),
    KernelRidgeClassifier(kernel=KERNEL),
]
PREDICTORS = MODELS[-3:]


@pytest.fixture
def rows(rng):
    """Rows of columns of unlike scales, of which one is constant, and labels."""
    X = rng.normal(size=(60, 4)) * [100, 1, 0.01, 0] + [5, 0, -3, 7]
    return X, np.arange(60) % 3


def output(model, X):
    return model.predict(X) if hasattr(model, "predict") else model.transform(X)


@pytest.mark.parametrize("model", MODELS, ids=repr)
def test_the_model_is_that_of_standardized_rows(model, rows, tmp_path):
    X, y = rows
    scaler = StandardScaler().fit(X)
    expected = clone(model).fit(scaler.transform(X), y)
    found = clone(model).fit(X, y, standardize=True)
    np.testing.assert_allclose(output(found, X), output(expected, scaler.transform(X)), atol=1e-9)  # rounding of x - m
    found.save(tmp_path / "model")
    np.testing.assert_array_equal(output(dkfm.load(tmp_path / "model"), X), output(found, X))
    warp = found.kernel_.h
    np.testing.assert_array_equal((warp.mean, warp.scale), (scaler.mean_, scaler.scale_))


@pytest.mark.parametrize("model", MODELS, ids=repr)
@pytest.mark.parametrize("kind", ["path", "dask", "frame"])
def test_rows_of_any_kind_are_standardized(model, kind, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(chunking, "choose_tile_rows", lambda *_: 25)  # several parts
    X, y = rows
    np.save(tmp_path / "x.npy", X)
    given = {
        "path": tmp_path / "x.npy",
        "dask": da.from_array(X, chunks=(20, 4)),
        "frame": pd.DataFrame(X, columns=list("abcd")),
    }[kind]
    found = clone(model).fit(given, y, standardize=True).kernel_.h
    np.testing.assert_allclose(found.mean, X.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(found.scale, [*X.std(axis=0)[:3], 1], rtol=1e-12)


@pytest.mark.parametrize("model", [KernelPCA(3, kernel=KERNEL), *PREDICTORS], ids=repr)
def test_scales_are_those_of_weighted_rows(model, rows):
    (X, y), weights = rows, np.arange(60) % 4
    found = clone(model).fit(X, y, sample_weight=weights, standardize=True).kernel_.h
    repeated = StandardScaler().fit(np.repeat(X, weights, axis=0))
    np.testing.assert_allclose(found.mean, repeated.mean_, rtol=1e-12)
    np.testing.assert_allclose(found.scale, repeated.scale_, rtol=1e-12)
    counted = clone(model).fit(X[weights > 0], y[weights > 0], sample_weight=weights[weights > 0], standardize=True)
    assert found == counted.kernel_.h


def test_a_weight_of_all_rows_changes_no_scale(rows):
    X, y = rows
    equal = KernelRidge(kernel=KERNEL).fit(X, y, sample_weight=3.0, standardize=True).kernel_
    assert equal == KernelRidge(kernel=KERNEL).fit(X, y, standardize=True).kernel_


@pytest.mark.parametrize("model", PREDICTORS, ids=repr)
def test_each_fold_of_a_cross_validation_has_its_own_scales(model, rows):
    X, y = rows
    found = cross_val_score(model, X, y, cv=3, params={"standardize": True})
    np.testing.assert_allclose(found, cross_val_score(make_pipeline(StandardScaler(), model), X, y, cv=3), atol=1e-9)


@pytest.mark.parametrize("model", [MODELS[0], *MODELS[3:]], ids=repr)
@pytest.mark.parametrize("value", ["no", 1, None])
def test_what_is_neither_true_nor_false_is_refused(model, rows, value, tmp_path):
    X, y = rows
    with pytest.raises(InvalidInputError, match="standardize must be True or False"):
        clone(model).fit(X, y, standardize=value)
    with pytest.raises(InvalidInputError, match="standardize must be True or False"):
        clone(model).fit(tmp_path / "no rows.npy", y, standardize=value)  # before the rows are opened


@pytest.mark.parametrize("model", [MODELS[0], *MODELS[3:]], ids=repr)
def test_what_cannot_be_standardized_is_refused(model, rows):
    X, y = rows
    with pytest.raises(NotSupportedError, match="Sparse rows are not standardized"):
        clone(model).fit(csr_array(X), y, standardize=True)
    with pytest.raises(InvalidInputError, match="no rows to standardize"):
        clone(model).set_params(kernel="precomputed").fit(X @ X.T, y, standardize=True)
    with pytest.raises(InvalidInputError, match="Column 1 has numbers whose variance overflows"):
        clone(model).fit(X * [1, 1e200, 1, 1], y, standardize=True)
