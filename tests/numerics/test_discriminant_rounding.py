"""What rounding of kernel values does to discriminants, against the definition in rational numbers."""

import warnings
from fractions import Fraction
from itertools import combinations_with_replacement
from math import factorial, inf, prod

import numpy as np
import pytest

import dkfm
from dkfm import kernels
from dkfm.numerics.supervised import kernel_rank
from helpers.extended_precision import decide_in_extended_precision
from helpers.recorded import drop_resource_warnings


def list_monomials(kernel, d):
    """Return the monomials of a kernel's features that are not constant, and the square of the factor of each."""
    degree, scale = getattr(kernel, "degree", 1), Fraction(getattr(kernel, "scale", 1.0))
    offset = Fraction(getattr(kernel, "offset", 0.0))
    monomials, squares = [], []
    for columns in combinations_with_replacement(range(d + (offset > 0)), degree):
        counts = np.bincount(columns, minlength=d + 1)
        if counts[:d].any():
            monomials.append([int(column) for column in columns if column < d])
            multinomial = factorial(degree) // prod(factorial(int(count)) for count in counts)
            squares.append(multinomial * scale ** len(monomials[-1]) * offset ** (degree - len(monomials[-1])))
    return monomials, squares


def solve(A, b):
    """Return the solution of a positive definite system of fractions, by Gaussian elimination."""
    A, b = [list(row) for row in A], list(b)
    for i in range(len(b)):
        for j in range(i + 1, len(b)):
            factor = A[j][i] / A[i][i]
            A[j] = [p - factor * q for p, q in zip(A[j], A[i], strict=True)]
            b[j] -= factor * b[i]
    for i in reversed(range(len(b))):
        b[i] = (b[i] - sum(A[i][j] * b[j] for j in range(i + 1, len(b)))) / A[i][i]
    return b


def decide_in_rationals(kernel, X, y, w, Z, shrinkage):
    """Return the decisions between two classes of rows Z, from the covariance of explicit features.

    A feature is a monomial times a root; the squares of the roots go to the ridge, so that all numbers are rational.
    """
    monomials, squares = list_monomials(kernel, X.shape[1])

    def expand(rows):
        exact = [[Fraction(float(value)) for value in row] for row in rows]
        return [
            [prod((row[column] for column in columns), start=Fraction(1)) for columns in monomials] for row in exact
        ]

    P, weights = expand(X), [Fraction(float(weight)) for weight in w]
    total, r, means = sum(weights), range(len(monomials)), []
    for label in (0, 1):
        members = [i for i in range(len(y)) if y[i] == label]
        share = sum(weights[i] for i in members)
        means.append([sum(weights[i] * P[i][a] for i in members) / share for a in r])
    centred = [
        [value - mean for value, mean in zip(row, means[label], strict=True)] for row, label in zip(P, y, strict=True)
    ]
    scatter = [
        [sum(v * row[a] * row[b] for v, row in zip(weights, centred, strict=True)) / total for b in r] for a in r
    ]
    ridge = Fraction(shrinkage) * sum(scatter[a][a] * squares[a] for a in r) / total
    system = [[scatter[a][b] + (ridge / squares[a] if a == b else 0) for b in r] for a in r]
    direction = solve(system, [second - first for first, second in zip(*means, strict=True)])
    middle = sum(u * (p + q) for u, p, q in zip(direction, *means, strict=True)) / 2
    prior = np.log(w[y == 1].sum() / w[y == 0].sum())
    return (
        np.array([float(sum(u * v for u, v in zip(direction, row, strict=True)) - middle) for row in expand(Z)]) + prior
    )


@pytest.mark.parametrize("shrinkage", [1e-5, 1e-6, 1e-8, 1e-10, 1e-12])
@pytest.mark.parametrize("shift", [100.0, 1000.0])
def test_an_eigenvalue_that_rounding_hides_is_in_the_certificate(shift, shrinkage):
    rng = np.random.default_rng(1)
    X, Z = rng.normal(size=(24, 1)), rng.normal(size=(30, 1))
    y, kernel = (np.abs(X[:, 0]) > 0.7).astype(int), kernels.Polynomial(2, 1.0, 1.0)
    X, Z = X + shift, Z + shift  # the second of two eigenvalues is 1e-12 and less of the first
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        fitted = dkfm.KernelFisher(kernel=kernel, shrinkage=shrinkage).fit(X, y)
    expected = decide_in_rationals(kernel, X, y, np.ones(24), Z, shrinkage)
    error = np.abs(fitted.decision_function(Z) - expected).max() / np.abs(expected).max()
    assert error <= 10 * fitted.certificate_.error
    assert error <= 1e-6 or drop_resource_warnings(warned)


@pytest.mark.parametrize("shrinkage", [1e-6, 1e-8])
@pytest.mark.parametrize("sigma", [0.3, 1.0, 3.0])
def test_small_eigenvalues_decide_about_rows_beyond_the_training_rows(sigma, shrinkage):
    kernel = kernels.Gaussian(sigma)
    for seed in range(10):
        rng = np.random.default_rng(seed)
        X, Z = rng.normal(size=(23, 1)), rng.normal(size=(30, 1))
        y, w = (X[:, 0] + 0.5 * rng.normal(size=23) > 0).astype(int), np.ones(23)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            fitted = dkfm.KernelFisher(kernel=kernel, shrinkage=shrinkage).fit(X, y)
        expected = decide_in_extended_precision(kernel(X, X), kernel(Z, X), y, w, shrinkage)
        error = np.abs(fitted.decision_function(Z) - expected).max() / np.abs(expected).max()
        assert error <= max(10 * fitted.certificate_.error, 1e-9)
        assert error <= 1e-5 or drop_resource_warnings(warned)


@pytest.mark.parametrize(
    ("kernel", "weight", "shift", "shrinkage"),
    [
        (kernels.Linear(), 1e6, 0.0, 1e-3),
        (kernels.Linear(), 1e8, 2.5e3, 1e-5),
        (kernels.Polynomial(2), 2.5e7, 0.0, 1e-12),
        (kernels.Polynomial(2, offset=1.0), 1.0, 0.0, 1e-14),
    ],
)
def test_a_kernel_of_known_rank_hides_no_eigenvalue(kernel, weight, shift, shrinkage):
    rng = np.random.default_rng(0)
    y = np.arange(40) % 2
    X, Z = shift + rng.normal(size=(40, 3)) + y[:, np.newaxis] * [1.0, 0.0, 0.0], shift + rng.normal(size=(30, 3))
    w = np.where(np.arange(40) == 0, weight, 1.0)
    fitted = dkfm.KernelFisher(kernel=kernel, shrinkage=shrinkage).fit(X, y, sample_weight=w)
    expected = decide_in_rationals(kernel, X, y, w, Z, shrinkage)
    errors = np.abs(fitted.decision_function(Z) - expected) / np.abs(expected).max()
    assert errors.max() <= 10 * fitted.certificate_.error <= 1e-7


@pytest.mark.parametrize(
    ("kernel", "scale", "shift", "shrinkage", "most", "factor"),
    [
        (kernels.Polynomial(2, offset=1.0), 1.0, 100.0, 1e-8, 1e-3, 4.0),  # eigenvectors mix what they leave out
        (kernels.Polynomial(2, offset=1.0), 1.0, 100.0, 1e-12, 0.1, 5.0),
        (kernels.Linear(), 1e-6, 1e5, 1e-3, 1e-5, 1.0),  # one of two eigenvalues is hidden, among 14 of 0
        (kernels.Polynomial(2, offset=1.0), 1.0, 1e5, 0.1, 5e-6, 1.0),
    ],
)
@pytest.mark.filterwarnings("ignore:The certificate of these scores")  # its size is what is tested
def test_eigenvalues_of_zero_are_left_out_and_their_rounding_is_certified(
    kernel, scale, shift, shrinkage, most, factor
):
    for seed in range(6):
        rng = np.random.default_rng(seed)
        X, Z = (rng.normal(size=(n, 2)) * [1.0, scale] + shift for n in (16, 8))
        y = rng.permutation(16) % 2
        fitted, rows = dkfm.KernelFisher(kernel=kernel, shrinkage=shrinkage).fit(X, y), np.vstack([X, Z])
        expected = decide_in_rationals(kernel, X, y, np.ones(16), rows, shrinkage)
        error = np.abs(fitted.decision_function(rows) - expected).max() / np.abs(expected).max()
        assert error <= min(most, factor * fitted.certificate_.error)


@pytest.mark.parametrize(
    ("kernel", "rank"),
    [
        (kernels.Linear(), 3),
        (2.0 * kernels.Linear() + 5.0, 3),
        (kernels.Polynomial(2), 6),
        (kernels.Polynomial(3, offset=0.5), 19),
        (kernels.Linear().on([0, 2]), 2),
        (kernels.NegativeSquaredDistance(2.0), 3),
        (kernels.NegativeSquaredDistance() * kernels.Linear(), inf),  # no bound is derived for it
        (kernels.Linear().on(0) * kernels.Linear().on(1), 3),
        (kernels.Linear() + kernels.Polynomial(2).on(1), 4),
        ((kernels.Linear() + 1.0) ** 2, 9),
        (kernels.Polynomial(2).warp(kernels.Affine(2.0, [1.0, 0.0, -1.0])), 6),
        (kernels.Gaussian(1.0), inf),
        (kernels.Gaussian(1.0) * kernels.Linear(), inf),
        (kernels.Linear().warp(np.sqrt), inf),
        (kernels.Polynomial(10**6) ** 10, inf),
        (kernels.Function(lambda X, Y: X @ Y.T), inf),
    ],
    ids=str,
)
def test_the_rank_of_a_centred_matrix_is_at_most_its_bound(kernel, rank, rng):
    X = rng.normal(size=(60, 3))
    assert kernel_rank.bound_rank(kernel, X) == (rank, 59)
    assert kernel_rank.bound_rank(kernel, np.repeat(X[:3], 20, axis=0)).of_rows == 2
    if rank < inf:
        K = kernel(X, X)
        K -= K.mean(axis=0)
        assert np.linalg.matrix_rank(K - K.mean(axis=1, keepdims=True), rtol=1e-10) <= rank


def test_a_kernel_of_a_subclass_has_no_bound_but_the_number_of_rows():
    class Other(kernels.Linear):
        """A kernel that is not linear."""

    X = np.random.default_rng(0).normal(size=(5, 3))
    assert kernel_rank.bound_rank(Other(), X) == kernel_rank.bound_rank(Other() + kernels.Linear(), X) == (inf, 4)


def make_dependent_columns(rng):
    """Return rows of two numbers, a constant, and three categories as columns of 0 and 1: an affine space of 4."""
    numbers = rng.normal(size=(60, 2))
    return np.column_stack([numbers, np.full(60, 0.1), np.eye(3)[rng.integers(0, 3, 60)]])


@pytest.mark.parametrize(
    ("kernel", "rank"),
    [
        (kernels.Linear(), 4),
        (kernels.Polynomial(2), 14),
        (kernels.Polynomial(2, offset=1.0), 14),
        (kernels.Linear().on([0, 2]), 2),
        (kernels.Linear().warp(kernels.Affine(2.0, 1.0)), 4),
        (kernels.Cosine(), 6),
    ],
    ids=str,
)
def test_dependent_columns_lower_the_bound(kernel, rank, rng):
    X = make_dependent_columns(rng)
    assert kernel_rank.bound_rank(kernel, X).of_kernel == rank
    K = kernel(X, X) - kernel(X, X).mean(axis=0)
    assert np.linalg.matrix_rank(K - K.mean(axis=1, keepdims=True), rtol=1e-10) <= rank


@pytest.mark.parametrize("shrinkage", [1e-9, 1e-14])
def test_dependent_columns_hide_no_eigenvalue(rng, shrinkage):
    X = make_dependent_columns(rng)
    fitted = dkfm.KernelFisher(kernel=kernels.Linear(), shrinkage=shrinkage).fit(X, X[:, 0] > 0)
    assert fitted.certificate_.error < 1e-12


@pytest.mark.parametrize(
    ("rows", "gap", "shift", "degree", "shrinkage"),
    [(17, 3.3e3, 1e2, 4, 5.5e-8), (21, 7.5e2, 0.0, 4, 1e-4), (21, 2e3, 1e3, 3, 8e-7)],
)
@pytest.mark.filterwarnings("ignore:The certificate of these scores")
def test_the_scale_of_well_separated_scores_is_in_the_certificate(rows, gap, shift, degree, shrinkage):
    """The share of the residual is near 0, and rounding of the matrix changes it most."""
    for seed in range(3):
        X, y = np.random.default_rng(seed).normal(size=(rows, 1)), np.arange(rows) % 2
        X, kernel = X + shift + gap * y[:, np.newaxis], kernels.Polynomial(degree, 1.0, 1.0)
        fitted = dkfm.KernelFisher(kernel=kernel, shrinkage=shrinkage).fit(X, y)
        expected = decide_in_rationals(kernel, X, y, np.ones(rows), X, shrinkage)
        error = np.abs(fitted.decision_function(X) - expected).max() / np.abs(expected).max()
        assert error <= 10 * fitted.certificate_.error
