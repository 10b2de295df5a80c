"""All solutions of kernel PCA on the lines of the exactness suite: to 1e-10 of the scores' scale, the peer's to 1e-9.

Compared are components with an eigenvalue above 1e-6 of the largest, up to sign, and up to rotation where eigenvalues
are nearly equal. Where scikit-learn's own centring loses digits, the classical solution tells which side is right.
"""

import conftest
import numpy as np
import pytest
from sklearn.decomposition import KernelPCA as Peer

from benchmarks import exactness
from dkfm import ExactFeatureMap, KernelPCA, kernels
from helpers import oracles

IMAGES = conftest.images_247()
LOSES_DIGITS = {"cubic, badly scaled": 1e-7}
"""Its kernel values span 24 orders of magnitude, and scikit-learn's scores are off by 1e-8."""


def cases(n):
    lines = list(exactness.lines(n, IMAGES))
    scaled = [[] if line.scale == 1 else [pytest.mark.slow] for line in lines]
    return [
        pytest.param(line, n, id=f"{line.name}, {n}", marks=marks) for line, marks in zip(lines, scaled, strict=True)
    ]


def groups(values, near=1e-5):
    """Numbers of components whose eigenvalues are nearly equal: within them only the span is determined."""
    ends = np.flatnonzero(-np.diff(values) > near * values[:-1]) + 1
    return np.split(np.arange(len(values)), ends)


def gap(found, truth, values):
    """The largest difference of scores (training rows, test rows) after each group is turned onto the other."""
    worst = 0.0
    for group in groups(values):
        left, _, right = np.linalg.svd(found[0][:, group].T @ truth[0][:, group])
        worst = max(
            worst, *(np.abs(f[:, group] @ left @ right - t[:, group]).max() for f, t in zip(found, truth, strict=True))
        )
    return worst / np.abs(truth[0]).max()


def rows_of(line, n):
    rows = line.rows[: n + exactness.TEST_ROWS].astype(np.float32).astype(np.float64)
    return rows[:n], rows[n:]


def both(pca, X, Z, q):
    return pca.transform(X)[:, :q], pca.transform(Z)[:, :q]


@pytest.mark.parametrize(("line", "n"), cases(300))
def test_all_solutions_agree(line, n):
    (X, Z), k = rows_of(line, n), line.kernel
    truth = KernelPCA(40, kernel=k).fit(X)
    wide = int((truth.eigenvalues_ >= 1e-6 * truth.eigenvalues_[0]).sum())
    values = truth.eigenvalues_[:wide]
    # A group that is cut in two has no span of its own.
    wide -= len(groups(np.append(values, truth.eigenvalues_[wide:]))[-1]) if wide == 40 else 0
    values, scores = values[:wide], both(truth, X, Z, wide)
    assert wide
    for formulation in ("primal", "dual"):
        found = KernelPCA(40, kernel=k, formulation=formulation).fit(X)
        np.testing.assert_allclose(found.eigenvalues_[:wide], values, rtol=0, atol=1e-12 * values[0])
        assert gap(both(found, X, Z, wide), scores, values) <= 1e-10, formulation
    K, Kz = k(X), k(X, Z)
    assert gap(tuple(oracles.classical_scores(K, G, wide) for G in (K, Kz)), scores, values) <= 1e-10
    peer = Peer(40, kernel="precomputed", eigen_solver="dense").fit(line.peer(X, X))
    theirs = tuple(peer.transform(line.peer(rows, X))[:, :wide] for rows in (X, Z))
    assert gap(theirs, scores, values) <= LOSES_DIGITS.get(line.name, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("line", "n"), cases(1500))
def test_lanczos_finds_what_all_eigenvectors_hold(line, n):
    X, Z = rows_of(line, n)
    truth = KernelPCA(20, kernel=line.kernel, eigen_solver="dense").fit(X)
    found = KernelPCA(20, kernel=line.kernel).fit(X)
    np.testing.assert_allclose(found.eigenvalues_, truth.eigenvalues_, rtol=0, atol=1e-12 * truth.eigenvalues_[0])
    every = KernelPCA(21, kernel=line.kernel, eigen_solver="dense").fit(X).eigenvalues_
    wide = int((truth.eigenvalues_ >= 1e-6 * truth.eigenvalues_[0]).sum())
    wide -= len(groups(every)[-1]) - 1 if wide == 20 and len(groups(every)[-1]) > 1 else 0
    assert wide
    values = truth.eigenvalues_[:wide]
    assert gap(both(found, X, Z, wide), both(truth, X, Z, wide), values) <= 1e-10


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize(
    "kernel",
    [kernels.Linear(), kernels.Polynomial(3, scale=0.3, offset=0.5), kernels.Cosine(), kernels.Gaussian(1.5)],
    ids=repr,
)
def test_the_primal_solution_of_a_singular_gram_matrix_has_its_eigenvectors(kernel, centered, rng):
    X = rng.normal(size=(50, 3))
    X, weights = np.vstack([X, X[:10]]), rng.uniform(0.5, 2.0, 60)  # of rank 50 at most
    options = {"kernel": kernel, "centered": centered, "fit_inverse_transform": True}
    primal = KernelPCA(3, formulation="primal", **options)
    scores = primal.fit_transform(X, sample_weight=weights)
    truth = KernelPCA(3, **options).fit(X, sample_weight=weights)
    np.testing.assert_allclose(scores, primal.transform(X), rtol=0, atol=1e-12 * np.abs(scores).max())
    np.testing.assert_allclose(primal.eigenvectors_.T @ primal.eigenvectors_, np.eye(3), rtol=0, atol=1e-12)
    np.testing.assert_allclose(primal.transform(X), truth.transform(X), rtol=0, atol=1e-10 * np.abs(scores).max())
    np.testing.assert_allclose(primal.inverse_transform(scores), truth.inverse_transform(scores), rtol=0, atol=1e-9)
    mapped = KernelPCA.from_map(ExactFeatureMap(kernel, basis="spectral").fit(X), 3, centered=centered)
    vectors, expected = mapped.eigenvectors_, KernelPCA(3, kernel=kernel, centered=centered).fit(X).eigenvectors_
    signs = np.sign((vectors * expected).sum(axis=0))  # those of a map are of its weights
    np.testing.assert_allclose(vectors * signs, expected, rtol=0, atol=1e-10)
