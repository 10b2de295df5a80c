"""Kernels: the laws for every class and for random expressions, the oracles, and what is refused."""

import numpy as np
import pytest
from scipy.sparse import csr_array
from scipy.spatial.distance import cdist

from dkfm import kernels
from dkfm.errors import InvalidInputError, KernelError
from dkfm.kernels import serialization


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: kernels.Gaussian(0.0), "sigma > 0"),
        (lambda: kernels.Gaussian(-1), "sigma > 0"),
        (lambda: kernels.Gaussian(float("nan")), "finite number"),
        (lambda: kernels.Gaussian("wide"), "finite number"),
        (lambda: kernels.Gaussian(True), "finite number"),
        (lambda: kernels.Gaussian(10**400), "finite number"),
        (lambda: kernels.Gaussian(1e200), "whose square"),
        (lambda: kernels.Gaussian(1e-170), "whose square"),
        (lambda: kernels.Laplacian(0), "sigma > 0"),
        (lambda: kernels.Polynomial(2.5), "positive integer"),
        (lambda: kernels.Polynomial(0), "positive integer"),
        (lambda: kernels.Polynomial(2, offset=-1), "offset >= 0"),
        (lambda: kernels.Polynomial(2, scale=0), "scale > 0"),
        (lambda: -1.0 * kernels.Linear(), "not positive semi-definite"),
        (lambda: kernels.Linear() + -2, "not positive semi-definite"),
        (lambda: kernels.Linear() ** 0.5, "positive integer"),
        (lambda: kernels.Sum(()), "tuple of kernels"),
        (lambda: kernels.Product((1, 2)), "made of kernels"),
        (lambda: kernels.Function(3), "needs a function"),
        (lambda: kernels.Pairwise("rbf"), "needs a function"),
        (lambda: kernels.Outer(None), "needs a function"),
        (lambda: kernels.Gaussian((1.0, -2.0)), "sigma > 0"),
        (lambda: kernels.Gaussian(()), "finite numbers as sigma"),
        (lambda: kernels.Gaussian(("a",)), "finite numbers as sigma"),
        (lambda: kernels.Gaussian((1.0, 1e200)), "whose square"),
        (lambda: kernels.Exponential(None), "finite number as length_scale, or one for each column, or 'median'"),
        (lambda: kernels.Matern(0.0), "nu > 0"),
        (lambda: kernels.Matern(101), "Gaussian is its limit"),
        (lambda: kernels.RationalQuadratic(alpha=0), "alpha > 0"),
        (lambda: kernels.Periodic(period="median"), "finite number as period"),
        (lambda: kernels.ArcCosine(3), "order of 0, 1 or 2"),
        (lambda: kernels.ArcCosine(True), "order of 0, 1 or 2"),
        (lambda: kernels.Sigmoid(-1.0), "scale > 0"),
        (lambda: kernels.ChiSquared(0), "gamma > 0"),
        (lambda: kernels.PowerSeries(kernels.Linear(), (1.0, -1.0)), "negative multiple of a kernel"),
        (lambda: kernels.PowerSeries(kernels.Linear(), ()), "sequence of coefficients"),
        (lambda: kernels.PowerSeries(kernels.Linear(), (np.inf,)), "finite numbers as coefficients"),
        (lambda: kernels.Exp(3), "made of kernels"),
        (lambda: kernels.Normalized(kernels.NegativeSquaredDistance()), "is conditionally positive semi-definite"),
        (lambda: kernels.Linear().warp(kernels.Gaussian()), "an Affine or a function of rows"),
        (lambda: kernels.Function(kernels.Gaussian()), "needs a function"),
        (lambda: kernels.Linear().on((1, 1)), "each column once"),
        (lambda: kernels.Gaussian(np.complex128(2 + 3j)), "finite number"),
        (lambda: kernels.Gaussian(b"ab"), "finite number"),
        (lambda: kernels.Affine(10**400), "finite numbers as scale"),
        (lambda: kernels.PowerSeries(kernels.Linear(), (10**400,)), "finite numbers as coefficients"),
        (lambda: 10**400 * kernels.Linear(), "finite number as weight"),
        (lambda: kernels.Linear() ** 10**400, "positive integer as exponent"),
        (lambda: kernels.Polynomial(2.0), "positive integer as degree, and got 2.0\\.$"),
        (lambda: kernels.ArcCosine(np.array([1, 2])), "order of 0, 1 or 2"),
        (lambda: kernels.Sum((kernels.Linear(),)), "tuple of kernels"),
        (lambda: kernels.Precomputed(5).resolve(np.ones((4, 4))), "another Gram matrix"),
        (lambda: kernels.Linear().warp(3), "an Affine or a function of rows"),
        (lambda: kernels.Affine("wide"), "finite numbers as scale"),
        (lambda: kernels.Affine(1.0, (0.0, np.nan)), "finite numbers as shift"),
        (lambda: kernels.Linear().on(()), "columns by their numbers"),
        (lambda: kernels.Linear().on(-1), "columns by their numbers"),
        (lambda: kernels.Linear().on((0, 1.5)), "columns by their numbers"),
        (lambda: kernels.Linear().on("ab"), "columns by their numbers"),
        (lambda: 2 * kernels.Precomputed(5), "has no points"),
        (lambda: kernels.Precomputed(0), "positive integer as columns"),
    ],
)
def test_what_would_not_be_a_kernel_is_refused(make, words):
    with pytest.raises(KernelError, match=words):
        make()


@pytest.mark.parametrize(
    ("kernel", "X", "words"),
    [
        (kernels.ChiSquared(), [[1.0, 2.0], [3.0, -0.5]], "row 1 has -0.5 in column 1"),
        (kernels.JensenShannon(), [[-1.0]], "no negative numbers"),
        (kernels.Linear().on(4), [[1.0, 2.0]], "takes column 4 and the rows have 2"),
        (
            kernels.Linear().warp(kernels.Affine((1.0, 2.0, 3.0))),
            [[1.0, 2.0]],
            "other columns than these rows",
        ),
        (kernels.Linear().warp(lambda X: X[:1]), [[1.0], [2.0]], "are 1, and must be as many as came, 2"),
        (kernels.Linear().warp(np.log), [[0.0]], "row 0 contains infinity"),
        (kernels.Outer(lambda X: X), [[1.0], [2.0]], r"shape \(2,\) for 2 rows, and returned \(2, 1\)"),
        (kernels.Pairwise(lambda x, y: x), [[1.0, 2.0]], "one number for two rows, and returned 2"),
        (kernels.Pairwise(lambda x, y: "a"), [[1.0, 2.0]], "real numbers"),
        (kernels.Pairwise(lambda x, y: x[:, 0]), [[1.0]], r"IndexError.*belongs in kernels\.Function"),
        (kernels.Function(lambda x, y: 1.0), [[1.0], [2.0]], r"shape \(\).*belongs in kernels\.Pairwise"),
        (kernels.Function(lambda X: X), [[1.0]], "raised TypeError"),
        (kernels.Function(lambda X, Y: [[1.0], [1.0, 2.0]]), [[1.0], [2.0]], "raised ValueError"),
        (kernels.Normalized(kernels.Function(lambda X, Y: -X @ Y.T)), [[1.0, 2.0]], r"k\(x, x\) >= 0"),
        (kernels.Exp(kernels.Linear()), [[100.0]], "returned inf for rows 0 and 0"),
        (kernels.Precomputed(3), [[1.0]], "no points to compare"),
    ],
    ids=repr,
)
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_rows_that_a_kernel_does_not_take_are_refused(kernel, X, words):
    with pytest.raises((KernelError, InvalidInputError), match=words):
        kernel(np.array(X))


def test_definiteness_goes_through_the_algebra():
    psd, conditional, indefinite = kernels.Gaussian(), kernels.NegativeSquaredDistance(), kernels.Sigmoid()
    what = [kernels.Definiteness.PSD, kernels.Definiteness.CONDITIONAL, kernels.Definiteness.INDEFINITE]
    for kernel, index in [
        (psd + psd, 0),
        (psd + conditional, 1),
        (conditional + indefinite, 2),
        (3 * conditional, 1),
        (conditional + 1.0, 1),
        (psd * psd, 0),
        (psd * conditional, 2),
        (psd**3, 0),
        (conditional**3, 2),
        (conditional**1, 1),
        (kernels.PowerSeries(psd, (0.0, 1.0, 2.0)), 0),
        (kernels.PowerSeries(conditional, (0.0, 1.0)), 1),
        (kernels.PowerSeries(conditional, (0.0, 1.0, 2.0)), 2),
        (kernels.Exp(psd), 0),
        (kernels.Exp(conditional), 0),
        (kernels.Exp(indefinite), 2),
        (kernels.Normalized(psd), 0),
        (conditional.on(0), 1),
        (indefinite.warp(np.sin), 2),
    ]:
        assert kernel.definiteness is what[index], kernel


def test_a_repr_is_the_expression_that_builds_the_kernel():
    k = kernels.Gaussian((1.0, 2.0)).on((0, 3)) + 0.5 * (kernels.Linear() + 1.0).warp(kernels.Affine(2, -1)) ** 2
    assert repr(k) == (
        "Gaussian(sigma=(1.0, 2.0)).on((0, 3)) + 0.5 * "
        "(Linear() + Constant(value=1.0)).warp(Affine(scale=2.0, shift=-1.0)) ** 2"
    )
    assert eval(repr(k), vars(kernels)) == k


def test_the_papers_k2_is_one_line(mnist_247):
    k2 = kernels.Polynomial(9, scale=1 / 1568, offset=0.5).warp(kernels.Affine(2, -1))
    X = mnist_247[:20]
    truth = (0.5 * ((2 * X - 1) @ (2 * X - 1).T / 784) + 0.5) ** 9
    np.testing.assert_allclose(k2(X), truth, rtol=1e-13)


@pytest.mark.parametrize(
    ("X", "words"),
    [
        (np.ones(3), "two dimensions"),
        (np.ones((0, 3)), "at least one row"),
        (np.ones((3, 0)), "at least one row"),
        (np.array([[1j]]), "real numbers"),
        (np.array([[object()]]), "real numbers"),
        (np.array([["a"]]), "real numbers"),
        (np.ones((2, 2), np.longdouble), "at most 64 bits"),
        (csr_array([[1.0], [np.nan]]), "row 1 contains NaN"),
        (csr_array([[1j]]), "real numbers"),
        ([[1.0], [2.0, 3.0]], "rows and columns"),
        (np.array([[1.0], [np.nan]]), "row 1 contains NaN"),
        (np.array([[1.0], [2.0], [np.inf]]), "row 2 contains infinity"),
    ],
)
def test_rows_that_are_not_rows_are_refused(X, words):
    with pytest.raises(InvalidInputError, match=words):
        kernels.Linear()(X)


def test_two_widths_are_refused_with_both():
    with pytest.raises(InvalidInputError, match="3 columns and Y has 2"):
        kernels.Linear()(np.ones((1, 3)), np.ones((1, 2)))


def test_large_finite_rows_pass_though_their_sum_overflows():
    assert kernels.Laplacian(1e308)(np.full((2, 2), 8e307)).shape == (2, 2)


@pytest.mark.parametrize("dtype", [np.int8, np.uint64, np.float16, np.bool_])
def test_integers_and_short_floats_are_widened_exactly(dtype, rng):
    X = rng.integers(0, 2, size=(5, 3)).astype(dtype)
    np.testing.assert_array_equal(kernels.Gaussian()(X), kernels.Gaussian()(X.astype(np.float64)))


def test_a_function_is_checked_for_shape_dtype_and_nan():
    X = np.ones((3, 2))
    with pytest.raises(KernelError, match=r"shape \(3, 3\).*returned shape \(3,\)"):
        kernels.Function(lambda X, Y: np.ones(3))(X)
    with pytest.raises(KernelError, match="real numbers"):
        kernels.Function(lambda X, Y: np.ones((3, 3), complex))(X)
    with pytest.raises(KernelError, match="returned nan for rows 0 and 0"):
        kernels.Function(lambda X, Y: np.full((3, 3), np.nan))(X)


def test_a_function_may_keep_and_freeze_what_it_returns():
    kept = np.ones((3, 3))
    kept.flags.writeable = False
    k = 2 * kernels.Function(lambda X, Y: kept)
    assert (k(np.zeros((3, 1))) == 2).all()
    assert (kept == 1).all()


def test_a_function_that_is_not_symmetric_is_refused_with_two_rows(rng):
    A = np.triu(np.ones((3, 3)))
    with pytest.raises(KernelError, match="not symmetric in rows"):
        kernels.Function(lambda X, Y: X @ A @ Y.T)(rng.normal(size=(300, 3)))


def test_a_function_cannot_change_the_rows(rng):
    with pytest.raises(ValueError, match="read-only"):
        kernels.Function(lambda X, Y: np.multiply(X, 2, out=X) @ Y.T)(rng.normal(size=(5, 3)))


def test_a_function_without_a_name_cannot_be_written_to_a_store():
    with pytest.raises(KernelError, match="no other process can import it"):
        serialization.to_config(1.0 + kernels.Function(lambda X, Y: X @ Y.T))


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        ({"name": "gausian"}, "near it: gaussian"),
        ({"name": ["gaussian"]}, "no kernel named"),
        ({"name": "gaussian", "sigma": -1}, "sigma > 0"),
        ({"name": "gaussian", "width": 1}, "parameter sigma, and got width"),
        ({"name": "sum"}, "needs terms"),
        ({"name": "sum", "terms": []}, "tuple of kernels"),
        ({"name": "power", "kernel": 3, "exponent": 2}, "made of kernels"),
        ({}, "with a 'name'"),
        ("gaussian", "with a 'name'"),
    ],
)
def test_a_stored_kernel_that_is_not_one_is_refused(stored, words):
    with pytest.raises(KernelError, match=words):
        serialization.from_config(stored)


def test_a_stored_kernel_nested_beyond_reason_is_refused():
    stored = {"name": "linear"}
    for _ in range(100):
        stored = {"name": "power", "kernel": stored, "exponent": 1}
    with pytest.raises(KernelError, match="nested deeper than 32"):
        serialization.from_config(stored)


@pytest.mark.parametrize("depth", [33, 40, 600, 5000])
def test_json_of_the_command_line_nested_beyond_reason_is_refused(depth):
    in_objects, in_lists = {"name": "linear"}, [{"name": "linear"}]
    for _ in range(depth):
        in_objects, in_lists = {"name": "exp", "kernel": in_objects}, [in_lists]
    for stored in (in_objects, {"name": "sum", "terms": in_lists}):
        with pytest.raises(KernelError, match=r"nested (deeper than|at most) 32"):
            serialization.from_config(serialization.fill_in_median_widths(stored))


def test_a_kernel_that_could_not_be_read_back_is_not_written():
    k = kernels.Linear()
    for _ in range(20):
        k = (0.5 * k + kernels.Gaussian()) ** 2
    with pytest.raises(KernelError, match="nested deeper than 32"):
        serialization.to_config(k)


def test_a_list_nested_beyond_reason_is_refused():
    columns = [0]
    for _ in range(5000):
        columns = [columns]
    with pytest.raises(KernelError, match="nested deeper than 32"):
        serialization.from_config({"name": "columns", "kernel": {"name": "linear"}, "columns": columns})


def test_compiling_in_threads_leaves_numbas_setting_as_it_was(tmp_path):
    numba = pytest.importorskip("numba")
    from concurrent.futures import ThreadPoolExecutor

    from dkfm.kernels.pairwise.columnwise_numba import compile_sum

    before = numba.config.CACHE_DIR
    for round_ in range(10):
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda name, r=round_: compile_sum(name, tmp_path / str(r)), ["absolute", "minimum"] * 2))
    assert before == numba.config.CACHE_DIR


@pytest.mark.parametrize("offset", [0.0, 1.0, 10.0])
def test_narrow_columns_far_from_zero_are_centred_beside_wide_ones_around_it(offset, rng):
    wide, narrow = 1e3 * rng.normal(size=(100, 5)), offset + 1e-3 * rng.normal(size=(200, 3))
    X = np.hstack([np.vstack([wide, -wide]), narrow])
    scale = np.array([1e3] * 5 + [1e-3] * 3)
    truth = np.exp(-cdist(X / scale, X / scale, "sqeuclidean") / 2)
    found = kernels.Gaussian(tuple(scale))(X)
    # What dividing rounds is there in both: half an ulp of offset / 1e-3 in each difference.
    np.testing.assert_allclose(found, truth, rtol=1e-12 + 1e-12 * offset, atol=0)
