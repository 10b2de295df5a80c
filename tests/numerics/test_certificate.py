"""The certificate is able to fail: each kind of damage shows."""

import numpy as np
import pytest

import dkfm
from dkfm import kernels
from dkfm.errors import CertificateError, InvalidInputError, UnsupportedStoreError
from dkfm.numerics import kernel_components, roots, scorer
from dkfm.numerics.certificates.certificate import Certificate, certify_map, sample_evenly
from dkfm.numerics.certificates.components import certify_components
from dkfm.numerics.model import Head, Model

KERNEL = kernels.Gaussian(1.5)


@pytest.fixture
def fitted(rng):
    X = rng.normal(size=(120, 4))
    return Model(KERNEL, X, roots.make_map_heads(roots.inverse_root(np.asfortranarray(KERNEL(X))), "spectral"))


def damaged(model, weights=None, landmarks=None, kernel=None):
    head = model.heads["features"]
    heads = {"features": Head(head.weights if weights is None else weights)}
    return Model(kernel or model.kernel, model.landmarks if landmarks is None else landmarks, heads)


def measured(score, Z=None):
    landmarks = score.model.landmarks
    return certify_map(
        score,
        landmarks[sample_evenly(len(landmarks))],
        Z=Z,
        tiles=[landmarks],
        diagonal=score.model.kernel.diag(landmarks),
    )


def test_an_exact_map_is_certified_on_training_and_on_new_points(fitted, rng):
    for Z in (None, rng.normal(size=(1000, 4))):
        found = measured(scorer.prepare_scorer(fitted), Z)
        assert found.error < 1e-12
        assert found.relative_error < 1e-12
        assert found.pairs == 120 * ((120 if Z is None else 512) + 2)


def test_one_weight_changed_by_a_millionth_fails(fitted):
    weights = fitted.heads["features"].weights.copy()
    i, j = np.unravel_index(np.argmax(np.abs(weights)), weights.shape)
    weights[i, j] *= 1 + 1e-6
    good, bad = measured(scorer.prepare_scorer(fitted)), measured(scorer.prepare_scorer(damaged(fitted, weights)))
    good.require_not_worse_than(good)
    with pytest.raises(CertificateError, match="when it was fitted"):
        bad.require_not_worse_than(good)


def test_moved_landmarks_or_another_kernel_fail(fitted):
    good = measured(scorer.prepare_scorer(fitted))
    moved = fitted.landmarks.copy()
    moved[3] += 1e-6
    for bad in (damaged(fitted, landmarks=moved), damaged(fitted, kernel=kernels.Gaussian(1.5 + 1e-6))):
        with pytest.raises(CertificateError):
            measured(scorer.prepare_scorer(bad)).require_not_worse_than(good)


def test_components_with_a_damaged_offset_or_weight_fail(rng):
    X = rng.normal(size=(80, 3))
    found = kernel_components.solve_components_by_eigh(
        np.asfortranarray(KERNEL(X)), kernel_components.ComponentOptions(4)
    )

    def model(weights, offset):
        return scorer.prepare_scorer(Model(KERNEL, X, {"scores": Head(weights, offset)}))

    good = certify_components(model(found.weights, found.offset), found.eigenvalues, [X])
    assert good.error < 1e-13
    for bad in (model(found.weights, found.offset + 1e-9), model(found.weights * (1 + 1e-6), found.offset)):
        with pytest.raises(CertificateError):
            certify_components(bad, found.eigenvalues, [X]).require_not_worse_than(good)


def test_small_self_similarities_count_in_the_second_number(rng):
    X = rng.normal(size=(50, 30)) * np.logspace(0, -3, 50)[:, None]
    k = kernels.Linear()
    model = Model(k, X, {"features": Head(roots.inverse_root(np.asfortranarray(k(X))).weights * (1 + 1e-9))})
    found = measured(scorer.prepare_scorer(model))
    assert found.relative_error >= found.error > 1e-10


def test_a_zero_kernel_is_exact_and_a_nonzero_answer_to_it_is_not():
    zero = Model(kernels.Linear(), np.zeros((3, 2)), {"features": Head(np.ones((3, 2)))})
    assert measured(scorer.prepare_scorer(zero)) == Certificate(0.0, 0.0, 15)
    wrong = Model(kernels.Linear() + 0.0, np.zeros((3, 2)), {"features": Head(np.ones((3, 1)), np.ones(1))})
    assert measured(scorer.prepare_scorer(wrong)).relative_error > 1e300
    with pytest.raises(CertificateError):
        measured(scorer.prepare_scorer(wrong)).require_not_worse_than(Certificate(0.0, 0.0, 9))


def test_a_certificate_that_is_not_a_number_passes_nothing(fitted):
    good = measured(scorer.prepare_scorer(fitted))
    bad = measured(scorer.prepare_scorer(damaged(fitted, fitted.heads["features"].weights * np.nan)))
    with pytest.raises(CertificateError):
        bad.require_not_worse_than(good)
    with pytest.raises(CertificateError):
        bad.require_error_at_most(1.0)


@pytest.mark.slow
def test_all_components_of_many_rows_are_sampled_in_little_memory(rng):
    import tracemalloc

    X = rng.normal(size=(1500, 3))
    found = kernel_components.solve_components_by_eigh(
        np.asfortranarray(KERNEL(X)), kernel_components.ComponentOptions()
    )
    score = scorer.prepare_scorer(Model(KERNEL, X, {"scores": Head(found.weights, found.offset)}))
    tracemalloc.start()
    certificate = certify_components(score, found.eigenvalues, [X])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert certificate.error < 1e-8  # the last components have 1e-12 of the first one's variance
    assert peak < 8 * 6 * 512 * 1500


def test_points_of_another_width_are_refused(fitted):
    with pytest.raises(InvalidInputError, match="5 columns and the model was fitted with 4"):
        measured(scorer.prepare_scorer(fitted), np.ones((2, 5)))


BASES = ["symmetric", "spectral", "cholesky"]


def with_head(phi, **changes):
    """The map with a part of its model changed."""
    import copy
    from dataclasses import replace

    made, model = copy.copy(phi), phi.model_
    landmarks = changes.pop("landmarks", model.landmarks)
    made.model_ = Model(
        model.kernel, landmarks, {**model.heads, "features": replace(model.heads["features"], **changes)}
    )
    return made


@pytest.mark.costly
@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize(
    ("sigma", "centered"),
    [(0.05, False), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0.5, True), (5.0, False)))],
)
def test_any_single_weight_that_changed_by_a_millionth_fails(basis, sigma, centered, rng):
    # More landmarks than the 512 that are sampled, and a kernel so narrow that hardly any knows another.
    X = rng.normal(size=(620, 2))
    phi = dkfm.ExactFeatureMap(kernels.Gaussian(sigma), basis=basis, centered=centered).fit(X)
    W = phi.model_.heads["features"].weights
    phi.verify()
    # A weight next to nothing can change nothing: of each column the largest.
    for j in rng.integers(0, W.shape[1], size=3):
        changed = W.copy()
        changed[np.abs(W[:, j]).argmax(), j] *= 1 + 1e-6
        with pytest.raises(CertificateError, match="when it was fitted"):
            with_head(phi, weights=changed).verify()


@pytest.mark.costly
@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("options", [{}, {"landmarks": "pivots", "n_landmarks": 60}], ids=["all", "some"])
def test_damaged_landmarks_offsets_and_rotations_fail(basis, options, rng):
    X, Z = rng.normal(size=(600, 3)), rng.normal(size=(90, 3))
    phi = dkfm.ExactFeatureMap(kernels.Gaussian(1.0), basis=basis, centered=True, **options).fit(X)
    phi.verify(Z)
    head, landmarks = phi.model_.heads["features"], phi.model_.landmarks.copy()
    landmarks[7, 1] += 1e-6
    damaged = [with_head(phi, landmarks=landmarks), with_head(phi, offset=head.offset + 1e-9)]
    if head.sqrt_eigenvalues is not None:
        damaged.append(with_head(phi, sqrt_eigenvalues=head.sqrt_eigenvalues * (1 + 1e-9)))
    for bad in damaged:
        with pytest.raises(CertificateError):
            bad.verify()
    phi.mean_ = phi.mean_ * (1 + 1e-6)
    with pytest.raises(CertificateError):
        phi.verify()


def test_new_points_are_measured_with_the_landmarks_and_with_each_other(rng):
    X, Z = rng.normal(size=(300, 3)), rng.normal(size=(700, 3))
    phi = dkfm.ExactFeatureMap(kernels.Gaussian(1.0), landmarks="uniform", n_landmarks=100, random_state=0).fit(X)
    found = phi.verify(Z)
    assert found.certificate == phi.certificate_
    assert found.against.error < 1e-9 < found.between.error <= found.bound + 1e-12
    assert len(found.residuals) == 512
    assert found.bound == found.residuals.max()
    truth = np.abs(phi.transform(Z) @ phi.transform(Z).T - phi.kernel_(Z))
    assert found.between.error <= truth.max() <= phi.residual(Z).max() + 1e-9


def test_new_points_that_a_map_does_worse_than_it_may_fail(rng):
    X, Z = rng.normal(size=(100, 2)), rng.normal(size=(50, 2))
    phi = dkfm.ExactFeatureMap(kernels.Gaussian(0.3), basis="spectral").fit(X)
    phi.error_bounds_ = phi.error_bounds_ * 0 + 1e-12
    phi.verify(Z)
    loose = dkfm.ExactFeatureMap(kernels.Gaussian(0.3), basis="spectral", tol=0.5).fit(X)
    loose.error_bounds_ = loose.error_bounds_ * 0
    with pytest.raises(CertificateError, match="its error bound is"):
        loose.verify(Z)


def test_residuals_that_do_not_explain_the_error_between_new_points_fail(rng):
    from dataclasses import replace

    from dkfm.estimators.stored import feature_map

    X, Z = rng.normal(size=(100, 2)), rng.normal(size=(50, 2))
    phi = dkfm.ExactFeatureMap(kernels.Gaussian(0.3), landmarks="uniform", n_landmarks=10, random_state=0).fit(X)
    residual = phi.model_.heads["residual"]
    heads = {**phi.model_.heads, "residual": replace(residual, weights=1e3 * residual.weights)}  # all clipped at 0
    score = scorer.prepare_scorer(Model(phi.kernel_, phi.model_.landmarks, heads))
    feature_map.verify_points(scorer.prepare_scorer(phi.model_), phi.certificate_, Z, None, 1e-9, 1e-8)
    with pytest.raises(CertificateError):
        feature_map.verify_points(score, phi.certificate_, Z, None, 1e-9, 1e-8)


@pytest.mark.parametrize(
    ("compared", "words"),
    [
        (None, "of each pair's own scale, 1.0e-09 of the largest, 7 pairs"),
        ("components", "of each pair's own scale, 1.0e-09 of the largest, 7 pairs of components"),
        ("predictions", "of each prediction's own scale, 1.0e-09 of the largest, 7 predictions"),
    ],
)
def test_a_certificate_says_what_was_compared_and_keeps_it(compared, words):
    certificate = Certificate(1e-9, 1e-4, 7, compared=compared)
    assert str(certificate) == f"1.0e-04 {words}"
    assert Certificate.from_dict(certificate.to_dict()) == certificate
    assert Certificate(0.0, 0.0, 0).combine(certificate).compared == compared
    with pytest.raises(UnsupportedStoreError):
        Certificate.from_dict({**certificate.to_dict(), "compared": ["components"]})


@pytest.mark.parametrize(
    ("estimator", "compared"),
    [
        (dkfm.ExactFeatureMap(kernels.Gaussian(2.0)), None),
        (dkfm.KernelPCA(kernel=kernels.Gaussian(2.0)), "components"),
        (dkfm.KernelFisher(kernel=kernels.Gaussian(2.0)), "discriminants"),
        (dkfm.KernelRidge(kernel=kernels.Gaussian(2.0)), "predictions"),
        (dkfm.KernelRidgeClassifier(kernel=kernels.Gaussian(2.0)), "predictions"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_certificates_of_fits_say_what_was_compared(estimator, compared, rng, tmp_path):
    X = rng.normal(size=(40, 3))
    fitted = estimator.fit(X, (X[:, 0] > 0).astype(int))
    fitted.save(tmp_path / "model")
    assert fitted.certificate_.compared == compared
    assert dkfm.load(tmp_path / "model").certificate_ == fitted.certificate_
