"""`KernelFisher`: what a user sees of it."""

import pickle

import dask.array as da
import numpy as np
import pytest
from scipy import sparse
from sklearn.base import clone
from sklearn.covariance import EmpiricalCovariance
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.metrics import silhouette_score
from sklearn.model_selection import GridSearchCV

import dkfm
from dkfm import ExactFeatureMap, KernelFisher, kernels
from dkfm.core import cpus
from dkfm.errors import CertificateError, DkfmWarning, InvalidInputError, NotPSDError, UnsupportedStoreError

K1 = kernels.Polynomial(9, scale=1 / 784)


K2 = kernels.Polynomial(9, scale=1 / 1568, offset=0.5).warp(kernels.Affine(2, -1))


BASES = ["symmetric", "spectral", "cholesky"]


class Ridge(EmpiricalCovariance):
    """The covariance and a fixed ridge, which `LinearDiscriminantAnalysis` takes for its own."""

    def __init__(self, ridge=0.0):
        super().__init__(store_precision=False)
        self.ridge = ridge

    def fit(self, X, y=None):
        super().fit(X)
        self.covariance_ = self.covariance_ + self.ridge * np.eye(X.shape[1])
        return self


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("kernel", [kernels.Gaussian(2.0), kernels.Linear()], ids=repr)
def test_it_is_linear_discriminant_analysis_of_the_features_with_the_ridge(kernel, classes, data):
    X, y = data[0], data[1] % classes
    fda = KernelFisher(kernel=kernel, shrinkage=0.1).fit(X[:80], y[:80])
    phi = ExactFeatureMap(kernel, basis="spectral").fit(X[:80])
    lda = LinearDiscriminantAnalysis(solver="eigen", covariance_estimator=Ridge(fda.ridge_))
    lda.fit(phi.transform(X[:80]), y[:80])
    Z = phi.transform(X[80:])
    np.testing.assert_array_equal(fda.predict(X[80:]), lda.predict(Z))
    np.testing.assert_allclose(fda.predict_proba(X[80:]), lda.predict_proba(Z), atol=1e-8)
    np.testing.assert_allclose(fda.predict_log_proba(X[80:]), lda.predict_log_proba(Z), atol=1e-6)
    theirs = lda.transform(Z) - phi.transform(X[:80]).mean(axis=0) @ lda.scalings_[:, : classes - 1]
    mine = fda.transform(X[80:])
    np.testing.assert_allclose(mine, theirs * np.sign((mine * theirs).sum(axis=0)), atol=1e-7)
    np.testing.assert_allclose(fda.explained_variance_ratio_, lda.explained_variance_ratio_[: classes - 1], atol=1e-8)


def test_scikit_learns_shrinkage_of_the_same_ridge_decides_as_it_does(data):
    X, y = data
    fda = KernelFisher(shrinkage=0.5).fit(X, y)
    # (1 - s) S_w + s tr(S_w) / d is (1 - s) times S_w and a ridge; both for s = a / (1 + a), a = shrinkage d / N.
    a = 0.5 * 4 / 120
    lda = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=a / (1 + a)).fit(X, y)
    mine, theirs = fda.decision_function(X), lda.decision_function(X) - np.log(fda.priors_)
    gaps = [v - v.mean(axis=1, keepdims=True) for v in (mine - np.log(fda.priors_), theirs / (1 + a))]
    np.testing.assert_allclose(*gaps, atol=1e-8)


@pytest.fixture(scope="module", params=[(K1, 0.906, 0.31), (K2, 0.978, 0.77)], ids=["k1", "k2"])
def of_digits(request, mnist_247_labelled):
    """The paper's kernels, fitted to 1,500 digits, and what the figures are on 1,482 others."""
    (X, y, *_), (kernel, accuracy, silhouette) = mnist_247_labelled, request.param
    return KernelFisher(kernel=kernel).fit(X, y), accuracy, silhouette


def require_figures(fda, accuracy, silhouette, Z, labels):
    assert fda.score(Z, labels) == pytest.approx(accuracy, abs=5e-4)
    assert silhouette_score(fda.transform(Z), labels) == pytest.approx(silhouette, abs=5e-3)
    assert fda.certificate_.error < 1e-9


@pytest.mark.slow
def test_mnist_is_told_apart_as_in_the_papers_figures_3_and_4(of_digits, mnist_247_labelled):
    require_figures(*of_digits, *mnist_247_labelled[2:])


@pytest.mark.slow
@pytest.mark.parametrize("basis", BASES)
def test_mnist_is_told_apart_the_same_in_every_basis(basis, of_digits, mnist_247_labelled):
    (fda, accuracy, silhouette), (X, y, Z, labels) = of_digits, mnist_247_labelled
    phi = ExactFeatureMap(fda.kernel_, basis=basis).fit(X)
    same = KernelFisher.from_map(phi, y, X)
    require_figures(same, accuracy, silhouette, Z, labels)
    assert same.score(Z, labels) == fda.score(Z, labels)
    np.testing.assert_allclose(same.transform(Z), fda.transform(Z), atol=1e-7)


@pytest.mark.parametrize("basis", BASES)
def test_a_map_has_the_same_discriminants_with_or_without_its_rows(basis, data):
    X, y = data
    fda = KernelFisher(1, kernel=kernels.Gaussian(3.0), shrinkage=0.1).fit(X[:90], y[:90])
    phi = ExactFeatureMap(kernels.Gaussian(3.0), basis=basis).fit(X[:90])
    given = [X[:90]] if basis == "cholesky" else [X[:90], None]
    for rows in given:
        same = KernelFisher.from_map(phi, y[:90], rows, n_components=1, shrinkage=0.1)
        np.testing.assert_allclose(same.transform(X[90:]), fda.transform(X[90:]), atol=1e-8)
        np.testing.assert_allclose(same.decision_function(X[90:]), fda.decision_function(X[90:]), atol=1e-8)
        assert same.ridge_ == pytest.approx(fda.ridge_, rel=1e-10)
        assert same.verify().certificate == same.certificate_


def test_a_map_on_few_landmarks_has_discriminants_of_all_rows(rng):
    X = rng.normal(size=(3000, 2))
    y = np.hypot(*X.T) < 1
    phi = ExactFeatureMap(kernels.Gaussian(0.7), landmarks="uniform", n_landmarks=60, random_state=0).fit(X)
    fda = KernelFisher.from_map(phi, y, X)
    assert fda.model_.landmarks.shape == (60, 2)
    assert fda.score(X, y) > 0.97
    assert fda.classes_.dtype == bool
    with pytest.raises(InvalidInputError, match="labels and X has 60 rows"):
        KernelFisher.from_map(phi, y)
    with pytest.raises(InvalidInputError, match="needs a Gram matrix"):
        KernelFisher.from_map(phi, y, X, shrinkage="auto")


def test_weights_are_repeated_rows_and_rows_without_weight_are_left_out(data, rng):
    X, y = data
    weights = rng.integers(0, 3, 120)
    one = KernelFisher(kernel=kernels.Gaussian(2.0), shrinkage=0.1).fit(X, y, sample_weight=weights)
    two = clone(one).fit(np.repeat(X, weights, axis=0), np.repeat(y, weights))
    np.testing.assert_allclose(one.decision_function(X), two.decision_function(X), atol=1e-8)
    np.testing.assert_allclose(one.transform(X), two.transform(X), atol=1e-8)
    assert one.verify().certificate == one.verified_certificate_
    assert len(one.sample_weight_) == (weights > 0).sum()
    phi = ExactFeatureMap(kernels.Gaussian(2.0), basis="spectral").fit(X)
    of_map = KernelFisher.from_map(phi, y, X, shrinkage=0.1, sample_weight=weights)
    np.testing.assert_allclose(of_map.transform(X), one.transform(X), atol=1e-8)


def test_the_first_component_alone_leaves_predictions_as_they_are(data):
    X, y = data
    whole, one = (KernelFisher(q, kernel="rbf").fit(X, y) for q in (None, 1))
    np.testing.assert_allclose(one.transform(X), whole.transform(X)[:, :1], atol=1e-9)
    np.testing.assert_allclose(one.decision_function(X), whole.decision_function(X), atol=1e-9)
    assert one.explained_variance_ratio_.shape == (1,)


@pytest.mark.parametrize("count", [2, 3])
def test_dask_arrays_are_classified_lazily_with_the_dtype_of_the_labels(count, data):
    X, y = data[0], (data[1] % count).astype(np.uint8)
    fda = KernelFisher(kernel=kernels.Gaussian(2.0)).fit(X, y)
    Z = da.from_array(X, chunks=(50, 2))
    for name in ("transform", "predict", "predict_proba", "predict_log_proba", "decision_function"):
        lazily, here = getattr(fda, name)(Z), getattr(fda, name)(X)
        assert (lazily.shape, lazily.dtype) == (here.shape, here.dtype)
        assert lazily.chunks[0] == (50, 50, 20)
        found = lazily.compute()
        assert found.dtype == here.dtype
        np.testing.assert_allclose(found, here, atol=1e-9)


def test_data_frames_of_dask_give_series_of_labels_and_named_chances(data):
    dd, pd = pytest.importorskip("dask.dataframe"), pytest.importorskip("pandas")
    frame = pd.DataFrame(data[0], columns=list("abcd"))
    names = np.array(["low", "mid", "top"])[data[1]]
    fda = KernelFisher(kernel="rbf").fit(frame, pd.Series(names))
    lazily = dd.from_pandas(frame, npartitions=3)
    labels = fda.predict(lazily).compute()
    assert labels.tolist() == fda.predict(frame).tolist()
    assert labels.index.equals(frame.index)
    chances = fda.predict_proba(lazily).compute()
    assert chances.columns.tolist() == ["predict_proba_low", "predict_proba_mid", "predict_proba_top"]
    np.testing.assert_allclose(chances, fda.predict_proba(frame), atol=1e-9)
    assert fda.transform(lazily).compute().columns.tolist() == ["kernelfisher0", "kernelfisher1"]
    assert fda.decision_function(lazily).compute().shape == (120, 3)
    with pytest.raises(InvalidInputError, match="predict_proba"):
        fda.predict_log_proba(lazily)
    fitted = KernelFisher(kernel="rbf").fit(lazily, da.from_array(data[1]))
    np.testing.assert_allclose(fitted.transform(frame), fda.transform(frame), atol=1e-9)


@pytest.mark.costly
@pytest.mark.parametrize(
    "labels",
    [[7, 2**60, -3], [7.0, -1.0, 1e6], ["b", "a", "ü"], np.array([200, 3, 9], np.uint8)],
    ids=["int", "float", "str", "uint8"],
)
def test_a_saved_model_brings_its_classes_back(labels, data, tmp_path):
    X, y = data[0], np.asarray(labels)[data[1]]
    fda = KernelFisher(2, kernel=kernels.Gaussian(2.0), priors=[0.2, 0.3, 0.5]).fit(X, y)
    fda.save(tmp_path / "m")
    back = dkfm.load(tmp_path / "m")
    assert back.classes_.dtype == fda.classes_.dtype
    for name in ("predict", "transform", "predict_proba"):
        np.testing.assert_array_equal(getattr(back, name)(X), getattr(fda, name)(X))
    assert back.verify().certificate == fda.verified_certificate_
    assert back.certificate_ == fda.certificate_
    assert (back.shrinkage_, back.ridge_) == (fda.shrinkage_, fda.ridge_)
    assert clone(back).fit(X, y).priors_.tolist() == [0.2, 0.3, 0.5]
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(fda)).predict(X), fda.predict(X))


def test_bools_and_objects_that_are_words_are_classes_too(data, tmp_path):
    X = data[0]
    for y in (data[1] > 0, np.array(["x", "yy", "z"], object)[data[1]]):
        fda = KernelFisher(kernel="rbf").fit(X, y)
        fda.save(tmp_path / "m", overwrite=True)
        back = dkfm.load(tmp_path / "m").predict(X)
        assert back.dtype == fda.predict(X).dtype == y.dtype
        assert back.tolist() == fda.predict(X).tolist()


@pytest.mark.parametrize(
    "change",
    [
        {"classes": [0, 1]},
        {"classes": [0, 2, 1]},
        {"classes": [0, 1, "two"]},
        {"classes": [0, 1, True]},
        {"classes": None},
        {"classes_dtype": "O8"},
        {"classes_dtype": "U"},
        {"classes_dtype": "datetime64[s]"},
        {"classes": [0, 1, 2**70]},
    ],
    ids=str,
)
def test_a_strangers_classes_are_refused(change, data, tmp_path):
    fda = KernelFisher(kernel="rbf").fit(*data)
    record = fda._to_record()
    fitted = {**record.fitted, **change}
    with pytest.raises(UnsupportedStoreError):
        KernelFisher._from_record(
            type(record)(record.estimator, record.parameters, fitted, record.extra_arrays, record.model)
        )


@pytest.mark.parametrize(
    ("array", "value"),
    [
        ("priors", np.ones(2)),
        ("ratios", np.ones(1)),
        ("codes", np.zeros(120, np.int64)),
        ("codes", np.zeros(3, np.int64)),
        ("codes", np.zeros(120)),
        ("sample_weight", np.ones(3)),
        ("means", np.ones((2, 2))),
    ],
)
def test_a_strangers_arrays_are_refused(array, value, data):
    record = KernelFisher(kernel="rbf").fit(*data)._to_record()
    arrays = {**record.extra_arrays, array: value}
    with pytest.raises(UnsupportedStoreError):
        KernelFisher._from_record(
            type(record)(record.estimator, record.parameters, record.fitted, arrays, record.model)
        )


@pytest.mark.parametrize("of_map", [False, True])
@pytest.mark.parametrize("head", ["scores", "decision_function"])
@pytest.mark.parametrize("what", ["weights", "offset"])
def test_a_millionth_of_one_number_fails_the_certificate(what, head, of_map, data):
    X, y = data
    kernel = kernels.Gaussian(2.0)
    if of_map:
        fda = KernelFisher.from_map(ExactFeatureMap(kernel, basis="cholesky").fit(X), y, X, shrinkage=1.0)
    else:
        fda = KernelFisher(kernel=kernel, shrinkage=1.0).fit(X, y)
    fda.verify()
    array = getattr(fda.model_.head(head), what)
    array.flat[np.abs(array).argmax()] *= 1 + 1e-6
    with pytest.raises(CertificateError):
        fda.verify()


def test_auto_says_what_it_has_chosen_and_is_the_same_each_time(data):
    X, y = data
    fda = KernelFisher(kernel=kernels.Gaussian(0.5), shrinkage="auto").fit(X, y)
    again = clone(fda).fit(X, y)
    assert fda.shrinkage_ == again.shrinkage_
    np.testing.assert_array_equal(fda.transform(X), again.transform(X))
    plain = KernelFisher(kernel=kernels.Gaussian(0.5), shrinkage=fda.shrinkage_).fit(X, y)
    # A number is solved by Cholesky, and "auto" by eigenvectors, so the two differ by rounding.
    np.testing.assert_allclose(fda.transform(X), plain.transform(X), rtol=1e-12, atol=1e-12)


def test_sparse_rows_and_a_gram_matrix_give_the_same_discriminants(data):
    X, y = data[0] * (np.abs(data[0]) > 0.5), data[1]
    kernel = kernels.Gaussian(2.0)
    fda = KernelFisher(kernel=kernel, shrinkage=0.1).fit(X, y)
    of_sparse = KernelFisher(kernel=kernel, shrinkage=0.1).fit(sparse.csr_array(X), y)
    np.testing.assert_allclose(of_sparse.transform(sparse.csr_array(X)), fda.transform(X), atol=1e-8)
    given = KernelFisher(kernel="precomputed", shrinkage=0.1).fit(kernel(X, X), y)
    np.testing.assert_allclose(given.transform(kernel(X, X)), fda.transform(X), atol=1e-8)
    np.testing.assert_array_equal(given.predict(kernel(X, X)), fda.predict(X))
    assert given.verify(kernel(X, X)).certificate == given.verified_certificate_


def test_float32_is_kept_and_close(data):
    X, y = data[0].astype(np.float32), data[1]
    fda = KernelFisher(kernel=kernels.Gaussian(2.0), shrinkage=1.0).fit(X, y)
    assert fda.transform(X).dtype == fda.predict_proba(X).dtype == np.float32
    truth = KernelFisher(kernel=kernels.Gaussian(2.0), shrinkage=1.0, dtype="float64").fit(X, y)
    np.testing.assert_allclose(fda.transform(X), truth.transform(X), atol=1e-4)


def test_an_indefinite_kernel_is_refused_or_clipped_with_a_warning(data):
    X, y = data
    fda = KernelFisher(kernel=kernels.Sigmoid(scale=0.02, offset=-1.0))
    with pytest.raises(NotPSDError, match="on_indefinite"):
        fda.fit(X, y)
    for shrinkage in (0.1, "auto"):
        with pytest.warns(DkfmWarning, match="negative part is dropped"):
            fda.set_params(on_indefinite="clip", shrinkage=shrinkage).fit(X, y)
        assert fda.score(X, y) > 0.8


def test_several_tiles_and_a_workspace_give_the_same(data, tmp_path):
    X, y = data
    one = KernelFisher(kernel=kernels.Gaussian(2.0)).fit(X, y)
    many = KernelFisher(kernel=kernels.Gaussian(2.0), tile_rows=50, workspace=tmp_path).fit(X, y)
    np.testing.assert_allclose(many.transform(X), one.transform(X), atol=1e-9)
    assert list(tmp_path.glob("gram-*.zarr"))


def test_a_fit_that_memory_does_not_hold_is_refused_before_it_starts(data, monkeypatch):
    monkeypatch.setattr(cpus, "COUNT", 2)
    monkeypatch.setattr("dkfm.execution.memory.clear_caches_and_measure_memory", lambda: 10**6)
    for shrinkage in (1e-3, "auto", 0.0):
        with pytest.raises(MemoryError, match="1 MB"):
            KernelFisher(kernel="rbf", shrinkage=shrinkage).fit(*data)


def test_a_grid_search_goes_over_kernel_and_shrinkage(data):
    search = GridSearchCV(
        KernelFisher(kernel=kernels.Gaussian(1.0)),
        {"kernel__sigma": [0.01, 2.0], "shrinkage": [1e-3, 1e-1]},
        cv=3,
    ).fit(*data)
    assert search.best_params_["kernel__sigma"] == 2.0
