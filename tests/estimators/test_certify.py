"""`certify="sample"` changes no feature, visits as many rows of any data, and claims nothing of the other rows."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.sparse import csr_array
from sklearn.base import clone
from sklearn.linear_model import RidgeClassifier

import dkfm
from dkfm import kernels
from dkfm.errors import InvalidInputError, NotPSDError, NotSupportedError, UnsupportedStoreError
from dkfm.estimators.fitting import feature_maps
from dkfm.estimators.fitting.landmarks import SAMPLED_ROWS

BASES = ["symmetric", "spectral", "cholesky"]
K = kernels.Gaussian(1.5)
BOUNDS = "error_bounds_", "error_bound_", "max_similarity_"
N = SAMPLED_ROWS + 300


def uniform(certify="sample", n_landmarks=20, **options):
    kernel = options.pop("kernel", K)
    return dkfm.ExactFeatureMap(
        kernel, landmarks="uniform", n_landmarks=n_landmarks, certify=certify, random_state=3, **options
    )


@pytest.fixture(scope="module")
def X():
    return np.random.default_rng(0).normal(size=(N, 3))


def require_same_map(sampled, whole):
    """The heads and what is known of landmarks are the same bits."""
    assert sampled.model_.heads.keys() == whole.model_.heads.keys()
    for name, head in whole.model_.heads.items():
        np.testing.assert_array_equal(sampled.model_.head(name).weights, head.weights)
        np.testing.assert_array_equal(sampled.model_.head(name).offset, head.offset)
    names = [name for name in vars(whole) if name.endswith("_") and name not in (*BOUNDS, "training_certificate_")]
    assert {"certificate_", "dropped_", "scales_"} <= set(names)
    for name in set(names) - {"model_", "kernel_"}:
        np.testing.assert_array_equal(getattr(sampled, name), getattr(whole, name), err_msg=name)


def require_only_a_sample(sampled, whole, rows=SAMPLED_ROWS):
    """Nothing that holds for all rows is stated, and what is measured is no worse than what all rows have."""
    assert not any(hasattr(sampled, name) for name in BOUNDS)
    assert all(hasattr(whole, name) for name in BOUNDS)
    found, truth = sampled.training_certificate_, whole.training_certificate_
    assert (found.sampled_rows, truth.sampled_rows) == (rows, None)
    assert found.pairs == 512**2 + rows
    assert 0 < max(found.error, found.relative_error) <= truth.relative_error * (1 + 1e-6) + 1e-13
    assert f"of a random sample of {rows:,} training rows, not of all of them" in str(found)
    assert "sample" not in str(truth)


@pytest.mark.parametrize("options", [{}, {"centered": True}, {"dtype": "float32"}, {"kernel": kernels.Polynomial(6)}])
@pytest.mark.parametrize("basis", BASES)
def test_features_are_the_same_and_the_bound_is_not_known(basis, options, X):
    sampled, whole = (uniform(certify, basis=basis, **options).fit(X) for certify in ("sample", "all"))
    require_same_map(sampled, whole)
    require_only_a_sample(sampled, whole)
    assert sampled.training_certificate_.relative_error > 1e-3  # of rows that are no landmarks


@pytest.mark.parametrize("selector", ["kmeans", "random_pivots", "pivots"])
def test_every_selector_draws_its_landmarks_before_the_sample(selector, X):
    maps = [uniform(certify, basis="spectral").set_params(landmarks=selector).fit(X) for certify in ("sample", "all")]
    require_same_map(*maps)
    require_only_a_sample(*maps)


@pytest.mark.parametrize("landmarks", [np.arange(0, N, 100), np.ones((1, 3))])
def test_given_landmarks_are_certified_on_a_sample(landmarks, X):
    maps = [dkfm.ExactFeatureMap(K, landmarks=landmarks, certify=certify).fit(X) for certify in ("sample", "all")]
    require_same_map(*maps)
    require_only_a_sample(*maps)


@pytest.mark.parametrize("convert", [csr_array, np.float32, lambda X: np.asfortranarray(X)[:, ::-1]])
def test_sparse_float32_and_strided_rows_are_sampled(convert, X):
    rows = convert(X)
    maps = [uniform(certify).fit(rows) for certify in ("sample", "all")]
    require_same_map(*maps)
    require_only_a_sample(*maps)
    kept = maps[0].model_.landmarks.copy()
    (rows.data if isinstance(rows, csr_array) else rows)[:] = 0  # the model owns its landmarks
    np.testing.assert_array_equal(np.asarray((maps[0].model_.landmarks != kept).sum()), 0)


@pytest.mark.costly
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_gram_matrix_is_sampled_in_memory_and_lazily(dtype, X):
    import dask.array as da

    gram = K(X)
    for given in (gram, da.from_array(gram, chunks=500)):
        maps = [uniform(certify, kernel="precomputed", dtype=dtype).fit(given) for certify in ("sample", "all")]
        require_same_map(*maps)
        require_only_a_sample(*maps)
        maps[0].verify(gram)


def test_rows_without_weight_are_not_sampled(X):
    weights = np.r_[np.zeros(100), np.arange(1.0, N - 99)]
    hidden = X.copy()
    hidden[:100] = 1e3
    maps = [uniform(certify, centered=True).fit(hidden, sample_weight=weights) for certify in ("sample", "all")]
    require_same_map(*maps)
    require_only_a_sample(*maps)
    few = np.r_[np.zeros(N - SAMPLED_ROWS), np.ones(SAMPLED_ROWS)]
    assert uniform().fit(X, sample_weight=few).error_bound_ <= 1  # the rows that count are no more than a sample


class Counted(kernels.Kernel):
    """A Gaussian kernel that counts the rows whose values it is asked for."""

    definiteness = kernels.Definiteness.PSD
    visited = 0

    def block(self, X, Y):
        Counted.visited += len(X)
        return K.block(X, Y)

    def evaluate_diagonal(self, X):
        Counted.visited += len(X)
        return K.evaluate_diagonal(X)


def count_visits(certify, X):
    Counted.visited = 0
    uniform(certify, kernel=Counted(), progress=False).fit(X)
    return Counted.visited


def test_the_rows_that_are_visited_do_not_grow_with_the_data(X):
    twice = np.vstack([X, X + 0.1])
    assert count_visits("sample", twice) == count_visits("sample", X)
    assert count_visits("all", twice) > count_visits("all", X) + len(X)


@pytest.mark.parametrize("certify", ["all", "sample"])
def test_the_rank_in_float32_is_measured_on_the_row_that_rounds_most(certify, X, monkeypatch):
    far, measured = X.copy(), []
    far[N - 2] = 40.0  # not among the evenly spread rows

    def rank_in_float32(root, values, *lengths):
        measured.append(values)
        return len(root.values)

    monkeypatch.setattr(feature_maps, "rank_in_float32", rank_in_float32)
    phi = uniform(certify, dtype="float32", kernel=kernels.Polynomial(2)).fit(far)
    of_far_row = phi.kernel_(far[[N - 2]], far[phi.landmark_indices_])
    assert np.isclose(measured[0], of_far_row).all(axis=1).any()


def test_the_sample_depends_on_the_seed_alone(rng):
    X = rng.normal(size=(8 * SAMPLED_ROWS, 3))
    first, again = uniform().fit(X), uniform().fit(X)
    assert first.training_certificate_ == again.training_certificate_
    given = np.arange(20)
    other = [uniform().set_params(landmarks=given, n_landmarks=None, random_state=seed).fit(X) for seed in (0, 1)]
    assert other[0].training_certificate_ != other[1].training_certificate_


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({"landmarks": None, "n_landmarks": None}, N),
        ({"landmarks": np.arange(N)[::-1], "n_landmarks": None}, N),
        ({"landmarks": "pivots", "basis": "cholesky"}, N),
        ({"landmarks": "random_pivots", "basis": "cholesky"}, N),
        ({}, SAMPLED_ROWS),
    ],
)
def test_where_all_rows_are_visited_anyway_a_sample_is_all(options, rows, X):
    sampled, whole = (uniform(certify).set_params(**options).fit(X[:rows]) for certify in ("sample", "all"))
    require_same_map(sampled, whole)
    np.testing.assert_array_equal(sampled.error_bounds_, whole.error_bounds_)
    assert sampled.training_certificate_ == whole.training_certificate_
    assert sampled.max_similarity_ == whole.max_similarity_


@pytest.mark.parametrize("options", [{"tol": 0.1}, {"on_indefinite": "clip"}, {"certify": "some"}, {"certify": None}])
def test_what_needs_all_rows_is_refused(options, X):
    refused = "needs the errors of all training rows|certify must be one of all"
    for chosen in ({}, {"landmarks": None, "n_landmarks": None}):
        with pytest.raises(InvalidInputError, match=refused):
            uniform().set_params(**chosen, **options).fit(X[:30])


def test_a_kernel_that_is_indefinite_on_the_sample_is_refused(X):
    with pytest.raises(NotPSDError):
        uniform(kernel=kernels.Sigmoid(1.0, -1.0)).fit(X)


def test_a_truncated_map_has_a_rank_and_no_bound(X):
    sampled, whole = (uniform(certify, basis="spectral").fit(X) for certify in ("sample", "all"))
    require_same_map(sampled.truncate(5), whole.truncate(5))
    assert not any(hasattr(sampled.truncate(5), name) for name in BOUNDS)
    with pytest.raises(NotSupportedError, match='fit with certify="all"'):
        sampled.truncate(tol=0.5)
    with pytest.raises(AttributeError, match="knows no error bound"):
        _ = sampled.error_bound_


def test_a_second_fit_forgets_the_bound_of_the_first(X):
    phi = uniform("all").fit(X)
    assert hasattr(phi, "error_bound_")
    phi.set_params(certify="sample").fit(X)
    assert not any(hasattr(phi, name) for name in BOUNDS)


@pytest.mark.slow
def test_a_saved_map_says_that_it_was_sampled(X, tmp_path):
    sampled, whole = (uniform(certify).fit(X) for certify in ("sample", "all"))
    for phi, folder in ((sampled, tmp_path / "sampled"), (whole, tmp_path / "whole")):
        phi.save(folder)
        loaded = dkfm.load(folder)
        assert loaded.certify == phi.certify
        assert loaded.training_certificate_ == phi.training_certificate_
        assert [hasattr(loaded, name) for name in BOUNDS] == [hasattr(phi, name) for name in BOUNDS]
        for printed in (phi._repr_html_(), loaded._repr_html_()):
            assert ("random sample of 1,024 training rows, not of all of them" in printed) == (phi is sampled)
            assert ("error bound" in printed, "not known" in printed) == (True, phi is sampled)
    assert clone(sampled).certify == "sample"
    truncated = sampled.truncate(5)
    truncated.save(tmp_path / "truncated")
    assert not hasattr(dkfm.load(tmp_path / "truncated"), "error_bound_")


def test_points_are_measured_and_compared_with_no_bound(X):
    sampled, whole = (uniform(certify).fit(X) for certify in ("sample", "all"))
    found, compared = sampled.verify(X[:50] + 0.1), whole.verify(X[:50] + 0.1)
    assert (found.against, found.between, found.bound) == (compared.against, compared.between, None)
    assert "compared with no bound, for this map knows none" in str(found)
    assert "by their residuals" in str(compared)
    sampled.model_.heads["features"].weights[3, 3] *= 1.01
    with pytest.raises(dkfm.errors.CertificateError):
        sampled.verify()


def without(record, part, name):
    values = {key: value for key, value in getattr(record, part).items() if key != name}
    return replace(record, **{part: values})


def test_a_store_that_hides_or_invents_a_bound_is_refused(X):
    sampled, whole = (uniform(certify).fit(X)._to_record() for certify in ("sample", "all"))
    claimed = replace(sampled, parameters={**sampled.parameters, "certify": "all"})
    bounds, numbers = whole.extra_arrays["error_bounds"], whole.fitted["numbers"]
    invented = replace(
        sampled,
        extra_arrays={**sampled.extra_arrays, "error_bounds": bounds},
        fitted={**sampled.fitted, "numbers": numbers},
    )
    hidden = without(whole, "extra_arrays", "error_bounds")
    neither = replace(hidden, fitted={**hidden.fitted, "numbers": {}})
    for record in (claimed, invented, hidden, neither, replace(neither, parameters=sampled.parameters)):
        with pytest.raises(UnsupportedStoreError, match="do not fit its certificates"):
            dkfm.ExactFeatureMap._from_record(record)
    for count in (0, -1, True, 1.5, None):
        damaged = {**sampled.fitted["certificates"]["training_certificate"], "sampled_rows": count}
        certificates = {**sampled.fitted["certificates"], "training_certificate": damaged}
        with pytest.raises(UnsupportedStoreError, match="certificate of this model is not what dkfm writes"):
            dkfm.ExactFeatureMap._from_record(replace(sampled, fitted={**sampled.fitted, "certificates": certificates}))


def test_components_and_folded_models_of_a_sampled_map_are_those_of_the_map(X):
    y = X[:, 0] > 0
    maps = [uniform(certify).fit(X) for certify in ("sample", "all")]
    components = [dkfm.KernelPCA.from_map(phi, 3, X=X).transform(X[:9]) for phi in maps]
    np.testing.assert_array_equal(*components)
    folded = [dkfm.fold(phi, RidgeClassifier().fit(phi.transform(X), y)).predict(X[:9]) for phi in maps]
    np.testing.assert_array_equal(*folded)


def test_what_the_features_of_new_rows_round_is_no_damage(rng):
    for kernel in (kernels.Linear(), kernels.Cosine()):
        for _ in range(20):
            X = rng.normal(size=(12, 2)) * [1.0, 1e-6]
            dkfm.ExactFeatureMap(kernel, basis="cholesky").fit(X).verify(rng.normal(size=(50, 2)))
