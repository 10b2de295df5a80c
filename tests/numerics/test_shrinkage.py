"""The shrinkage that is chosen, held against a fit of each fold for each shrinkage."""

import tracemalloc
import weakref

import numpy as np
import pytest

from dkfm import KernelFisher, kernels
from dkfm.errors import InvalidInputError
from dkfm.numerics.eigensolvers import dense
from dkfm.numerics.supervised import shrinkage, spectral_gram
from dkfm.numerics.supervised.classes import Classes

KERNELS = [kernels.Gaussian(1.0), kernels.Linear(), kernels.Polynomial(3, offset=1.0), kernels.Exponential(2.0)]
SHARES = {"balanced": [0.25, 0.25, 0.25, 0.25], "unbalanced": [0.6, 0.25, 0.1, 0.05], "two": [0.5, 0.5]}


def draw(shares, seed, n=90):
    rng = np.random.default_rng(seed)
    y = rng.choice(len(shares), n, p=shares)
    return rng.normal(size=(n, 3)) + np.eye(4)[y][:, :3], y


def folds(y):
    """Deal the rows, class by class, to five folds; a row that is alone in its class gets -1."""
    fold, start = np.full(len(y), -1), 0
    for rows in (np.flatnonzero(y == c) for c in np.unique(y)):
        if len(rows) > 1:
            fold[rows] = np.arange(start, start + len(rows)) % 5
            start += len(rows)
    return fold


def predict_directly(K, y, w, held, shares):
    """Linear discriminant analysis in explicit features of the rows that are not held out, by its definition."""
    t, labels = ~held, np.unique(y)
    p, e = w[t] / w[t].sum(), y[t]
    centred = K[:, t] - K[:, t] @ p[:, None]
    centred = centred - p @ centred[t]
    values, V = np.linalg.eigh(np.sqrt(np.outer(p, p)) * centred[t])
    kept = values > 1e-14 * values[-1]
    F = centred @ (np.sqrt(p)[:, None] * V[:, kept] / np.sqrt(values[kept]))
    priors = np.array([p[e == c].sum() for c in labels])
    M = np.array([p[e == c] @ F[t][e == c] for c in labels]) / priors[:, None]
    R = F[t] - M[e]
    S = (p[:, None] * R).T @ R
    for share in shares:
        P = np.linalg.solve(S + share * np.trace(S) / w[t].sum() * np.eye(len(S)), M.T)
        yield (F[held] @ P - np.diag(M @ P) / 2 + np.log(priors)).argmax(axis=1)


def weigh_directly(K, y, w):
    right, fold = np.zeros(len(shrinkage.SHRINKAGE_GRID)), folds(y)
    for held in (fold == k for k in range(fold.max() + 1)):
        for number, codes in enumerate(predict_directly(K, y, w, held, shrinkage.SHRINKAGE_GRID)):
            right[number] += w[held][codes == y[held]].sum()
    return right


def best(right):
    return max(s for s, weight in zip(shrinkage.SHRINKAGE_GRID, right, strict=True) if weight > right.max() - 1e-9)


def decompose(K, classes):
    return spectral_gram.decompose_gram(np.array(K, order="F"), classes, "raise")


def choose(K, classes):
    return shrinkage.choose_shrinkage(decompose(K, classes), classes)


def require_direct_choice(kernel, X, y, w=None):
    K, w = kernel(X, X), np.ones(len(y)) if w is None else w
    classes, right = Classes(y, w, len(np.unique(y))), weigh_directly(K, y, w)
    spectral = decompose(K, classes)
    np.testing.assert_allclose(shrinkage.weigh_correct_predictions(spectral, classes), right, rtol=1e-12)
    for count in (2, 5):
        threaded = shrinkage.weigh_correct_predictions(spectral, classes, count)
        np.testing.assert_array_equal(threaded, shrinkage.weigh_correct_predictions(spectral, classes))
    assert choose(K, classes) == shrinkage.choose_shrinkage_by_folds(K, classes, "raise") == best(right)


@pytest.mark.costly
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize("weighted", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES)
@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_the_closed_form_predicts_what_a_fit_of_each_fold_predicts(kernel, shares, weighted, seed):
    X, y = draw(shares, seed)
    w = np.random.default_rng(seed).uniform(0.2, 5, len(y)) if weighted else None
    require_direct_choice(kernel, X, y, w)


@pytest.mark.parametrize(("way", "threads"), [("_LeftOutRows", 1), ("_LeftOutRows", 3), ("_DecomposedFold", 1)])
def test_a_fold_is_freed_before_there_is_the_next_one(monkeypatch, way, threads):
    X, y = draw(SHARES["balanced"], 0)
    K, classes, seen = kernels.Gaussian(1.0)(X, X), Classes(y, np.ones(90), 4), []
    solve, split = getattr(shrinkage, way).predict_indicators, shrinkage._split_rows

    def predict(fold, ridge):
        seen.append(weakref.ref(fold))
        return solve(fold, ridge)

    def split_and_look(classes):
        for test in split(classes):
            assert not any(other() for other in seen)
            yield test

    monkeypatch.setattr(getattr(shrinkage, way), "predict_indicators", predict)
    monkeypatch.setattr(shrinkage, "_split_rows", split_and_look)
    if way == "_LeftOutRows":
        shrinkage.choose_shrinkage(decompose(K, classes), classes, threads)
    else:
        shrinkage.choose_shrinkage_by_folds(K, classes, "raise")
    assert len(seen) == 5 * len(shrinkage.SHRINKAGE_GRID)
    assert not any(other() for other in seen)


def test_the_memory_of_the_choice_is_what_its_threads_are_counted_by(rng):
    n = 1000
    X, y = rng.normal(size=(n, 3)), np.arange(n) % 3
    classes = Classes(y, np.ones(n), 3)
    spectral = decompose(kernels.Gaussian(1.0)(X, X), classes)
    tracemalloc.start()
    try:
        shrinkage.choose_shrinkage(spectral, classes)
        whole = tracemalloc.get_traced_memory()[1]
        regression = shrinkage._Regression.from_eigenvectors(spectral, classes)
        fold = shrinkage._LeftOutRows(regression, next(iter(shrinkage._split_rows(classes))))
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        fold.predict_indicators(1e-3)
        one = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    square = 8 * n * n
    assert 0.7 * shrinkage._THREAD_SQUARES * square < one < shrinkage._THREAD_SQUARES * square
    assert whole < (shrinkage._SHARED_SQUARES + shrinkage._THREAD_SQUARES) * square


@pytest.mark.costly
@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_rows_given_twice_are_predicted_from_their_copies(kernel):
    X, y = draw(SHARES["balanced"], 0, 60)
    require_direct_choice(kernel, np.vstack([X, X]), np.append(y, y))


@pytest.mark.costly
@pytest.mark.parametrize("n", [12, 40])
def test_more_columns_than_rows_have_as_many_features_as_rows_less_one(n, rng):
    require_direct_choice(kernels.Linear(), rng.normal(size=(n, 60)), np.arange(n) % 3)


@pytest.mark.slow
def test_a_row_that_is_alone_in_its_class_is_never_left_out():
    X, y = draw(SHARES["two"], 0, 41)
    y[-1] = 2
    require_direct_choice(kernels.Linear(), X, y)


@pytest.mark.parametrize("sigma", [1.0, 30.0])
def test_predictions_are_as_exact_as_those_of_a_decomposition_of_each_fold(sigma):
    """Of wide Gaussians the eigenvectors of small eigenvalues are mixed with the one that centring makes zero."""
    X, y = draw(SHARES["balanced"], 0)
    K, classes = kernels.Gaussian(sigma)(X, X), Classes(y, np.ones(len(y)), 4)
    regression = shrinkage._Regression.from_eigenvectors(decompose(K, classes), classes)
    for test in shrinkage._split_rows(classes):
        closed = shrinkage._LeftOutRows(regression, test)
        direct = shrinkage._DecomposedFold.from_gram(K, classes, test, "raise")
        spread = direct.within_class_scatter_trace()
        assert closed.within_class_scatter_trace() == pytest.approx(spread, rel=1e-10)
        for share in (1e-3, 1e-1, 100.0):
            ridge = share * spread / direct.training_classes.total
            for mine, other in zip(closed.predict_indicators(ridge), direct.predict_indicators(ridge), strict=True):
                np.testing.assert_allclose(mine, other, atol=1e-9 / share * np.abs(other).max())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_estimator_chooses_the_same_and_decomposes_once(dtype, weighted, monkeypatch):
    X, y = draw(SHARES["unbalanced"], 4)
    X, w = X.astype(dtype), np.random.default_rng(4).uniform(0.2, 5, len(y)) if weighted else np.ones(len(y))
    kernel, sizes, eigh_in_place = kernels.Gaussian(1.0), [], dense.eigh_in_place
    monkeypatch.setattr(spectral_gram, "eigh_in_place", lambda G: sizes.append(len(G)) or eigh_in_place(G))
    found = KernelFisher(kernel=kernel, shrinkage="auto").fit(X, y, w)
    assert sizes == [90]
    K = kernel(X.astype(np.float64), X.astype(np.float64))
    assert found.shrinkage_ == best(weigh_directly(K, y, w))
    plain = KernelFisher(kernel=kernel, shrinkage=found.shrinkage_).fit(X, y, w)
    tolerance = 1e-9 if dtype == "float64" else 1e-5
    np.testing.assert_allclose(found.transform(X), plain.transform(X), atol=tolerance)


def test_a_kernel_known_to_be_definite_is_decomposed_once_where_a_negative_part_may_be_dropped(monkeypatch):
    X, y = draw(SHARES["balanced"], 0)
    sizes, eigh_in_place = [], dense.eigh_in_place
    monkeypatch.setattr(spectral_gram, "eigh_in_place", lambda G: sizes.append(len(G)) or eigh_in_place(G))
    KernelFisher(kernel=kernels.Gaussian(1.0), shrinkage="auto", on_indefinite="clip").fit(X, y)
    assert sizes == [90]


@pytest.mark.costly
@pytest.mark.parametrize("length", [1.0, 1e4])
def test_rows_beside_which_rounding_spoils_the_others_are_left_out_before_the_decomposition(length, monkeypatch):
    X, y = draw(SHARES["balanced"], 0)
    X[7] *= length
    sizes, eigh_in_place = [], dense.eigh_in_place
    monkeypatch.setattr(spectral_gram, "eigh_in_place", lambda G: sizes.append(len(G)) or eigh_in_place(G))
    found = KernelFisher(kernel=kernels.Polynomial(2), shrinkage="auto").fit(X, y)
    assert len(sizes) == (1 if length == 1 else 5)
    K = np.asfortranarray(kernels.Polynomial(2)(X, X))
    assert found.shrinkage_ == shrinkage.choose_shrinkage_by_folds(K, Classes(y, np.ones(90), 4), "raise")


def test_where_every_shrinkage_is_right_the_largest_is_chosen(rng):
    y = np.repeat([0, 1], 20)
    x = rng.normal(size=(40, 1)) + 100 * y[:, None]
    assert choose(x @ x.T, Classes(y, np.ones(40), 2)) == shrinkage.SHRINKAGE_GRID[-1]


def test_rows_that_predict_nothing_right_ask_for_a_number():
    x = np.array([[0.0], [1.0], [2.0]])
    with pytest.raises(InvalidInputError, match="give it a number"):
        choose(x @ x.T, Classes(np.array([0, 0, 1]), np.ones(3), 2))
