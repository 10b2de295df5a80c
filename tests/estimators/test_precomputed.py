"""A Gram matrix that the user brings gives what the kernel itself gives, through the same estimators."""

import gc
import tempfile

import dask.array as da
import numpy as np
import pytest
import zarr
from scipy import sparse

import dkfm
from dkfm import kernels
from dkfm.errors import CertificateError, InvalidInputError, KernelError, NotPSDError

KERNEL = kernels.Gaussian(2.0)


@pytest.fixture
def points(rng):
    return rng.normal(size=(60, 4)), rng.normal(size=(13, 4))


def unknown_lengths(K):
    lazy = da.from_array(K)
    return lazy[lazy[:, 0] > 0.5]


def given(values, form, tmp_path):
    if form == "dask":
        return da.from_array(values, chunks=(17, 23))
    if form == "zarr":
        return zarr.create_array(tmp_path / "given.zarr", data=values, chunks=(20, 20), overwrite=True)
    return values


@pytest.mark.parametrize("form", ["array", "dask", "zarr"])
@pytest.mark.parametrize("basis", ["symmetric", "spectral"])
def test_a_map_of_a_given_gram_is_the_map_of_its_kernel(form, basis, points, tmp_path):
    X, Z = points
    truth = dkfm.ExactFeatureMap(KERNEL, basis=basis).fit(X)
    phi = dkfm.ExactFeatureMap("precomputed", basis=basis).fit(given(KERNEL(X), form, tmp_path))
    found = phi.transform(given(KERNEL(Z, X), form, tmp_path))
    np.testing.assert_allclose(np.asarray(found), truth.transform(Z), rtol=0, atol=1e-9)
    residual = phi.residual(given(KERNEL(Z, X), form, tmp_path), diag=KERNEL.diag(Z))
    np.testing.assert_allclose(np.asarray(residual), truth.residual(Z), rtol=0, atol=1e-10)
    assert phi.rank_ == truth.rank_
    assert phi.certificate_.error < 1e-12
    assert phi.n_features_in_ == 60
    np.testing.assert_array_equal(phi.model_.landmarks[:, 0], np.arange(60))


@pytest.mark.parametrize("form", ["array", "dask", "zarr"])
def test_components_of_a_given_gram_are_scikit_learns(form, points, tmp_path):
    from sklearn.decomposition import KernelPCA

    X, Z = points
    for k in (KERNEL, kernels.NegativeSquaredDistance()):
        theirs = KernelPCA(3, kernel="precomputed", eigen_solver="dense").fit(k(X))
        pca = dkfm.KernelPCA(3, kernel="precomputed").fit(given(k(X), form, tmp_path / k.__class__.__name__))
        np.testing.assert_allclose(pca.eigenvalues_, theirs.eigenvalues_, rtol=1e-10)
        np.testing.assert_allclose(np.abs(pca.transform(k(Z, X))), np.abs(theirs.transform(k(Z, X))), atol=1e-10)
        assert pca.certificate_.error < 1e-13


def test_a_model_of_a_given_gram_is_saved_scored_and_verified(points, tmp_path):
    X, Z = points
    K, block = KERNEL(X), KERNEL(Z, X)
    phi = dkfm.ExactFeatureMap("precomputed").fit(K)
    phi.save(tmp_path / "model")
    loaded = dkfm.load(tmp_path / "model")
    np.testing.assert_array_equal(loaded.transform(block), phi.transform(block))
    dkfm.batch_score(tmp_path / "model", block, tmp_path / "out", progress=False)
    np.testing.assert_allclose(dkfm.open_scores(tmp_path / "out").compute(), phi.transform(block), rtol=0, atol=1e-12)
    assert loaded.verify(K).certificate.error < 1e-12
    with pytest.raises(InvalidInputError, match="keeps no Gram matrix; give it"):
        loaded.verify()
    with pytest.raises(CertificateError):
        loaded.verify(K * (1 + 1e-6))
    with pytest.raises(InvalidInputError, match="needs k\\(z, z\\)"):
        dkfm.batch_score(tmp_path / "model", block, tmp_path / "r", output="residual", progress=False)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    ("make", "outputs"),
    [
        (lambda **o: dkfm.KernelPCA(3, **o), None),
        (lambda **o: dkfm.ExactFeatureMap(basis="cholesky", **o), None),
        (dkfm.KernelFisher, ["scores", "predict", "predict_proba"]),
        (lambda **o: dkfm.KernelRidge(0.1, **o), None),
    ],
)
def test_scores_of_a_given_gram_are_verified_against_their_input(make, outputs, dtype, points, tmp_path):
    X, Z = points
    values, y = KERNEL(Z, X), (X[:, 0] > 0).astype(int)
    estimator = make(kernel="precomputed", dtype=dtype)
    estimator.fit(KERNEL(X), y)
    estimator.save(tmp_path / "model")
    dkfm.batch_score(tmp_path / "model", values, tmp_path / "out", output=outputs, progress=False)
    found = dkfm.verify_scores(tmp_path / "out", values)
    assert found.sampled == 13
    assert found.worst < 0.1
    other = values.copy()
    other[5] *= 2  # in float32 rounding allows 64 units of each weight
    with pytest.raises(CertificateError, match="of row 5 in"):
        dkfm.verify_scores(tmp_path / "out", other)


def test_components_of_a_given_gram_are_verified_against_it(points):
    K = KERNEL(points[0])
    pca = dkfm.KernelPCA(3, kernel="precomputed").fit(K)
    assert pca.verify(K).certificate.error < 1e-13
    with pytest.raises(CertificateError, match="or the Gram matrix is not that of the fit"):
        pca.verify(K + 1e-6 * np.outer(np.arange(60), np.arange(60)))


def test_the_user_s_matrix_is_left_as_it_was(points):
    K = KERNEL(points[0])
    before = K.copy()
    dkfm.KernelPCA(2, kernel="precomputed").fit(K)
    np.testing.assert_array_equal(K, before)
    F = np.asfortranarray(K)
    dkfm.ExactFeatureMap("precomputed").fit(F)
    np.testing.assert_array_equal(F, before)


def test_a_graph_of_a_gram_is_computed_once(points):
    calls = []

    def seen(block):
        calls.append(len(block))
        return block

    K = KERNEL(points[0])
    lazy = da.from_array(K, chunks=(7, 60)).map_blocks(seen, dtype=float, meta=np.empty((0, 0)))
    dkfm.KernelPCA(2, kernel="precomputed").fit(lazy)
    assert sum(calls) == 60
    with pytest.raises(InvalidInputError, match="row 40 contains NaN"):
        dkfm.KernelPCA(2, kernel="precomputed").fit(da.from_array(np.where(np.arange(60) == 40, np.nan, K).T, chunks=7))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda K: K[:, :5], InvalidInputError, r"square; the shape of this is \(60, 5\)"),
        (lambda K: K + np.triu(np.ones_like(K), 1), InvalidInputError, "not symmetric: its values at"),
        (lambda K: np.where(np.eye(60), np.nan, K), InvalidInputError, "row 0 contains NaN"),
        (lambda K: K - np.eye(60) * 0.9, NotPSDError, "lambda_min"),
        (unknown_lengths, InvalidInputError, "known lengths"),
        (sparse.csr_array, InvalidInputError, "dense rows"),
    ],
)
def test_what_is_no_gram_matrix_is_refused(make, error, words, points):
    with pytest.raises(error, match=words):
        dkfm.ExactFeatureMap("precomputed").fit(make(KERNEL(points[0])))


@pytest.mark.slow
def test_nothing_is_left_of_a_gram_that_was_refused_or_fitted(points, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    K = KERNEL(points[0])
    for wrong in (K[:, :5], np.where(np.eye(60), np.nan, K), K + np.triu(np.ones_like(K), 1)):
        with pytest.raises(InvalidInputError):
            dkfm.KernelPCA(2, kernel="precomputed").fit(da.from_array(wrong, chunks=20))
    lazy = da.concatenate([da.from_array(K[:0]), da.from_array(K, chunks=20)])
    dkfm.KernelPCA(2, kernel="precomputed").fit(lazy)
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_cross_validation_takes_the_same_columns_as_rows(points):
    from sklearn.linear_model import RidgeClassifier
    from sklearn.model_selection import cross_val_score
    from sklearn.pipeline import make_pipeline

    X = points[0]
    y = X[:, 0] > 0
    given = make_pipeline(dkfm.KernelPCA(5, kernel="precomputed"), RidgeClassifier())
    computed = make_pipeline(dkfm.KernelPCA(5, kernel=KERNEL), RidgeClassifier())
    np.testing.assert_array_equal(cross_val_score(given, KERNEL(X), y, cv=3), cross_val_score(computed, X, y, cv=3))


def test_diag_is_asked_for_where_it_is_needed_and_only_there(points):
    X, Z = points
    phi = dkfm.ExactFeatureMap("precomputed").fit(KERNEL(X))
    block = KERNEL(Z, X)
    with pytest.raises(InvalidInputError, match="needs k\\(z, z\\) as diag"):
        phi.residual(block)
    with pytest.raises(InvalidInputError, match=r"of shape \(13,\)"):
        phi.residual(block, diag=np.ones(12))
    diagonal = np.where(np.arange(13) == 8, np.nan, 1.0)
    with pytest.raises(InvalidInputError, match=r"diag must be finite, .*row 8 of X is not"):
        phi.residual(block, diag=diagonal)
    lazy = phi.residual(da.from_array(block, chunks=(5, -1)), diag=diagonal)
    with pytest.raises(InvalidInputError, match=r"diag must be finite, .*row 3 of block 1 of the dask array is not"):
        lazy.compute(scheduler="synchronous")
    with pytest.raises(InvalidInputError, match=r"of shape \(13,\)"):
        phi.residual(da.from_array(block), diag=np.ones(12))
    with pytest.raises(InvalidInputError, match="computes k\\(z, z\\) itself"):
        dkfm.ExactFeatureMap(KERNEL).fit(X).residual(Z, diag=KERNEL.diag(Z))
    with pytest.raises(InvalidInputError, match="expecting 60 features"):
        phi.transform(block[:, :59])
    with pytest.raises(KernelError, match="is there already"):
        dkfm.build_gram("precomputed", KERNEL(X), "nowhere")


def test_the_command_line_fits_a_given_gram(points, tmp_path, monkeypatch):
    from click.testing import CliRunner

    from dkfm.cli.app import main

    monkeypatch.chdir(tmp_path)
    X, Z = points
    np.save(tmp_path / "gram.npy", KERNEL(X))
    np.save(tmp_path / "block.npy", KERNEL(Z, X))
    for command in (
        "fit gram.npy model --kernel precomputed --components 2",
        "score model block.npy out",
        "verify model --against gram.npy",
        "verify out --against block.npy",
    ):
        assert CliRunner().invoke(main, command.split()).exit_code == 0
    truth = dkfm.KernelPCA(2, kernel=KERNEL).fit(X).transform(Z)
    np.testing.assert_allclose(dkfm.open_scores(tmp_path / "out").compute(), truth, rtol=0, atol=1e-10)
