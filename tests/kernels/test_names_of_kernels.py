"""Names of kernels: the same words mean the same in Python and on the command line."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

import dkfm
from dkfm import kernels
from dkfm.cli.app import main
from dkfm.errors import KernelError
from dkfm.kernels import as_kernel, serialization
from dkfm.kernels.kernel_specs import _FACTORIES, from_name


@pytest.fixture
def fit(tmp_path, rng, monkeypatch):
    """A function that fits on the command line; it returns what was printed and the kernel of the model."""
    monkeypatch.chdir(tmp_path)
    np.save("rows.npy", np.abs(rng.normal(size=(30, 3))))

    def run(kernel, *parameters, ok=True):
        options = [word for parameter in parameters for word in ("--param", parameter)]
        command = ["fit", "rows.npy", "model", "--method", "features", "--overwrite", "--kernel", kernel, *options]
        ended = CliRunner().invoke(main, command)
        assert (ended.exit_code == 0) == ok, ended.output
        return ended, dkfm.load("model").kernel_ if ok else None

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parameters", "kernel"),
    [
        ("rbf", {"gamma": 0.5}, kernels.Gaussian(1.0)),
        ("rbf", {}, kernels.Gaussian(None)),
        ("gaussian", {"sigma": 5.0}, kernels.Gaussian(5.0)),
        ("gaussian", {}, kernels.Gaussian("median")),
        ("matern", {"nu": 2.5}, kernels.Matern(2.5, "median")),
        ("exponential", {}, kernels.Exponential("median")),
        ("rational_quadratic", {"alpha": 2.0}, kernels.RationalQuadratic(2.0, "median")),
        ("laplacian", {"gamma": 0.5}, kernels.Laplacian(2.0)),
        ("laplacian", {"sigma": 2.0}, kernels.Laplacian(2.0)),
        ("laplacian", {}, kernels.Laplacian(None)),
        ("polynomial", {"degree": 2, "coef0": 3.0}, kernels.Polynomial(2, None, 3.0)),
        ("polynomial", {"degree": 2, "scale": 0.5}, kernels.Polynomial(2, 0.5, 0.0)),
        ("poly", {}, kernels.Polynomial(3, None, 1.0)),
        ("polynomial", {}, kernels.Polynomial(3, None, 1.0)),
        ("sigmoid", {"offset": -1.0}, kernels.Sigmoid(1.0, -1.0)),
        ("chi2", {"gamma": 2.0}, kernels.ChiSquared(2.0)),
        ("chi_squared", {"gamma": 2.0}, kernels.ChiSquared(2.0)),
        ("cosine", {}, kernels.Cosine()),
    ],
)
def test_a_name_means_the_same_in_python_and_on_the_command_line(name, parameters, kernel, fit, rng):
    assert as_kernel(name, parameters) == from_name(name, parameters) == kernel
    X = np.load("rows.npy")
    if name != "sigmoid":
        expected = dkfm.ExactFeatureMap(kernel).fit(X).kernel_
        assert dkfm.ExactFeatureMap(name, kernel_params=parameters).fit(X).kernel_ == expected
        assert fit(name, *(f"{key}={value}" for key, value in parameters.items()))[1] == expected
        if parameters:
            assert fit(f"{name}:" + ",".join(f"{key}={value}" for key, value in parameters.items()))[1] == expected
        pca = dkfm.KernelPCA(2, kernel=name, kernel_params=parameters).fit(X)
        assert pca.kernel_ == dkfm.KernelPCA(2, kernel=kernel).fit(X).kernel_


def test_every_name_of_either_vocabulary_is_a_kernel():
    for name in {*_FACTORIES, *serialization.list_named_kernels()} - {"constant"}:
        assert isinstance(from_name(name, {}), kernels.Kernel)
    assert from_name("constant", {"value": 2.0}) == kernels.Constant(2.0)


@pytest.mark.parametrize(
    ("name", "parameters", "words"),
    [
        (
            "polynomial",
            {"gamma": 1.0, "scale": 2.0},
            "learn's parameters degree, gamma, coef0, or dkfm's degree",
        ),
        ("laplacian", {"width": 1.0}, "scikit-learn's parameters gamma, or dkfm's sigma, and got width"),
        ("rbf", {"sigma": 1.0}, "'rbf' has the parameter gamma, and got sigma; sigma is one of 'gaussian'"),
        ("gaussian", {"gamma": 1.0}, "'gaussian' has the parameter sigma, and got gamma; gamma is one of 'rbf'"),
        ("gausian", {}, "There is no kernel named 'gausian'; near it: gaussian"),
        ("precomputed", {"sigma": 3}, "^Precomputed has the parameter columns, and got sigma"),
        ("gaussian:sigma=3", {}, "near it: gaussian; only the command line takes parameters after a colon"),
        ("spline", {}, "there are additive_chi2, additive_chi_squared, arc_cosine, "),
    ],
)
def test_mixed_and_unknown_words_are_refused(name, parameters, words):
    with pytest.raises(KernelError, match=words):
        from_name(name, parameters)


def test_parameters_of_kernel_pca_mean_what_they_say_or_are_refused(rng):
    X = rng.normal(size=(30, 3))
    pca = dkfm.KernelPCA(2, kernel="polynomial", degree=2, kernel_params={"scale": 0.5}).fit(X)
    assert pca.kernel_ == kernels.Polynomial(2, 0.5, 0.0)
    with pytest.raises(KernelError, match="or dkfm's degree, scale, offset"):
        dkfm.KernelPCA(2, kernel="polynomial", coef0=2, kernel_params={"scale": 0.5}).fit(X)
    for name in ("gaussian", "matern"):
        with pytest.raises(KernelError, match="gamma belongs to scikit-learn's names"):
            dkfm.KernelPCA(2, kernel=name, gamma=0.1).fit(X)
    assert dkfm.KernelPCA(2, kernel="linear", gamma=0.1).fit(X).kernel_ == kernels.Linear()


@pytest.mark.slow
def test_a_width_that_is_not_given_is_told_and_one_that_is_given_is_not(fit):
    ended, kernel = fit("gaussian")
    assert "no width is given, so it is the median distance" in ended.stderr
    assert repr(kernel) in ended.stdout
    assert "no width" not in fit("gaussian", "sigma=median")[0].stderr
    assert "no width" not in fit("gaussian:sigma=2")[0].stderr
    in_json, same = fit('{"name": "sum", "terms": [{"name": "linear"}, {"name": "gaussian"}]}')
    assert "no width is given, so it is the median distance" in in_json.stderr
    assert same == kernels.Linear() + kernel


def test_a_default_width_is_told_without_its_parameter(fit):
    assert "Gaussian: no width is given, so it is scikit-learn's default" in fit("rbf")[0].stderr


def test_combinations_are_json_on_the_command_line(fit):
    kernel = 0.5 * kernels.Gaussian(2.0) + kernels.Linear() ** 2
    assert fit(json.dumps(serialization.to_config(kernel)))[1] == kernel
    assert "is no kernel in JSON" in fit("{name: gaussian}", ok=False)[0].stderr
    whole = '{"kind": "model", "kernel": {"name": "linear"}}'
    assert 'give the part "kernel"' in fit(whole, ok=False)[0].stderr
    assert "a name, as gaussian:sigma=3, or JSON" in fit("Gaussian(sigma=2.0) + Linear()", ok=False)[0].stderr
    assert "--param belongs to the name of a kernel" in fit('{"name": "linear"}', "sigma=2", ok=False)[0].stderr
    assert "--param belongs to the name of a kernel" in fit("module:function", "sigma=2", ok=False)[0].stderr
