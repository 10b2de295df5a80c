"""Kernel ridge regression: scikit-learn's, left-out rows as refits predict them, weights, and the features of a map."""

import itertools
import re

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.kernel_ridge import KernelRidge as Theirs
from sklearn.linear_model import RidgeClassifier
from sklearn.tests import test_kernel_ridge as their_tests

import dkfm
from dkfm.errors import (
    BudgetError,
    CertificateError,
    DkfmWarning,
    InvalidInputError,
    NotPSDError,
    NotSupportedError,
    UnsupportedStoreError,
)
from dkfm.estimators.fitting import ridge
from dkfm.estimators.stored.ridge import StoredRidge
from dkfm.execution import memory
from dkfm.kernels import Gaussian

WORDS = {"kernel": "rbf", "gamma": 0.3}
Z = np.random.default_rng(1).normal(size=(40, 3))


@pytest.fixture
def X(rng):
    return rng.normal(size=(120, 3))


@pytest.fixture
def Y(rng):
    return rng.normal(size=(120, 2))


def their_test_cases():
    """Yield each of their tests, once for each class of sparse arrays if it takes one."""
    for name, test in vars(their_tests).items():
        if name.startswith("test_"):
            classes = [mark.args[1] for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
            for argument in classes[0] if classes else [None]:
                yield pytest.param(test, [] if argument is None else [argument], id=f"{name}-{argument}")


@pytest.mark.parametrize(("test", "arguments"), list(their_test_cases()))
@pytest.mark.filterwarnings("ignore:alpha = 0.0e")  # of a singular matrix, of which theirs warn in other words
def test_scikit_learns_tests_pass(test, arguments, monkeypatch):
    monkeypatch.setattr(their_tests, "KernelRidge", dkfm.KernelRidge)
    test(*arguments)


@pytest.mark.parametrize("weights", ["none", "number", "array"])
@pytest.mark.parametrize(("columns", "alpha"), [(slice(None), 1), (0, 0.5), (slice(None), [0.1, 2.0])])
def test_predictions_and_coefficients_are_scikit_learns(X, Y, rng, columns, alpha, weights):
    given_weights = {"none": None, "number": 2.5, "array": rng.uniform(0.1, 3, 120)}[weights]
    theirs = Theirs(alpha, **WORDS).fit(X, Y[:, columns], sample_weight=given_weights)
    ours = dkfm.KernelRidge(alpha, **WORDS).fit(X, Y[:, columns], sample_weight=given_weights)
    for found, expected in ((ours.predict(Z), theirs.predict(Z)), (ours.dual_coef_, theirs.dual_coef_)):
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-11 * np.abs(expected).max())  # condition 1e3
    assert ours.certificate_.error < 1e-12
    assert np.array_equal(ours.alpha_, alpha)


@pytest.mark.costly
@pytest.mark.parametrize("by_eigenvalues", [False, True])
@pytest.mark.parametrize("columns", [0, slice(None)])
def test_left_out_rows_are_predicted_as_refits_predict_them(X, Y, rng, columns, by_eigenvalues):
    y, weights = Y[:, columns], rng.uniform(0.1, 3, 120)
    alpha = {"alpha": "loo", "alphas": [1e-2]} if by_eigenvalues else {"alpha": 1e-2, "leave_one_out": True}
    whole = dkfm.KernelRidge(**alpha, **WORDS).fit(X, y, sample_weight=weights)
    assert whole.loo_predictions_.shape == y.shape
    for row in range(60):
        rest = np.arange(120) != row
        refit = dkfm.KernelRidge(1e-2, **WORDS).fit(X[rest], y[rest], sample_weight=weights[rest])
        np.testing.assert_allclose(whole.loo_predictions_[row], refit.predict(X[row : row + 1])[0], rtol=0, atol=1e-9)


def test_the_penalty_of_a_path_predicts_left_out_rows_best(X, rng):
    y = np.sin(2 * X[:, 0]) + 0.1 * rng.normal(size=120)
    weights = rng.integers(1, 4, 120).astype(float)
    found = dkfm.KernelRidge("loo", **WORDS).fit(X, y, sample_weight=weights)
    for alpha, error in zip(found.alphas_, found.loo_errors_, strict=True):
        one = dkfm.KernelRidge(alpha, leave_one_out=True, **WORDS).fit(X, y, sample_weight=weights)
        # Beside an alpha of 1e-9 the matrix has a condition of 1e10.
        assert np.average((one.loo_predictions_ - y) ** 2, weights=weights) == pytest.approx(error, rel=1e-4)
    assert found.alpha_ == found.alphas_[found.loo_errors_.argmin()]
    assert found.alphas_[0] < found.alpha_ < found.alphas_[-1]
    np.testing.assert_allclose(found.predict(Z), dkfm.KernelRidge(found.alpha_, **WORDS).fit(X, y, weights).predict(Z))


@pytest.mark.slow
@given(counts=st.lists(st.integers(0, 3), min_size=12, max_size=12).filter(any), alpha=st.sampled_from([1e-6, 0.1, 10]))
@settings(max_examples=30, deadline=None)
def test_a_weight_counts_as_repeated_rows(counts, alpha):
    draw = np.random.default_rng(0)
    X, y = draw.normal(size=(12, 2)), draw.normal(size=12)
    weighted = dkfm.KernelRidge(alpha, kernel=Gaussian(1.0)).fit(X, y, sample_weight=counts)
    repeated = dkfm.KernelRidge(alpha, kernel=Gaussian(1.0)).fit(np.repeat(X, counts, 0), np.repeat(y, counts))
    np.testing.assert_allclose(weighted.predict(X), repeated.predict(X), rtol=0, atol=1e-8)
    assert weighted.certificate_.error < 1e-7


def test_each_target_has_the_penalty_that_suits_it_whatever_its_units(X, rng):
    noisy, smooth = X[:, 0] + rng.normal(size=120), 1e4 * np.sin(X[:, 1])
    alone = [dkfm.KernelRidge("loo", **WORDS).fit(X, y) for y in (noisy, smooth)]
    both = dkfm.KernelRidge("loo", **WORDS).fit(X, np.column_stack([noisy, smooth]))
    np.testing.assert_allclose(both.alpha_, [model.alpha_ for model in alone])
    assert both.alpha_[0] > 1e3 * both.alpha_[1]
    assert both.loo_errors_.shape == (20, 2)
    np.testing.assert_allclose(both.loo_errors_[:, 1], alone[1].loo_errors_, rtol=1e-10)


@pytest.mark.parametrize("scale", [1e155, 1e-170, 1e300])
def test_squares_of_huge_or_tiny_targets_do_not_choose_the_penalty(X, scale):
    y = np.sin(X[:, 0])
    one, scaled = (dkfm.KernelRidge("loo", **WORDS).fit(X, factor * y) for factor in (1.0, scale))
    assert scaled.alpha_ == one.alpha_
    np.testing.assert_allclose(scaled.predict(Z) / scale, one.predict(Z), rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(scaled.norms_ / scale, one.norms_, rtol=1e-6)
    assert scaled.certificate_.error < 1e-9


def test_norms_bound_predictions_also_beside_a_huge_penalty(X):
    for alpha in (1e-3, 1e8, 1e18):
        model = dkfm.KernelRidge(alpha, **WORDS).fit(X, np.sin(X[:, 0]))
        assert np.abs(model.predict(X)).max() <= model.norms_[0]
        assert np.isfinite(model.certificate_.relative_error)


def test_the_path_begins_above_the_rounding_of_long_rows_and_of_large_weights(rng):
    X = rng.standard_t(2, (300, 5))
    for weights in (None, np.full(300, 1e6), np.r_[1e6, np.ones(299)]):
        for words in ({"kernel": "poly"}, {"kernel": "rbf", "gamma": 0.1}):
            dkfm.KernelRidge("loo", **words).fit(X, X[:, 0], sample_weight=weights)


@pytest.mark.costly
@pytest.mark.parametrize("alpha", [np.float32(0.1), np.int64(1), np.array(0.5), (0.1, 0.2)])
def test_a_penalty_of_numpy_is_saved(X, Y, alpha, tmp_path):
    dkfm.KernelRidge(alpha, **WORDS).fit(X, Y).save(tmp_path / "model")
    assert np.array_equal(dkfm.load(tmp_path / "model").alpha_, np.float64(alpha))


def test_a_centred_map_is_refused(X, Y):
    phi = dkfm.ExactFeatureMap(Gaussian(1.0), centered=True).fit(X)
    with pytest.raises(NotSupportedError, match="no intercept for centred features"):
        dkfm.KernelRidge.from_map(phi, Y, X)


@pytest.mark.parametrize("wrong", ["1", ["1", "2"], [[1.0], [2.0]], True, np.inf, -1.0, np.nan, [1.0], None, {"a": 1}])
def test_a_store_with_other_penalties_is_refused(X, Y, wrong):
    from dataclasses import replace

    record = dkfm.KernelRidge(0.1, **WORDS).fit(X, Y)._to_record()
    hostile = replace(record, parameters={**record.parameters, "fitted_alpha": wrong})
    with pytest.raises((UnsupportedStoreError, TypeError)):
        StoredRidge.from_record(hostile)
    with pytest.raises(UnsupportedStoreError):
        StoredRidge.from_record(replace(record, parameters={**record.parameters, "is_vector": True}))


def test_more_penalties_than_factors_pay_for_take_one_decomposition(X, rng, monkeypatch):
    from dkfm.numerics.supervised import ridge

    Y, alphas = rng.normal(size=(120, 20)), np.geomspace(1e-3, 10, 20)
    expected = Theirs(alphas, **WORDS).fit(X, Y).predict(Z)
    monkeypatch.setattr(ridge, "_solve_by_factors", None)
    found = dkfm.KernelRidge(alphas, leave_one_out=True, **WORDS).fit(X, Y)
    np.testing.assert_allclose(found.predict(Z), expected, rtol=0, atol=1e-10)
    one = dkfm.KernelRidge("loo", alphas=[alphas[7]], **WORDS).fit(X, Y[:, 7])
    np.testing.assert_allclose(found.loo_predictions_[:, 7], one.loo_predictions_, rtol=0, atol=1e-10)


def test_without_a_penalty_the_solution_is_the_one_of_least_norm(X, Y):
    with pytest.warns(DkfmWarning, match=r"alpha = 0.0e\+00 is nothing beside .* 117 eigenvalues are rounding"):
        found = dkfm.KernelRidge(0).fit(X, Y)
    np.testing.assert_allclose(found.predict(Z), Z @ np.linalg.lstsq(X, Y, rcond=None)[0], atol=1e-13)
    interpolating = dkfm.KernelRidge(0, kernel=Gaussian(0.1)).fit(X, Y)  # of full rank: nothing is left out
    np.testing.assert_allclose(interpolating.predict(X), Y, atol=1e-10)


def test_a_classifier_decides_by_the_sign_or_the_largest_as_ridge_classifiers_do(X):
    for codes in (X[:, 0] > 0.4, np.digitize(X[:, 0], [-0.5, 0.5])):
        labels = np.array(["low", "middle", "top"])[codes.astype(int)]
        ours = dkfm.KernelRidgeClassifier(0.5).fit(X, labels)
        theirs = RidgeClassifier(0.5, fit_intercept=False).fit(X, labels)
        np.testing.assert_allclose(ours.decision_function(Z), theirs.decision_function(Z), atol=1e-12)
        assert np.array_equal(ours.predict(Z), theirs.predict(Z))
        balanced = dkfm.KernelRidgeClassifier(0.5, class_weight="balanced").fit(X, labels)
        theirs = RidgeClassifier(0.5, fit_intercept=False, class_weight="balanced").fit(X, labels)
        np.testing.assert_allclose(balanced.decision_function(Z), theirs.decision_function(Z), atol=1e-12)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("classifies", [False, True])
def test_a_saved_regression_is_the_same(X, Y, tmp_path, dtype, classifies):
    if classifies:
        fitted = dkfm.KernelRidgeClassifier("loo", dtype=dtype, **WORDS).fit(X, np.arange(120) % 3)
    else:
        fitted = dkfm.KernelRidge([0.1, 1.0], dtype=dtype, leave_one_out=True, **WORDS).fit(X, Y)
    fitted.save(tmp_path / "model")
    loaded = dkfm.load(tmp_path / "model")
    assert np.array_equal(loaded.predict(Z), fitted.predict(Z))
    for name in ("loo_predictions_", "fitted_values_", "norms_", "alpha_", "dual_coef_"):
        assert np.array_equal(getattr(loaded, name), getattr(fitted, name)), name
    loaded.verify()
    loaded.model_.heads["predict"].weights[3] *= 1.01
    with pytest.raises(CertificateError):
        loaded.verify()


def test_a_batch_job_writes_the_predictions(X, Y, tmp_path):
    fitted = dkfm.KernelRidge(0.1, **WORDS).fit(X, Y)
    np.save(tmp_path / "rows.npy", Z)
    dkfm.batch_score(fitted, tmp_path / "rows.npy", tmp_path / "scores.zarr")
    np.testing.assert_allclose(dkfm.open_scores(tmp_path / "scores.zarr").compute(), fitted.predict(Z), atol=1e-12)


def test_a_dask_array_is_predicted_lazily_in_the_shape_of_the_targets(X, Y):
    import dask.array as da

    lazy = da.from_array(Z, chunks=(15, 3))
    for y in (Y, Y[:, 0]):
        fitted = dkfm.KernelRidge(**WORDS).fit(X, y)
        predicted = fitted.predict(lazy)
        assert predicted.shape == fitted.predict(Z).shape
        np.testing.assert_allclose(predicted.compute(), fitted.predict(Z), atol=1e-13)


@pytest.mark.parametrize("stored", [False, True])
def test_a_regression_in_the_features_of_a_map_is_that_of_its_kernel(X, Y, rng, tmp_path, stored):
    weights, kernel = rng.uniform(0.1, 3, 120), Gaussian(1.0)
    phi = dkfm.ExactFeatureMap(kernel, basis="cholesky").fit(X)
    np.save(tmp_path / "rows.npy", X)
    rows = tmp_path / "rows.npy" if stored else X
    in_map = dkfm.KernelRidge.from_map(phi, Y, rows, alpha=0.01, sample_weight=weights)
    whole = dkfm.KernelRidge(0.01, kernel=kernel).fit(X, Y, sample_weight=weights)
    np.testing.assert_allclose(in_map.predict(Z), whole.predict(Z), rtol=0, atol=1e-8)
    in_map.verify()
    labels = np.arange(120) % 3
    assert dkfm.KernelRidgeClassifier.from_map(phi, labels, rows, alpha=1e-6).score(X, labels) > 0.95


def test_an_indefinite_kernel_is_refused_or_clipped_unless_the_penalty_outweighs_it(X, Y):
    K = X @ X.T - 0.5 * np.outer(X[:, 0], X[:, 0]) - 3 * np.eye(120)
    assert dkfm.KernelRidge(4.0, kernel="precomputed").fit(K, Y).certificate_.error < 1e-12
    with pytest.raises(NotPSDError, match=r"with alpha = 1 its Cholesky factor breaks down at row \d"):
        dkfm.KernelRidge(1.0, kernel="precomputed").fit(K, Y)
    with pytest.warns(DkfmWarning, match="its negative part is dropped"):
        clipped = dkfm.KernelRidge(1.0, kernel="precomputed", on_indefinite="clip").fit(K, Y)
    values, vectors = np.linalg.eigh(K)
    positive = values > 0
    V = vectors[:, positive]
    np.testing.assert_allclose(clipped.predict(K), V @ np.diag(values[positive] / (values[positive] + 1)) @ V.T @ Y)
    with pytest.raises(NotSupportedError, match="no closed form"), pytest.warns(DkfmWarning):
        dkfm.KernelRidge("loo", kernel="precomputed", on_indefinite="clip").fit(K, Y)


@pytest.mark.parametrize(
    ("parameters", "y", "message"),
    [
        ({"alpha": -1}, np.ones(120), "alpha must be a number >= 0"),
        ({"alpha": "cv"}, np.ones(120), "alpha must be a number >= 0"),
        ({"alpha": True}, np.ones(120), "alpha must be a number >= 0"),
        ({"alpha": [1, 2, 3]}, np.ones((120, 2)), "alpha has 3 penalties, and y has 2 targets"),
        ({"alpha": 1, "alphas": [1]}, np.ones(120), 'alphas are what alpha="loo" chooses from'),
        ({"alpha": "loo", "alphas": [0.0, 1]}, np.ones(120), "alphas must be numbers > 0"),
        ({"alpha": "loo", "alphas": [1e-14]}, np.ones(120), "alphas must be above the rounding"),
        ({"alpha": 0, "leave_one_out": True}, np.ones(120), "needs an alpha above the rounding"),
        ({"leave_one_out": 1}, np.ones(120), "leave_one_out must be True or False"),
        ({}, None, "requires y to be passed"),
        ({}, np.ones(119), "y has 119 targets and X has 120 rows"),
        ({}, np.where(np.arange(120) == 7, np.nan, 1.0), "row 7 contains NaN"),
        ({}, np.ma.masked_equal(np.arange(120.0), 7), "y has masked values"),
        ({}, np.ones((120, 2, 2)), "y must be numbers"),
        ({}, ["a"] * 120, "y must be numbers"),
    ],
)
def test_what_cannot_be_fitted_is_refused_in_a_sentence(X, parameters, y, message):
    with pytest.raises(InvalidInputError, match=message):
        dkfm.KernelRidge(**parameters, kernel=Gaussian(1.0)).fit(X, y)


def test_masked_weights_are_refused(X):
    weights = np.ma.masked_equal(np.arange(120.0), 7)
    with pytest.raises(InvalidInputError, match="sample_weight has masked values"):
        dkfm.KernelRidge(kernel=Gaussian(1.0)).fit(X, np.ones(120), sample_weight=weights)


def test_too_little_memory_is_refused_with_both_numbers(X, monkeypatch):
    monkeypatch.setattr(memory, "clear_caches_and_measure_memory", lambda: 10**6)
    with pytest.raises(BudgetError, match=r"needs .* MB .* and 1 MB .* are there"):
        dkfm.KernelRidge(kernel=Gaussian(1.0), solver="dense").fit(X, np.ones(120))


def test_one_class_and_wrong_weights_of_classes_are_refused(X):
    with pytest.raises(InvalidInputError, match="y has 1 class, 'a'"):
        dkfm.KernelRidgeClassifier().fit(X, ["a"] * 120)
    for wrong, told in (
        ({"c": 1.0}, r"class_weight: .*; it has \['c'\]"),
        ("even", "class_weight"),
        (3, "class_weight"),
    ):
        with pytest.raises(InvalidInputError, match=told):
            dkfm.KernelRidgeClassifier(class_weight=wrong).fit(X, ["a", "b"] * 60)


def test_zero_targets_and_constant_ones_are_certified(X):
    for y, alpha in itertools.product((np.zeros(120), np.ones(120)), (1.0, "loo")):
        assert dkfm.KernelRidge(alpha, **WORDS).fit(X, y).certificate_.error < 1e-9


def test_a_map_without_features_predicts_zero():
    with pytest.warns(DkfmWarning, match="no features"):
        phi = dkfm.ExactFeatureMap("linear", basis="cholesky").fit(np.zeros((30, 2)))
    assert phi.rank_ == 0
    ridge = dkfm.KernelRidge.from_map(phi, np.ones((30, 2)), np.zeros((30, 2)))
    np.testing.assert_array_equal(ridge.predict(np.ones((3, 2))), np.zeros((3, 2)))


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"alpha": 1.0}, "use a larger alpha$"),
        ({"alpha": 1.0, "solver": "cg"}, 'use a larger alpha, or a smaller tol of solver="cg"$'),
        ({"alpha": "loo"}, "give alphas= of larger penalties, or bring the columns to one scale$"),
    ],
)
def test_the_remedy_of_a_bad_certificate_is_one_of_what_was_given(options, remedy, rng, monkeypatch):
    told, X = [], rng.normal(size=(40, 3))
    monkeypatch.setattr(ridge, "warn_of_rounding", lambda measured, model, remedy: told.append(remedy))
    dkfm.KernelRidge(kernel=Gaussian(2.0), **options).fit(X, X[:, 0])
    assert re.search(remedy, *told)


@pytest.mark.parametrize(
    "convert",
    [
        pd.Series,
        pd.DatetimeIndex.to_numpy,
        pd.DatetimeIndex.to_pydatetime,
        lambda days: pd.Series(days.tz_localize("UTC")),
        lambda days: pd.Series(days).mask(days == days[3]),
        lambda days: np.array(list(days.to_numpy()), dtype=object),
        lambda days: days - days[0],
        lambda days: pd.DataFrame({"when": days, "what": 1.0}),
        lambda days: pytest.importorskip("polars").DataFrame({"when": days.to_numpy(), "what": 1.0}),
    ],
)
def test_dates_and_times_are_no_targets(convert, rng):
    X, y = rng.normal(size=(10, 2)), convert(pd.date_range("2026-01-01", periods=10))
    phi = dkfm.ExactFeatureMap(Gaussian(1.0)).fit(X)
    for fit in (dkfm.KernelRidge(kernel="rbf").fit, lambda X, y: dkfm.KernelRidge.from_map(phi, y, X)):
        with pytest.raises(InvalidInputError, match=r"y must hold real numbers, and .*(dates|Datetime)"):
            fit(X, y)
