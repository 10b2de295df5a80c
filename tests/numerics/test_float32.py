"""float32 maps of float64 fits: certified, shifted where that helps, float32 from the model to the output."""

import dask.array as da
import numpy as np
import pytest
import zarr
from zarr.codecs import ZstdCodec

import contracts
import dkfm
from dkfm import kernels
from dkfm.errors import CertificateError, UnsupportedStoreError
from dkfm.numerics.model import Head, Model
from dkfm.scoring import tasks

BASES = ["symmetric", "spectral", "cholesky"]


@pytest.mark.costly
@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize(
    "kernel",
    [
        kernels.Gaussian(1.0),
        pytest.param(kernels.Gaussian(8.0), marks=pytest.mark.slow),
        kernels.Polynomial(3),
        pytest.param(kernels.Linear(), marks=pytest.mark.slow),
    ],
    ids=repr,
)
@pytest.mark.parametrize("centered", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_float32_map_is_exact_to_what_its_certificate_says(basis, kernel, centered, rng, tmp_path):
    X, Z = rng.normal(size=(200, 3)), rng.normal(size=(40, 3))
    double = dkfm.ExactFeatureMap(kernel, basis=basis, centered=centered).fit(X)
    single = dkfm.ExactFeatureMap(kernel, basis=basis, centered=centered, dtype="float32").fit(X)
    assert single.transform(Z).dtype == single.residual(Z).dtype == np.float32
    assert single.model_.dtype == np.float32
    assert single.model_.nbytes < 0.6 * double.model_.nbytes + 100
    assert 1e-9 < single.certificate_.error < 2e-5
    assert single.rank_ <= double.rank_
    truth = double.transform(Z) @ double.transform(X).T
    size = contracts.value_scale(kernel, np.vstack([X, Z]))
    found = single.transform(Z).astype(float) @ single.transform(X).astype(float).T
    assert np.abs(found - truth).max() < 1e-4 * size
    single.verify(Z)
    if not centered:
        contracts.check_scoring(single, Z, rtol=2e-2)  # the last features are half of rounding
    contracts.check_store(single, Z, tmp_path / "single")


@pytest.mark.parametrize("kernel", [kernels.Gaussian(1.0), kernels.Laplacian(2.0), kernels.Matern(1.5) + 0.5], ids=repr)
def test_rows_far_from_zero_are_shifted_before_they_are_rounded(kernel, rng):
    far, Z = rng.normal(size=(100, 6)) + 1e4, rng.normal(size=(30, 6)) + 1e4
    phi = dkfm.ExactFeatureMap(kernel, dtype="float32").fit(far)
    assert phi.model_.shift is not None
    held = phi.model_.shift.astype(np.float32) == phi.model_.shift
    assert held.all() == (phi.model_._exact_shift_in_model_dtype is not None)
    assert phi.certificate_.error < 1e-5
    assert phi.verify(Z).against.error < 1e-4
    lazily = phi.transform(da.from_array(Z, chunks=(7, 6)))
    assert lazily.dtype == np.float32
    np.testing.assert_allclose(lazily.compute(scheduler="synchronous"), phi.transform(Z), atol=1e-5)


def test_rows_that_came_in_float32_are_not_moved(rng):
    X = (rng.normal(size=(100, 1)) * 3).astype(np.float32)
    phi = dkfm.ExactFeatureMap(kernels.Gaussian(1e-4), dtype="float32").fit(X)
    assert phi.model_.shift is None
    assert phi.certificate_.error < 1e-6  # moved, they would be 1e-4 apart from where they were


def test_other_kernels_and_sparse_rows_are_never_moved(rng):
    from scipy.sparse import csr_array

    X = rng.normal(size=(60, 4)) + 1e3
    assert dkfm.ExactFeatureMap(kernels.Linear(), dtype="float32").fit(X).model_.shift is None
    assert dkfm.ExactFeatureMap(kernels.Gaussian(500.0), dtype="float32").fit(csr_array(X)).model_.shift is None
    assert dkfm.ExactFeatureMap(kernels.Gaussian(1.0)).fit(X).model_.shift is None


@pytest.mark.parametrize(
    ("kernel", "invariant"),
    [
        (kernels.Gaussian(), True),
        (kernels.Periodic() * kernels.Laplacian() + 1.0, True),
        (kernels.Exp(kernels.Matern()) ** 2, True),
        (kernels.Gaussian().on([0, 1]), True),
        (kernels.Gaussian().warp(kernels.Affine(2.0, 1.0)), True),
        (kernels.Gaussian().warp(np.sin), False),
        (kernels.Gaussian() + kernels.Linear(), False),
        (kernels.ChiSquared(), False),
        (kernels.Polynomial(2), False),
        (kernels.Function(kernels.Gaussian().block), False),
    ],
    ids=repr,
)
def test_a_kernel_says_whether_an_offset_matters_to_it(kernel, invariant, rng):
    X, Y, c = rng.uniform(size=(9, 3)), rng.uniform(size=(8, 3)), rng.uniform(size=3)
    same = np.allclose(kernel(X + c, Y + c), kernel(X, Y), rtol=1e-10)
    assert kernel.translation_invariant == invariant
    assert same or not invariant


@pytest.mark.costly
@pytest.mark.parametrize("basis", BASES)
def test_batch_scores_are_float32_from_the_task_to_the_reader(basis, rng, tmp_path):
    X, Z = rng.normal(size=(100, 3)), rng.normal(size=(70, 3))
    phi = dkfm.ExactFeatureMap(kernels.Gaussian(1.0), basis=basis, dtype="float32").fit(X)
    report = dkfm.batch_score(phi, Z, tmp_path / "scores", chunk_rows=20, progress=False)
    scores = dkfm.open_scores(tmp_path / "scores")
    assert scores.dtype == np.float32
    assert report.rows == 70
    np.testing.assert_allclose(scores.compute(), phi.transform(Z), atol=1e-4)
    Z[3] = np.nan
    report = dkfm.batch_score(phi, Z, tmp_path / "marked", on_invalid="nan", chunk_rows=20, progress=False)
    assert (report.invalid_rows, int(np.isnan(dkfm.open_scores(tmp_path / "marked").compute()).any(axis=1).sum())) == (
        1,
        1,
    )
    residuals = dkfm.batch_score(phi, X, tmp_path / "residual", output="residual", progress=False)
    assert residuals.rows == 100
    assert dkfm.open_scores(tmp_path / "residual").compute().max() < 1e-4


def test_weights_of_another_precision_are_refused_from_a_store(rng, tmp_path):
    phi = dkfm.ExactFeatureMap(kernels.Gaussian(1.0), basis="spectral").fit(rng.normal(size=(20, 2)))
    model = phi.model_
    rounded = {
        name: Head(head.weights.astype(np.float32), link=head.link, n_leading_columns=head.n_leading_columns)
        for name, head in model.heads.items()
    }
    phi.model_ = Model(model.kernel, model.landmarks, rounded)
    phi.save(tmp_path / "mixed")
    with pytest.raises(UnsupportedStoreError, match="not of the precision of the landmarks"):
        dkfm.load(tmp_path / "mixed")


@pytest.mark.parametrize("basis", BASES)
def test_a_map_that_was_rounded_fails_its_certificate(basis, rng):
    phi = dkfm.ExactFeatureMap(kernels.Gaussian(0.5), basis=basis).fit(rng.normal(size=(100, 2)))
    model = phi.model_
    heads = {
        name: Head(
            h.weights.astype(np.float32).astype(float),
            h.offset,
            h.sqrt_eigenvalues,
            h.link,
            h.triangular,
            h.n_leading_columns,
        )
        for name, h in model.heads.items()
    }
    phi.model_ = Model(model.kernel, model.landmarks, heads)
    with pytest.raises(CertificateError, match="when it was fitted"):
        phi.verify()


@pytest.mark.costly
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_float32_components_are_those_of_float64_up_to_rounding(offset, rng, tmp_path):
    X, Z = rng.normal(size=(300, 6)) + offset, rng.normal(size=(50, 6)) + offset
    double = dkfm.KernelPCA(5, kernel=kernels.Gaussian(3.0)).fit(X)
    single = dkfm.KernelPCA(5, kernel=kernels.Gaussian(3.0), dtype=np.float32).fit(X)
    assert single.model_.shift is not None or offset == 0.0
    truth, found = double.transform(Z), single.transform(Z)
    assert found.dtype == single.fit_transform(X).dtype == np.float32
    assert np.abs(found - truth).max() < 2e-5 * np.abs(truth).max()
    assert 1e-9 < single.certificate_.error < 1e-5
    contracts.check_store(single, Z, tmp_path / "components")
    assert dkfm.load(tmp_path / "components").dtype == "float32"


def test_float32_components_are_cut_where_scikit_learn_cuts_them(rng):
    from sklearn.decomposition import KernelPCA

    X = rng.normal(size=(100, 2))
    theirs = KernelPCA(None, kernel="rbf", gamma=0.125).fit(X.astype(np.float32)).eigenvalues_
    ours = dkfm.KernelPCA(kernel=kernels.Gaussian(2.0), dtype="float32").fit(X).eigenvalues_
    assert len(ours) < len(dkfm.KernelPCA(kernel=kernels.Gaussian(2.0)).fit(X).eigenvalues_)
    assert ours.min() > 2e-7 * ours.max()
    assert abs(len(ours) - len(theirs)) <= 1  # rounding may move the last of them over the cut


@pytest.mark.costly
@pytest.mark.parametrize("output", ["features", "residual"])
@pytest.mark.parametrize(
    "kernel",
    [
        kernels.Gaussian(1.0),
        *(pytest.param(k, marks=pytest.mark.slow) for k in (kernels.Linear(), kernels.Matern(1.5))),
    ],
    ids=repr,
)
@pytest.mark.parametrize("stored", ["rows.npy", "packed.zarr", pytest.param("rows.zarr", marks=pytest.mark.slow)])
def test_rows_stored_in_float32_score_as_those_widened_on_disk(stored, kernel, output, rng, tmp_path, monkeypatch):
    seen, read = set(), tasks._read_rows_and_ids
    monkeypatch.setattr(tasks, "_read_rows_and_ids", lambda *a: seen.add((rows := read(*a))[0].dtype.name) or rows)
    Z = (5 + rng.normal(size=(120, 6))).astype(np.float32)
    phi = dkfm.ExactFeatureMap(kernel, dtype="float32").fit(5 + rng.normal(size=(60, 6)))
    for name, rows in (("as-it-is", Z), ("widened", Z.astype(float))):
        (tmp_path / name).mkdir()
        path = tmp_path / name / stored
        if stored == "rows.npy":
            np.save(path, rows)
        else:
            packed = {} if stored == "rows.zarr" else {"compressors": ZstdCodec()}
            zarr.create_array(path, data=rows, chunks=(100, 6), **packed)
        options = {"output": output, "chunk_rows": 30, "progress": False}
        dkfm.batch_score(phi, path, tmp_path / name / "scores", **options)
    assert seen == {"float32", "float64"}
    found = [dkfm.open_scores(tmp_path / name / "scores").compute() for name in ("as-it-is", "widened")]
    np.testing.assert_array_equal(*found)


def test_a_shift_is_one_that_float32_holds_where_columns_are_wide_beside_its_rounding(rng):
    X = np.hstack([rng.normal(size=(200, 2)) + 1e3, 1e-9 * rng.normal(size=(200, 1)) + 1e3])
    model = dkfm.ExactFeatureMap(kernels.Gaussian((1.0, 1.0, 1e-9)), dtype="float32").fit(X).model_
    assert (model.shift.astype(np.float32) == model.shift).tolist() == [True, True, False]
    Z = X.astype(np.float32)
    np.testing.assert_array_equal(model.prepare_rows(Z), (Z.astype(float) - model.shift).astype(np.float32))
    wide = dkfm.ExactFeatureMap(kernels.Gaussian(1.0), dtype="float32").fit(X[:, :2]).model_
    np.testing.assert_array_equal(wide.prepare_rows(Z[:, :2]), (Z[:, :2].astype(float) - wide.shift).astype(np.float32))
