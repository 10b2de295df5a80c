"""The estimators behind scikit-learn's door: its own checks, grid search, pickles without a workspace."""

import pickle

import joblib
import numpy as np
import pytest
from sklearn.base import clone
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

import dkfm
from dkfm import kernels
from dkfm.errors import InvalidInputError
from dkfm.estimators.kernel_ridge import RidgeEstimator

REPEATED = {
    "symmetric": "a row that is repeated is a landmark more, so a feature more; the inner products are equal",
    "spectral": "the eigenvectors of a Gram matrix change with its repeated rows; the inner products are equal",
    "cholesky": "pivots that tie are in the order of the rows, which the check shuffles; the inner products are equal",
}
"""Why weights and repeated rows may give other coordinates; test_landmarks.py shows that they are the same map."""

PARTED = "a row that is repeated is in several parts of a cross-validation, and one of that weight in one"


LEFT_OUT = "of a repeated row one copy is left out, and of a row of that weight the whole weight"


def expected_failures(estimator):
    if isinstance(estimator, dkfm.KernelPCA):
        dense = "the way back is of dense rows, which the tags say, and scikit-learn 1.6 does not read them here"
        return {"check_sample_weight_equivalence_on_sparse_data": dense} if estimator.fit_inverse_transform else {}
    if isinstance(estimator, RidgeEstimator):
        parted = {f"check_sample_weight_equivalence_on_{name}_data": LEFT_OUT for name in ("dense", "sparse")}
        without = {"check_class_weight_classifiers": "lines through 0, without an intercept, do not tell these apart"}
        return parted if estimator.alpha == "loo" else without if estimator.kernel == "linear" else {}
    fisher = isinstance(estimator, dkfm.KernelFisher)
    if fisher and estimator.shrinkage != "auto":
        return {}
    why = PARTED if fisher else REPEATED[estimator.basis]
    return {f"check_sample_weight_equivalence_on_{name}_data": why for name in ("dense", "sparse")}


@parametrize_with_checks(
    [
        dkfm.ExactFeatureMap(kernels.Gaussian(2.0)),
        dkfm.KernelPCA(),
        dkfm.KernelFisher(kernel="rbf", gamma=0.5),
        dkfm.KernelRidge(),
        dkfm.KernelRidgeClassifier(),
        dkfm.KernelRidgeClassifier("loo", kernel="rbf", gamma=1e-3),
    ],
    expected_failed_checks=expected_failures,
)
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@pytest.mark.filterwarnings("ignore:The certificate of these scores")  # of rows near 100, whose last axis is rounding
def test_scikit_learns_checks_pass(estimator, check):
    check(estimator)


@pytest.mark.slow
@parametrize_with_checks(
    [
        dkfm.ExactFeatureMap("rbf", basis="spectral", centered=True),
        dkfm.ExactFeatureMap(kernels.Gaussian(2.0), basis="cholesky"),
        dkfm.ExactFeatureMap(
            kernels.Gaussian(2.0), basis="cholesky", landmarks="random_pivots", n_landmarks=4, random_state=0
        ),
        dkfm.KernelPCA(2, kernel=kernels.Gaussian(2.0)),
        dkfm.KernelPCA(2, kernel="rbf", gamma=0.5, fit_inverse_transform=True),
        dkfm.KernelFisher(),
        dkfm.KernelRidge("loo", kernel=kernels.Gaussian(2.0)),
        dkfm.KernelRidgeClassifier(kernel=kernels.Gaussian(20.0), class_weight="balanced"),
        dkfm.KernelFisher(1, kernel=kernels.Gaussian(2.0), shrinkage="auto", on_indefinite="clip"),
    ],
    expected_failed_checks=expected_failures,
)
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@pytest.mark.filterwarnings("ignore:The certificate of these scores")
def test_scikit_learns_checks_pass_with_other_parameters(estimator, check):
    check(estimator)


def test_a_grid_search_goes_over_the_numbers_of_a_kernel(rng):
    X = rng.normal(size=(80, 2))
    y = np.sin(2 * X[:, 0])
    pipeline = make_pipeline(dkfm.ExactFeatureMap(kernels.Gaussian(50.0), basis="cholesky"), Ridge(1e-6))
    search = GridSearchCV(pipeline, {"exactfeaturemap__kernel__sigma": [0.01, 1.0, 300.0]}, cv=2).fit(X, y)
    assert search.best_params_ == {"exactfeaturemap__kernel__sigma": 1.0}
    assert search.best_estimator_[0].kernel == kernels.Gaussian(1.0)


def test_parameters_of_the_kernel_are_set_as_those_of_the_estimator():
    phi = dkfm.ExactFeatureMap(kernels.Polynomial(3))
    assert phi.get_params()["kernel__degree"] == 3
    assert "kernel__degree" not in phi.get_params(deep=False)
    warped = dkfm.KernelRidge(kernel=kernels.Gaussian(2.0).warp(kernels.Standardize((0.0,), (1.0,))) ** 2)
    assert warped.get_params()["kernel__kernel__kernel__sigma"] == 2.0
    changed = warped.set_params(kernel__kernel__kernel__sigma=3.0, kernel__exponent=3).kernel
    assert changed == kernels.Gaussian(3.0).warp(kernels.Standardize((0.0,), (1.0,))) ** 3
    with pytest.raises(InvalidInputError, match=r"'kernel__kernel__sigma'.*, and not .'kernel__kernel__gamma'"):
        warped.set_params(kernel__kernel__kernel__gamma=1.0)
    with pytest.raises(InvalidInputError, match=r"give a kernel, as kernels.Gaussian\(1.0\), and not its name"):
        dkfm.KernelPCA(kernel="gaussian").set_params(kernel__sigma=2.0)
    assert phi.set_params(kernel__degree=4, basis="spectral").kernel == kernels.Polynomial(4)
    assert phi.set_params(kernel=kernels.Gaussian(), kernel__sigma=3).kernel == kernels.Gaussian(3.0)
    assert clone(phi).kernel == phi.kernel
    half_of_sum = dkfm.KernelRidge(kernel=0.5 * (kernels.Gaussian(1.0) + kernels.Linear()))
    with pytest.raises(
        InvalidInputError, match=r"and not \['kernel__terms__0__sigma'\]; .* give whole kernels as kernel="
    ):
        half_of_sum.set_params(kernel__kernel__terms__0__sigma=2.0)
    with pytest.raises(InvalidInputError, match=r"\['sigma'\], and not \['degree'\]\.$"):
        phi.set_params(kernel__degree=2)
    process = pytest.importorskip("sklearn.gaussian_process.kernels")
    assert dkfm.KernelPCA(kernel=process.RBF(2.0)).set_params(kernel__length_scale=3.0).kernel.length_scale == 3.0


@pytest.mark.costly
@pytest.mark.parametrize("basis", ["symmetric", "spectral", "cholesky"])
def test_a_pickled_map_needs_nothing_of_its_workspace(basis, rng, tmp_path):
    import shutil

    X, Z = rng.normal(size=(120, 3)), rng.normal(size=(7, 3))
    phi = dkfm.ExactFeatureMap(kernels.Gaussian(1.0), basis=basis, tile_rows=50, workspace=tmp_path / "w").fit(X)
    joblib.dump(phi, tmp_path / "phi.joblib")
    pickled = pickle.dumps(phi)
    shutil.rmtree(tmp_path / "w")
    for copied in (pickle.loads(pickled), joblib.load(tmp_path / "phi.joblib")):
        np.testing.assert_array_equal(copied.transform(Z), phi.transform(Z))
        measured = copied.verify().certificate
        assert measured.error == phi.certificate_.error
        assert measured.relative_error <= phi.certificate_.relative_error


def test_objects_that_are_numbers_are_rows_and_others_are_a_type_error():
    rows = np.array([[1, 2.5], [True, 3]], dtype=object)
    np.testing.assert_array_equal(kernels.Linear()(rows), kernels.Linear()(rows.astype(float)))
    for value in ({}, [1], "word"):
        rows[0, 0] = value
        with pytest.raises(InvalidInputError, match="real numbers"):
            kernels.Linear()(rows)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("used", ["threaded_client", "client"])
def test_a_grid_search_on_a_cluster_computes_in_its_tasks_and_finds_what_it_finds_without(used, request, rng):
    X = rng.normal(size=(80, 2))
    y = np.sin(2 * X[:, 0])
    kernel, tiles = kernels.Gaussian(50.0), 15  # so that a Gram matrix has several
    maps = [
        dkfm.ExactFeatureMap(kernel, tile_rows=tiles),
        dkfm.ExactFeatureMap(kernel, basis="cholesky", build="gram", tile_rows=tiles),
        dkfm.KernelPCA(5, kernel=kernel, tile_rows=tiles),
    ]
    grid = {"map": maps, "map__kernel__sigma": [0.01, 1.0, 300.0]}
    search = GridSearchCV(Pipeline([("map", None), ("ridge", Ridge(1e-6))]), grid, cv=2, refit=False)
    here = clone(search).fit(X, y)
    client = request.getfixturevalue(used)

    def count_tiles(dask_scheduler):
        prefix = dask_scheduler.task_prefixes.get("dkfm-gram")
        return 0 if prefix is None else sum(prefix.state_counts.values())

    before = client.run_on_scheduler(count_tiles)
    with joblib.parallel_config(backend="dask"):
        there = clone(search).fit(X, y)
    assert there.best_params_["map__kernel__sigma"] == 1.0
    assert repr(there.best_params_) == repr(here.best_params_)
    found, truth = (search.cv_results_["mean_test_score"] for search in (there, here))
    np.testing.assert_allclose(found, truth, rtol=0, atol=1e-6)
    clients = client.run_on_scheduler(lambda dask_scheduler: set(dask_scheduler.clients))
    assert client.run_on_scheduler(count_tiles) == before
    # joblib itself has a client in each worker process.
    assert {name for name in clients if "worker" not in name} == {client.id, "fire-and-forget"}
