"""Values of composed kernels of float32 rows: their errors stay below what is promised."""

import numpy as np
import pytest

from dkfm import kernels as k
from dkfm.kernels.algebra import needs_float64_block
from dkfm.kernels.pairwise.block_operations import make_mixed_precision_evaluator
from dkfm.kernels.pairwise.distance_effects import FLOAT32_LIMIT, find_squared_cutoff
from dkfm.numerics.model import Model

G = k.Gaussian
ROWS = {
    "normal": lambda rng, n, d: rng.normal(size=(n, d)),
    "pixels": lambda rng, n, d: rng.integers(0, 256, (n, d)).astype(float),
    "mixed lengths": lambda rng, n, d: rng.normal(size=(n, d)) * 10 ** rng.uniform(-4, 4, (n, 1)),
    "tiny": lambda rng, n, d: rng.normal(size=(n, d)) * 1e-9,
    "offset": lambda rng, n, d: 1e4 + rng.normal(size=(n, d)),
    "a zero row": lambda rng, n, d: rng.normal(size=(n, d)) * (np.arange(n) > 0)[:, np.newaxis],
}


def compositions(d: int, s: float) -> list[k.Kernel]:
    cubic, gaussian = k.Polynomial(3, 1 / d, 1.0), G(s)
    return [
        cubic * gaussian,
        gaussian * k.RationalQuadratic(1.0, s) * cubic,
        k.Linear() * (2.0 * k.Exponential(s)) * k.Cosine(),
        k.Polynomial(5, 1 / d) * gaussian,
        gaussian * k.Exponential(s) * k.Matern(1.5, s),
        gaussian * k.Matern(2.5, s) + k.Exponential(s),
        k.Linear() * k.Cosine() * k.Linear(),
        k.Linear() ** 3,
        k.Cosine() ** 5,
        k.Exp(1 / d * k.Linear()),
        k.Exp(s * k.Cosine()),
        k.Exp(2 * gaussian),
        k.PowerSeries(k.Linear(), (1.0, 1 / d, 0.5 / d**2, 0.1 / d**3)),
        k.PowerSeries(gaussian, (0.0, 1.0, 2.0)) + gaussian,
        k.Normalized(cubic),
        k.Normalized(k.Polynomial(5, 1 / d, 0.0)),
        k.Normalized(k.Linear() * gaussian),
        (1 / d * k.Linear() + 1.0) ** 3,
        (2.0 * k.Cosine() + 0.5 * k.Polynomial(2, 1 / d)) ** 2,
        k.Exp(1 / d * k.Linear() + 0.5),
        k.Normalized(k.PowerSeries(k.Linear(), (0.0, 1.0, 1 / d))),
        k.Normalized(k.Exp(k.Cosine())),
        gaussian.warp(k.Affine(2.0, -1e3)),
        (gaussian + k.Exponential(s)).warp(np.tanh),
        k.Polynomial(2, 1 / d).warp(k.Standardize(3.0, 2.0)),
        k.Periodic(3.0, s),
        k.Periodic(1.0, 0.05),
        k.Outer(lambda X: X.sum(axis=1) ** 3),
    ]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("d", [3, 8, 90])
@pytest.mark.parametrize("width", [0.05, 1.0, 20.0])
def test_no_value_errs_by_more_than_is_promised(rows, d, width, rng):
    X, Z = (ROWS[rows](rng, n, d).astype(np.float32) for n in (70, 40))
    Z[:5] = X[:5]
    for kernel in compositions(d, width * np.sqrt(d)):
        with np.errstate(over="ignore"):
            largest = max(kernel.diag(rows.astype(np.float64)).max() for rows in (X, Z))
        if largest > np.finfo(np.float32).max:
            continue
        truth = kernel(Z.astype(np.float64), X.astype(np.float64))
        found = kernel(Z, X)
        assert found.dtype == np.float32
        assert np.abs(found - truth).max() <= FLOAT32_LIMIT * largest + 1e-38, kernel


KNOWN_ERRORS = [
    k.Linear(),
    k.Cosine(),
    k.Polynomial(3, 0.1, 2.0),
    0.3 * k.Linear() + 1.0,
    k.Linear() ** 3,
    k.Linear() * k.Cosine() * k.Polynomial(2, 0.1, 1.0),
    (k.Cosine() + k.Polynomial(2)) ** 2,
    k.PowerSeries(k.Linear(), (1.0, 0.0, 3.0)),
    k.Normalized(k.Polynomial(4, 0.2)),
]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kernel", KNOWN_ERRORS, ids=repr)
def test_errors_are_below_their_share_of_the_lengths(kernel, rows, rng):
    X, Z = (ROWS[rows](rng, n, 90).astype(np.float32) for n in (70, 40))
    wide = X.astype(np.float64), Z.astype(np.float64)
    lengths = [np.sqrt(kernel.diag(rows)) for rows in wide]
    if max(one.max() for one in lengths) > 1e15:
        return  # k(x, x) leaves float32
    errors = np.abs(kernel(X, Z) - kernel(*wide))
    assert kernel.supports_float32
    assert (errors <= kernel.float32_error_share * np.multiply.outer(*lengths) + 1e-38).all()


def test_a_kernel_whose_errors_are_not_known_is_computed_in_float64(rng):
    X = rng.normal(size=(40, 20)).astype(np.float32)
    for kernel in (
        G(3.0) ** 2,
        k.Exp(k.ArcCosine()),
        k.PowerSeries(k.Linear(), [0.5] * 9),
        k.Normalized(k.Polynomial(6)),
    ):
        assert not kernel.supports_float32
        truth = kernel(X.astype(np.float64))
        np.testing.assert_allclose(kernel(X), truth, rtol=1e-7, atol=1e-7 * truth.max())


PRODUCTS = {
    "inner products": lambda d, s: k.Polynomial(3, 1 / d, 1.0) * G(s),
    "three factors": lambda d, s: G(s) * k.Linear() * k.Exponential(s),
    "distances alone": lambda d, s: G(s) * G(2 * s) * k.Matern(2.5, s),
    "too many errors": lambda d, s: k.Polynomial(5, 1 / d) * G(s),
    "four inner products": lambda d, s: k.Cosine() * k.Linear() * k.Polynomial(2, 1 / d),
}
IN_FLOAT64 = ("too many errors", "four inner products")


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("rows", ["normal", "pixels", "mixed lengths", "offset"])
@pytest.mark.parametrize("width", [0.3, 1.0, 20.0])
def test_values_of_products_keep_five_digits_of_the_lengths_of_both_rows(product, rows, width, rng):
    for d in (3, 9, 90):
        X, Z = (ROWS[rows](rng, n, d).astype(np.float32) for n in (70, 40))
        Z[:10] = X[:10] * (1 + 1e-4 * rng.normal(size=(10, d)))  # near pairs, and the others
        kernel, wide = PRODUCTS[product](d, width * np.sqrt(d)), (Z.astype(np.float64), X.astype(np.float64))
        lengths = np.sqrt(np.multiply.outer(*map(kernel.diag, wide)))
        held = lengths < 1e30
        with np.errstate(over="ignore"):
            errors = np.abs(kernel.make_evaluator(X)(Z) - kernel(*wide))
        assert (errors[held] <= 0.5 * FLOAT32_LIMIT * lengths[held] + 1e-37).all()


@pytest.mark.parametrize("product", PRODUCTS)
def test_products_are_computed_in_float64_only_if_float32_does_not_hold_them(product, rng, monkeypatch):
    X, kernel = rng.normal(size=(40, 20)).astype(np.float32), PRODUCTS[product](20, 5.0)
    dtypes, prepare = [], k.Product._prepare_parts

    def note(self, landmarks, form, others):
        dtypes.append(landmarks.dtype.name)
        return prepare(self, landmarks, form, others)

    monkeypatch.setattr(k.Product, "_prepare_parts", note)
    block = kernel.make_evaluator(X)
    block(X)
    assert dtypes == (["float64"] if product in IN_FLOAT64 else ["float32"])
    if product in ("inner products", "three factors"):
        block(X * np.float32(1e18))  # rows whose lengths leave float32
        assert dtypes == ["float32", "float64"]
        kernel.make_evaluator(X * np.float32(1e18))(X)
        assert dtypes == ["float32", "float64", "float64"]


@pytest.mark.parametrize("product", PRODUCTS)
def test_products_of_rows_of_equal_numbers_keep_the_digits_that_are_promised(product, rng):
    X = np.where(rng.random((200, 784)) < 0.15, rng.random((200, 784)), 1.0).astype(np.float32)  # scans of white paper
    for rows, scale in ((X, 100.0), ((X - np.float32(0.13)) / np.float32(0.31), 28.0)):
        kernel, wide = PRODUCTS[product](784, scale), rows.astype(np.float64)
        lengths = np.sqrt(np.multiply.outer(*[kernel.diag(wide)] * 2))
        assert (np.abs(kernel(rows) - kernel(wide)) <= 2 * FLOAT32_LIMIT * lengths).all()


def test_a_product_that_is_computed_in_float64_asks_for_no_diagonal(rng):
    counts = []

    def values(X, Y):
        counts.append(len(X) * len(Y))
        return X @ Y.T

    X = rng.normal(size=(90, 4)).astype(np.float32)
    (k.Function(values) * G(2.0)).make_evaluator(X)(X[:3])
    assert counts == [3 * 90]


def test_rows_that_do_not_fit_float32_are_not_computed_in_it(rng):
    X = rng.normal(size=(20, 3)).astype(np.float32)
    Z, seen = X.copy(), []
    Z[::4] *= np.float32(1e25)

    def in_float32(rows, out=None, /):
        seen.append(np.abs(rows).max())
        return rows @ X.T

    block = make_mixed_precision_evaluator(
        in_float32,
        lambda: lambda rows, out=None: rows @ X.T.astype(np.float64),
        lambda rows: np.abs(rows).max(axis=1) < 100,
        20,
    )
    np.testing.assert_allclose(block(Z), Z.astype(np.float64) @ X.T, rtol=1e-5)
    assert max(seen) < 100


def test_a_model_in_float32_counts_the_landmarks_that_products_need_in_float64(rng):
    heads, X = {}, rng.normal(size=(20, 3))
    copies = [Model(k.Linear() * G(1.0), X.astype(dtype), heads).landmark_copies for dtype in ("float64", "float32")]
    assert copies == [1, 1 + 2 * 2]
    assert Model(G(1.0), X.astype("float32"), heads).landmark_copies == 1


def test_the_memory_of_a_task_counts_the_float64_values_of_products():
    assert needs_float64_block(k.Linear() * k.Cosine())
    assert needs_float64_block(k.Linear() + k.Linear() * G(1.0))
    assert not needs_float64_block(k.Linear() + G(1.0))


def test_rows_that_do_not_fit_change_no_other_row(rng):
    X, Z = (rng.normal(size=(n, 6)).astype(np.float32) for n in (50, 20))
    for kernel, factor in (
        (k.Exp(0.2 * k.Linear()), 9),
        (k.Normalized(k.Polynomial(3)), 1e6),
        (k.Polynomial(2) * k.Linear() * G(9.0), 1e6),
    ):
        together = kernel(np.concatenate([Z[:10], np.float32(factor) * Z[10:]]), X)
        np.testing.assert_allclose(together[:10], kernel(Z[:10], X), rtol=2e-5, atol=1e-6)


def test_what_leaves_float32_only_on_its_way_keeps_its_values(rng):
    X = rng.normal(size=(30, 5)).astype(np.float32)
    far = np.float32(1e14) * X
    for kernel, rows in (
        (k.Normalized(k.Polynomial(3, offset=0.0)), far),
        (k.Normalized(k.Polynomial(3, offset=0.0)), X * np.float32(1e-14)),
        ((1e25 * k.Linear()) * (1e25 * k.Linear()) * (1e-25 * k.Linear()) * (1e-25 * k.Linear()), X),
        (k.PowerSeries(k.Linear(), (0.0, 1e30)), X * np.float32(1e-22)),
        (k.Outer(lambda X: 1e40 * X[:, 0]) * k.Constant(1e-30) * k.Constant(1e-30), X),
        (G(1.0).warp(k.Affine(1e30)), far),
    ):
        truth = kernel(rows.astype(np.float64))
        assert np.isfinite(truth).all()
        assert np.abs(kernel(rows) - truth).max() <= FLOAT32_LIMIT * np.abs(truth).max(), kernel


def test_the_diagonal_of_a_product_whose_factors_leave_float32(rng):
    X, kernel = (
        rng.normal(size=(30, 5)).astype(np.float32),
        (1e25 * k.Linear()) * (1e25 * k.Linear()) * (1e-40 * k.Linear()),
    )
    np.testing.assert_allclose(kernel.diag(X), kernel.diag(X.astype(np.float64)), rtol=1e-6)


def test_numbers_of_outer_that_float32_does_not_hold_are_multiplied_in_float64():
    X = np.array([[1e-30], [1.0], [1e30]])
    kernel = k.Outer(lambda X: X[:, 0] ** 2)
    np.testing.assert_allclose(kernel(X[:1].astype(np.float32), X[2:].astype(np.float32)), [[1.0]], rtol=1e-6)


@pytest.mark.parametrize("outer", [k.Exp, lambda inner: k.PowerSeries(inner, [0.0] * 20 + [1.0])])
def test_series_that_magnify_errors_too_much_are_computed_in_float64(outer, rng):
    X, Z = (1e4 + rng.normal(size=(n, 400)).astype(np.float32) for n in (80, 60))
    kernel = outer(50 / 4e10 * k.Linear())
    truth = kernel(Z.astype(np.float64), X.astype(np.float64))
    assert np.abs(kernel(Z, X) - truth).max() <= 1e-6 * truth.max()


@pytest.mark.parametrize("share", [0.5, 0.1])
def test_a_factor_that_gets_a_share_of_the_limit_recomputes_more_distances(share):
    form = G(0.5).radial_form(8)
    # exp(-s) times the error exceeds a smaller limit up to a larger distance s.
    growth = find_reach(form.limit_error_share(share)) - find_reach(form)
    np.testing.assert_allclose(growth, -np.log(share), rtol=0.1)


def find_reach(form):
    return find_squared_cutoff(form.sensitivity_maps[0][0], 2.0**-14, np.dtype(np.float32))


def test_a_function_of_the_distance_gets_what_the_other_factors_leave_of_the_limit(rng, monkeypatch):
    X, forms, prepare = rng.normal(size=(40, 8)).astype(np.float32), [], k.Product._prepare_parts
    monkeypatch.setattr(k.Product, "_prepare_parts", lambda *given: forms.append(given[2]) or prepare(*given))
    (k.Polynomial(3) * G(0.5)).make_evaluator(X)
    left = 1 - 2 * k.Polynomial(3).float32_error_share / FLOAT32_LIMIT
    assert 0.4 < left < 0.5
    np.testing.assert_allclose(find_reach(forms[0]) - find_reach(G(0.5).radial_form(8)), -np.log(left), rtol=0.1)
