"""scikit-learn's words: every name and object that has a translation agrees with it, the others are refused by name."""

import numpy as np
import pytest
from sklearn.gaussian_process import kernels as process
from sklearn.metrics.pairwise import PAIRWISE_KERNEL_FUNCTIONS, pairwise_kernels

import dkfm
from dkfm import kernels
from dkfm.errors import DkfmWarning, InvalidInputError, KernelError
from helpers.recorded import drop_resource_warnings

PARAMETERS = {
    "poly": [{}, {"degree": 2, "gamma": 0.3, "coef0": 0.5}, {"degree": 2.0}],
    "polynomial": [{}, {"degree": 4, "gamma": None}],
    "rbf": [{}, {"gamma": 0.3}],
    "laplacian": [{}, {"gamma": 0.3}],
    "sigmoid": [{}, {"gamma": 0.3, "coef0": -0.5}],
    "chi2": [{}, {"gamma": 0.3}],
}


@pytest.mark.parametrize("name", sorted(PAIRWISE_KERNEL_FUNCTIONS))
def test_every_name_agrees_with_scikit_learn_with_its_defaults_and_parameters(name, rng):
    X, Y = rng.uniform(size=(30, 6)), rng.uniform(size=(8, 6))
    for parameters in PARAMETERS.get(name, [{}]):
        truth = pairwise_kernels(X, Y, metric=name, **parameters)
        kernel = kernels.from_sklearn(name, **parameters)
        np.testing.assert_allclose(kernel(X, Y), truth, rtol=1e-12, atol=1e-12)
        resolved = kernel.resolve(X)
        assert "None" not in repr(resolved)
        np.testing.assert_array_equal(resolved(X, Y), kernel(X, Y))


@pytest.mark.parametrize(
    "kernel",
    [
        process.RBF(2.0),
        process.RBF([1.0, 2.0, 0.5]),
        process.Matern(2.0, nu=0.5),
        process.Matern([1.0, 2.0, 0.5], nu=1.5),
        process.Matern(2.0, nu=2.5),
        process.Matern(2.0, nu=1.1),
        process.Matern(2.0, nu=np.inf),
        process.RationalQuadratic(2.0, 0.7),
        process.DotProduct(1.5),
        process.ConstantKernel(2.0),
        process.ConstantKernel(2.0) * process.RBF(1.5) + process.DotProduct(0.5) ** 2,
        2.0 * process.RBF(1.5) * process.RBF(3.0),
    ],
    ids=str,
)
def test_gaussian_process_kernels_agree_with_scikit_learn(kernel, rng):
    X, Y = rng.normal(size=(20, 3)), rng.normal(size=(7, 3))
    translated = kernels.from_sklearn(kernel)
    np.testing.assert_allclose(translated(X, Y), kernel(X, Y), rtol=1e-12, atol=1e-12)
    assert eval(repr(translated), vars(kernels)) == translated


def test_exp_sine_squared_agrees_on_one_column_and_is_refused_on_more(rng):
    kernel = process.ExpSineSquared(1.5, periodicity=2.0)
    X = rng.normal(size=(20, 1))
    translated = kernels.from_sklearn(kernel)
    np.testing.assert_allclose(translated(X), kernel(X), rtol=1e-12)
    words = r"1 number as length_scale and the rows have 2 columns; .* so give Periodic\(period, length_scale\)"
    for evaluate in (translated, translated.resolve):
        with pytest.raises(KernelError, match=words):
            evaluate(rng.normal(size=(5, 2)))


class Mine(process.RBF):
    pass


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: kernels.from_sklearn("rbff"), "near it: rbf"),
        (lambda: kernels.from_sklearn("gaussian"), "dkfm's own is the class kernels.Gaussian"),
        (lambda: kernels.from_sklearn("rbf", sigma=1.0), r"parameter gamma, and got sigma"),
        (lambda: kernels.from_sklearn("rbf", gamma=-1.0), "gamma must be a finite number > 0"),
        (lambda: kernels.from_sklearn("poly", degree=2.5), "positive integer as degree"),
        (lambda: kernels.from_sklearn("linear", gamma=1.0), "has no parameters, and got gamma"),
        (lambda: kernels.from_sklearn(process.WhiteKernel()), "has no translation; noise belongs in alpha="),
        (lambda: kernels.from_sklearn(process.PairwiseKernel()), "has no translation; there is one of ConstantKernel"),
        (lambda: kernels.from_sklearn(process.RBF() + process.WhiteKernel()), "WhiteKernel.*has no translation"),
        (lambda: kernels.from_sklearn(process.RBF() ** 0.5), "positive integer as exponent"),
        (lambda: kernels.from_sklearn(Mine()), "has no translation"),
        (lambda: kernels.from_sklearn(process.RBF(), gamma=1), "gamma belong to a name"),
        (lambda: kernels.from_sklearn(3), "has no translation"),
        (lambda: kernels.as_kernel(kernels.Linear(), {"gamma": 1}), "belong to a name or a function"),
        (lambda: kernels.as_kernel("rbf", 3), "must be a mapping"),
        (lambda: kernels.as_kernel(kernels.Gaussian), "is the class Gaussian"),
    ],
)
def test_what_has_no_translation_is_refused_by_name(make, words):
    with pytest.raises(KernelError, match=words):
        make()


def test_estimators_take_names_with_parameters_objects_and_functions_of_two_rows(rng):
    from sklearn.decomposition import KernelPCA

    X, Z = rng.normal(size=(40, 4)), rng.normal(size=(9, 4))
    for spec, parameters in (("rbf", {"gamma": 0.1}), ("poly", {"degree": 2}), ("cosine", None), ("rbf", None)):
        ours = dkfm.KernelPCA(2, kernel=spec, kernel_params=parameters).fit(X)
        keywords = {"gamma": None} if parameters is None else parameters
        theirs = KernelPCA(2, kernel=spec, **(keywords if spec != "cosine" else {})).fit(X)
        np.testing.assert_allclose(np.abs(ours.transform(Z)), np.abs(theirs.transform(Z)), rtol=0, atol=1e-10)
        assert ours.kernel == spec
        assert isinstance(ours.kernel_, kernels.Kernel)
    phi = dkfm.ExactFeatureMap(process.RBF(2.0)).fit(X)
    assert phi.kernel_ == kernels.Gaussian(2.0)
    with pytest.warns(DkfmWarning, match="every pair of rows, which is slow") as caught:
        paired = dkfm.ExactFeatureMap(lambda x, y: np.exp(-((x - y) ** 2).sum() / 8)).fit(X)
    assert len(drop_resource_warnings(caught)) == 1
    np.testing.assert_allclose(paired.transform(Z), phi.transform(Z), rtol=0, atol=1e-9)


def test_a_median_is_resolved_at_fit(rng, tmp_path):
    X = rng.normal(size=(50, 3))
    pca = dkfm.KernelPCA(2, kernel=kernels.Gaussian("median")).fit(X)
    assert pca.kernel_ == kernels.Gaussian.median(X)
    assert pca.kernel == kernels.Gaussian("median")
    pca.save(tmp_path / "model")
    assert dkfm.load(tmp_path / "model").kernel_ == pca.kernel_
    assert dkfm.build_gram(kernels.Gaussian("median"), X, tmp_path / "gram")[0, 1] == pytest.approx(
        kernels.Gaussian.median(X)(X)[0, 1], rel=1e-12
    )


def test_a_length_scale_of_another_width_is_refused_before_the_gram(rng):
    with pytest.raises((KernelError, InvalidInputError), match="2 numbers as sigma and the rows have 3 columns"):
        dkfm.KernelPCA(2, kernel=kernels.Gaussian((1.0, 2.0)).warp(np.sin) + 1.0).fit(rng.normal(size=(5, 3)))


def test_grid_search_over_kernels_finds_the_right_one(rng):
    from sklearn.linear_model import RidgeClassifier
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline

    X = rng.normal(size=(200, 2))
    y = (X**2).sum(1) > 1.4
    search = GridSearchCV(
        make_pipeline(dkfm.ExactFeatureMap(kernels.Linear(), basis="spectral"), RidgeClassifier()),
        {"exactfeaturemap__kernel": [kernels.Linear(), kernels.Gaussian(1.0), kernels.Polynomial(2, offset=1.0)]},
        cv=3,
    ).fit(X, y)
    assert search.best_params_["exactfeaturemap__kernel"] != kernels.Linear()
    assert search.best_score_ > 0.9
