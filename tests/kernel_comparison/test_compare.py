"""Kernels beside each other: figures against plain formulas, and the page in a browser."""

import io
import json
import re
import sys
import tracemalloc
import warnings

import dask.array as da
import numpy as np
import pytest
from sklearn.metrics import silhouette_score
from sklearn.neighbors import KNeighborsClassifier

import dkfm
from dkfm import kernels
from dkfm.cli import option_parsing
from dkfm.core import cpus
from dkfm.errors import BudgetError, DkfmWarning, InvalidInputError, MissingExtraError
from dkfm.kernel_comparison import compare, labelled_rows, tsne_embedding
from helpers.compared_digits import K1, NAMES, Parsed


def multiply_rows(X, Y):
    return X @ Y.T


def figures(comparison):
    return [
        {key: value for key, value in one.to_table_row().items() if key != "seconds"} for one in comparison.compared
    ]


def test_its_figures_are_those_of_plain_formulas(found, rows):
    X, y, Z, t = rows
    t = np.array([f"digit {label}" for label in t])
    for one, (name, kernel) in zip(found.compared, NAMES.items(), strict=True):
        phi = dkfm.ExactFeatureMap(kernel, basis="spectral").fit(X)
        assert (one.name, one.rank, one.condition) == (name, phi.rank_, phi.condition_)
        assert (one.least_similarity, one.most_similarity) == (kernel.diag(X).min(), kernel.diag(X).max())
        # The nearest training row is the same in the span of the training rows: what is beyond is added to all.
        F, G = phi.transform(X), phi.transform(Z)
        assert one.neighbour_accuracy == pytest.approx(KNeighborsClassifier(1).fit(F, y).score(G, t), abs=0.011)
        assert one.silhouette == pytest.approx(silhouette_score(F, y), abs=1e-6)
        fisher = dkfm.KernelFisher(kernel=kernel, shrinkage="auto").fit(X, y)
        assert (one.fisher_accuracy, one.shrinkage) == (fisher.score(Z, t), fisher.shrinkage_)
        assert one.seconds > 0
        assert one.embedding.train.shape == (200, 2)
        assert one.embedding.test.shape == (100, 2)
    assert [line.split()[-1] for line in str(found).splitlines()[1:2]] == ["seconds"]
    assert "200 training rows of 64 columns in 3 classes; 100 test rows." in str(found)


def test_without_test_rows_a_quarter_is_held_out_the_same_each_time(rows):
    X, y = rows[:2]
    first, again, other = (dkfm.compare_kernels([K1], X, y, random_state=seed) for seed in (0, 0, 1))
    assert figures(first) == figures(again)
    assert figures(first) != figures(other)
    assert "150 training rows" in str(first)
    assert "50 test rows, a quarter of all, which were held out at random with the seed 0" in str(first)
    assert first.compared[0].name == repr(K1)


def test_rows_are_the_same_in_memory_in_dask_in_a_file_or_sparse(rows, tmp_path):
    from scipy.sparse import csr_array

    X, y, Z, t = rows
    y = np.char.replace(y, "digit ", "").astype(int)
    np.save(tmp_path / "rows.npy", X)
    truth = figures(dkfm.compare_kernels([kernels.Gaussian(2.0)], X, y, test=Z, test_labels=t))
    for train, test in (
        (da.from_array(X, chunks=(64, 64)), da.from_array(Z, chunks=(30, 64))),
        (tmp_path / "rows.npy", Z),
        (csr_array(X), csr_array(Z)),
    ):
        found = figures(dkfm.compare_kernels([kernels.Gaussian(2.0)], train, y, test=test, test_labels=t))
        for one, other in zip(found[0].values(), truth[0].values(), strict=True):
            assert one == other if isinstance(one, str) else one == pytest.approx(other, rel=1e-9)


def test_of_many_rows_some_are_taken_and_the_words_say_so(rows, monkeypatch, tmp_path):
    X, y, Z, t = rows
    t = np.array([f"digit {label}" for label in t])
    monkeypatch.setattr(labelled_rows, "MAX_TEST_ROWS", 40)
    monkeypatch.setattr(labelled_rows, "MAX_SAMPLE_ROWS", 30)
    monkeypatch.setattr(labelled_rows, "_READ_ROWS", 33)
    np.save(tmp_path / "test.npy", Z)
    kept = [
        dkfm.compare_kernels([K1], X, y, test=test, test_labels=t, embedding=True)
        for test in (Z, da.from_array(Z, chunks=17), tmp_path / "test.npy")
    ]
    assert figures(kept[0]) == figures(kept[1]) == figures(kept[2])
    assert "40 test rows, taken of 100 at random with the seed 0" in str(kept[0])
    assert "Silhouette: of 30 training rows, taken at random" in str(kept[0])
    assert kept[0].compared[0].embedding.train.shape == (30, 2)
    assert kept[0].compared[0].discriminants.shape[0] == 30


@pytest.mark.parametrize("has_test_rows", [False, True])
def test_a_sample_is_compared_as_its_rows_alone(rows, monkeypatch, tmp_path, has_test_rows):
    X, y, Z, t = rows
    monkeypatch.setattr(labelled_rows, "_READ_ROWS", 33)
    np.save(tmp_path / "x.npy", X)
    given = {"test": Z, "test_labels": np.array([f"digit {label}" for label in t])} if has_test_rows else {}
    found = [
        dkfm.compare_kernels([K1], source, y, sample=120, random_state=3, **given)
        for source in (X, da.from_array(X, chunks=17), tmp_path / "x.npy")
    ]
    numbers = np.sort(np.random.default_rng(3).choice(200, 120, replace=False))
    expected = dkfm.compare_kernels([K1], X[numbers], y[numbers], random_state=3, **given)
    assert figures(found[0]) == figures(found[1]) == figures(found[2]) == figures(expected)
    kept = "120 training" if has_test_rows else "90 training"
    origin = "100 test rows." if has_test_rows else "30 test rows, a quarter of the sample, which"
    assert (
        f"{kept} rows of 64 columns in 3 classes, of a sample of 120 of 200 rows drawn with the seed 3; {origin}"
        in str(found[0])
    )
    holed = np.full(X.shape, np.nan)
    holed[numbers] = X[numbers]
    assert figures(dkfm.compare_kernels([K1], holed, y, sample=120, random_state=3, **given)) == figures(expected)
    holed[numbers[5], 2] = np.nan
    with pytest.raises(InvalidInputError, match=rf"row {numbers[5]} contains NaN"):
        dkfm.compare_kernels([K1], holed, y, sample=120, random_state=3, **given)
    whole = dkfm.compare_kernels([K1], X, y, sample=200, **given)
    assert figures(whole) == figures(dkfm.compare_kernels([K1], X, y, **given))
    assert "sample of" not in str(whole)


def test_the_log_of_a_long_comparison_says_how_to_compare_fewer_rows(rows, monkeypatch, caplog):
    caplog.set_level("INFO", "dkfm")
    for limit, is_long in ((600.0, False), (0.0, True)):
        monkeypatch.setattr(compare, "_LONG_SECONDS", limit)
        caplog.clear()
        dkfm.compare_kernels([K1], *rows[:2])
        assert ("in this process; fewer rows with sample= (--sample)" in caplog.text) == is_long


def test_a_kernel_that_makes_no_map_is_left_out_with_its_reason(rows):
    X, y = rows[:2]
    found = dkfm.compare_kernels({"bad": kernels.Sigmoid(1.0, -1.0), "good": K1, "gram": "precomputed"}, X, y)
    assert [one.name for one in found.compared] == ["good"]
    assert "positive semi-definite" in found.refused["bad"]
    assert "no points" in found.refused["gram"]
    assert "bad is left out: " in str(found)
    assert json.loads(found.to_json())["refused"].keys() == {"bad", "gram"}
    with pytest.raises(InvalidInputError, match=r"of these rows; bad: .*definite.*\. gram: .* no points to compare\.$"):
        dkfm.compare_kernels({"bad": kernels.Sigmoid(1.0, -1.0), "gram": "precomputed"}, X, y)


@pytest.mark.filterwarnings("ignore:There are significant negative")
def test_a_kernel_without_its_negative_part_is_compared_by_its_features(rows, monkeypatch):
    X, y, Z, t = rows
    t = np.array([f"digit {label}" for label in t])
    sigmoid, given = kernels.Sigmoid(1.0, -1.0), {"test": Z, "test_labels": t, "shrinkage": 0.1}
    monkeypatch.setattr(compare, "_MAX_BLOCK_VALUES", 200 * 33)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the words tell it, and of which kernel
        found = dkfm.compare_kernels({"k1": K1, "tanh": sigmoid}, X, y, **given, on_indefinite="clip")
    one = found.compared[1]
    phi = dkfm.ExactFeatureMap(sigmoid, basis="spectral", on_indefinite="clip").fit(X)
    fisher = dkfm.KernelFisher(kernel=sigmoid, shrinkage=0.1, on_indefinite="clip").fit(X, y)
    F, G = phi.transform(X), phi.transform(Z)
    assert (one.rank, one.fisher_accuracy) == (phi.rank_, fisher.score(Z, t))
    assert one.neighbour_accuracy == KNeighborsClassifier(1).fit(F, y).score(G, t)
    assert one.silhouette == pytest.approx(silhouette_score(F, y), abs=1e-6)
    assert figures(found)[0] == {**figures(dkfm.compare_kernels([K1], X, y, **given))[0], "kernel": "k1"}
    clause = f"tanh is compared without its negative part: its smallest eigenvalue is {phi.dropped_.min():.3g}, its"
    assert [one.is_clipped for one in found.compared] == [False, True]
    assert clause in str(found)
    assert clause in json.loads(found.to_json())["about"][-1]


def test_a_conditionally_definite_kernel_keeps_its_distances(rows):
    X, y = rows[:2]
    first, second = dkfm.compare_kernels(
        [kernels.NegativeSquaredDistance(), kernels.Linear()], X, y, on_indefinite="clip"
    ).compared
    assert first.is_clipped
    assert not second.is_clipped
    assert first.neighbour_accuracy == second.neighbour_accuracy
    assert first.silhouette == pytest.approx(second.silhouette, rel=1e-9)
    assert first.fisher_accuracy == pytest.approx(second.fisher_accuracy, abs=0.05)


def test_a_negative_part_in_rows_of_small_scale_is_told(rng):
    X = rng.normal(size=(60, 3))
    X[:, 0] = np.arange(60) % 2

    def blocks(A, B):
        inner = A[:, 1:] @ B[:, 1:].T
        large = 1e16 * np.exp(-np.maximum((A**2).sum(axis=1)[:, np.newaxis] + (B**2).sum(axis=1) - 2 * A @ B.T, 0))
        return np.where(A[:, :1] == B[:, 0], np.where(A[:, :1] == 1, large, np.tanh(inner - 1)), 0.0)

    given = {"test": X, "test_labels": X[:, 1] > 0, "shrinkage": 1.0}
    with pytest.warns(DkfmWarning, match="own scale"):
        found = dkfm.compare_kernels({"a": kernels.Function(blocks)}, X, X[:, 1] > 0, **given, on_indefinite="clip")
    assert "a is compared without its negative part" in str(found)


@pytest.mark.filterwarnings("ignore:.*Linear.* is 0 on these rows")
def test_a_page_of_a_map_without_features_has_no_embedding(rng):
    X = rng.normal(size=(20, 3))
    found = dkfm.compare_kernels([kernels.Linear()], X * 1e-200, X[:, 0] > 0, embedding=True)
    assert (found.compared[0].rank, found.compared[0].embedding) == (0, None)


@pytest.mark.parametrize(("factor", "is_told"), [(99.0, False), (101.0, True)])
def test_columns_that_vary_far_less_than_others_are_told(rng, factor, is_told):
    X = rng.permuted(np.tile([1.0, -1.0], (3, 40)), axis=1).T * [1.0, factor, 0.0] + [0.0, 0.0, 0.1]
    given = {"test": X[:9] * [0.0, 1.0, 1.0], "test_labels": X[:9, 0] > 0}
    words = str(dkfm.compare_kernels([kernels.Linear()], X, X[:, 0] > 0, **given))
    clause = "1 of 2 columns that vary have a standard deviation below a hundredth of the largest, 1e+02, so "
    assert (clause in words) == is_told
    scaled = dkfm.compare_kernels([kernels.Linear()], X, X[:, 0] > 0, standardize=True)
    assert "standard deviation" not in str(scaled)


def test_columns_whose_squares_overflow_are_not_told(rng):
    X = rng.normal(size=(80, 2)) * [1.0, 1e200]
    assert "deviation" not in str(dkfm.compare_kernels([kernels.Gaussian(1.0)], X, X[:, 0] > 0, shrinkage=1.0))


def test_a_kernel_without_discriminants_keeps_its_other_figures():
    X, y = np.arange(8.0)[:, np.newaxis], np.arange(8) % 2  # the neighbours of each row are of the other class
    found = dkfm.compare_kernels({"a": kernels.Gaussian(1.0)}, X, y, test=X, test_labels=y)
    one = found.compared[0]
    expected = dkfm.compare_kernels({"a": kernels.Gaussian(1.0)}, X, y, test=X, test_labels=y, shrinkage=1e-3)
    assert not found.refused
    assert np.isnan([one.fisher_accuracy, one.shrinkage]).all()
    assert (one.rank, one.neighbour_accuracy) == (8, expected.compared[0].neighbour_accuracy)
    assert 'a has no discriminants: shrinkage="auto" finds no row' in str(found)
    told = json.loads(found.to_json())
    assert told["kernels"][0]["Fisher_accuracy"] is None
    assert told["about"][-1].startswith("a has no discriminants: ")
    assert "a has no discriminants" in found.to_html()


def test_json_has_kernels_as_the_command_line_takes_them(rows):
    found = json.loads(
        dkfm.compare_kernels([kernels.Gaussian(2.0), kernels.Function(multiply_rows)], *rows[:2]).to_json()
    )["kernels"]
    assert option_parsing.parse_kernel(json.dumps(found[0]["config"])) == kernels.Gaussian(2.0)
    assert found[1]["config"] is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kernels": []}, "at least one"),
        ({"kernels": "linear"}, "a list, or a mapping"),
        ({"y": np.arange(10)}, "labels and X has 200 rows"),
        ({"y": np.zeros(200, int)}, "1 of them"),
        (
            {"y": np.arange(200) // 199},
            r"the class 1 has only one row \(1 of 2 such classes\): give test rows, or more rows of each class\.$",
        ),
        ({"test": np.zeros((5, 64))}, "belong together"),
        ({"test": np.zeros((5, 3)), "test_labels": np.zeros(5)}, "3 columns, and the training rows have 64"),
        ({"test": np.zeros((5, 64)), "test_labels": ["a"] * 4}, "for each of 5 rows, and has 4"),
        ({"test": np.zeros((5, 64)), "test_labels": np.zeros(5, int)}, "of one kind"),
        ({"X": np.full((200, 64), np.nan)}, "NaN"),
        ({"shrinkage": -1.0}, "^shrinkage must be a finite number >= 0"),
        ({"shrinkage": "best"}, "^shrinkage must be a finite number >= 0"),
        ({"on_indefinite": "auto"}, "^on_indefinite must be one of raise, clip, and is 'auto'"),
        ({"embedding": "yes"}, "^embedding must be True or False, and is 'yes'"),
        ({"sample": 0}, "sample must be a positive integer, and is 0"),
        ({"sample": 0.5}, "sample must be a positive integer, and is 0.5"),
        ({"sample": True}, "sample must be a positive integer, and is True"),
        ({"sample": 12, "random_state": -1}, r"random_state must be an integer from 0 to 2\^32 - 1, and is -1"),
        ({"random_state": "a"}, r"random_state must be an integer from 0 to 2\^32 - 1, and is 'a'"),
        ({"X": io.BytesIO(b"1 2")}, "X must hold real numbers"),
    ],
)
def test_what_does_not_fit_is_a_sentence(rows, change, said):
    given = {"kernels": [K1], "X": rows[0], "y": rows[1], **change}
    with pytest.raises(InvalidInputError, match=said):
        dkfm.compare_kernels(**given)


def test_rows_that_are_too_many_for_a_gram_matrix_are_refused_before_they_are_read():
    def never(block_info=None):
        raise AssertionError("a row was read")

    rows = da.map_blocks(never, chunks=((10_000,) * 10, (3,)), dtype=float, meta=np.empty((0, 0)))
    with pytest.raises(BudgetError, match=r"all 75,000 training rows, .* room for .*; compare on a sample of the rows"):
        dkfm.compare_kernels([K1], rows, np.zeros(100_000, int))
    with pytest.raises(AssertionError, match="a row was read"):
        dkfm.compare_kernels([K1], rows, np.zeros(100_000, int), sample=100)


@pytest.mark.slow
def test_an_embedding_keeps_neighbours_together_and_is_the_same_twice(rng):
    labels = np.repeat([0, 1], 40)
    X = rng.normal(size=(80, 5)) + 8 * labels[:, np.newaxis]
    first, again = (tsne_embedding.embed(X, X + 1e-3, random_state=3) for _ in range(2))
    np.testing.assert_array_equal(first.train, again.train)
    np.testing.assert_array_equal(first.test, again.test)
    assert silhouette_score(first.train, labels) > 0.5
    assert (KNeighborsClassifier(1).fit(first.train, labels).predict(first.test) == labels).all()
    for train, test in ((X[:4], X), (X, X[:, :3])):
        with pytest.raises(InvalidInputError, match="at least 5"):
            tsne_embedding.embed(train, test)


@pytest.mark.slow
def test_the_page_needs_nothing_else_and_escapes_what_it_is_given(text):
    parsed = Parsed(text)
    links = [a for _, attrs in parsed.tags for name, a in attrs.items() if name in ("src", "href", "action", "srcset")]
    assert all(link.startswith("data:") for link in links)
    assert not parsed.of("script")
    assert not parsed.of("b")
    assert "wide <b>&" in parsed.cells
    images = parsed.of("img")
    assert len(images) == 4 * len(NAMES)
    assert all(len(image["alt"]) > 20 for image in images)
    assert len(text) < 150_000 * len(images)


@pytest.mark.slow
def test_the_pictures_are_the_same_of_the_same_rows(text, rows):
    X, y, Z, t = rows
    t = np.array([f"digit {label}" for label in t])
    again = dkfm.compare_kernels(NAMES, X, y, test=Z, test_labels=t, embedding=True).to_html()
    assert re.findall(r"base64,([^\"]+)", text) == re.findall(r"base64,([^\"]+)", again)


def test_without_opentsne_the_page_says_what_to_install_and_has_the_other_pictures(rows, monkeypatch):
    monkeypatch.setitem(sys.modules, "openTSNE", None)
    found = dkfm.compare_kernels([K1], *rows[:2], embedding=True)
    text = found.to_html()
    assert "t-SNE needs openTSNE; install it with pip install &#39;dkfm[tsne]&#39;." in text
    assert "t-SNE needs openTSNE" in str(found)
    assert len(Parsed(text).of("img")) == 2


def test_rows_too_few_for_an_embedding_are_compared_without_it():
    X, y = np.arange(4.0)[:, np.newaxis], [0, 0, 1, 1]
    found = dkfm.compare_kernels([kernels.Gaussian(1.0)], X, y, test=X, test_labels=y, shrinkage=0.1, embedding=True)
    assert (found.refused, found.compared[0].embedding, found.compared[0].neighbour_accuracy) == ({}, None, 1.0)
    assert "t-SNE needs at least 5 training rows, and there are 4." in str(found)


def test_without_matplotlib_the_table_is_there_and_the_page_says_what_to_install(rows, monkeypatch):
    found = dkfm.compare_kernels([K1], *rows[:2])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "Fisher accuracy" in str(found)
    with pytest.raises(MissingExtraError, match=r"dkfm\[plot\]"):
        found.to_html()


def test_the_memory_of_a_comparison_is_checked_with_the_values_of_a_row(monkeypatch, rng):
    checked = []
    monkeypatch.setattr(labelled_rows.memory, "has_factorization_memory", lambda *sizes: not checked.append(sizes))
    labelled_rows.load_labelled_rows(rng.normal(size=(40, 7)), np.arange(40) % 2, None, None, None, None, 0)
    assert checked == [(30, 7)]


def test_the_memory_of_dask_rows_is_checked_too(monkeypatch, rng):
    checked = []
    monkeypatch.setattr(labelled_rows.memory, "has_factorization_memory", lambda *sizes: not checked.append(sizes))
    rows = da.from_array(rng.normal(size=(40, 7)), chunks=(10, 7))
    labelled_rows.load_labelled_rows(rows, np.arange(40) % 2, None, None, None, None, 0)
    assert checked == [(30, 7)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "shrinkage", "factor", "squares"),
    [
        (kernels.Linear() + kernels.Gaussian(2.0), 1e-3, 1.0, 3),
        (kernels.Linear() + kernels.Gaussian(2.0), "auto", 1.0, 3),
        (kernels.Linear() + kernels.Gaussian(2.0), "auto", 1e5, 3.6),  # decomposes each fold beside the matrix
        (kernels.Sigmoid(1.0, -1.0) + kernels.Gaussian(2.0), 1e-3, 1.0, 3),
    ],
    ids=["given", "chosen", "chosen in each fold", "clipped"],
)
def test_a_comparison_takes_three_matrices(rng, monkeypatch, kernel, shrinkage, factor, squares):
    monkeypatch.setattr(cpus, "COUNT", 1)
    n, taken = 1500, 0
    X = rng.normal(size=(n, 5))
    y = X[:, 0] > 0
    X[0] *= factor
    given = {"test": X[:300], "test_labels": y[:300], "on_indefinite": "clip"}
    for _ in range(2):  # what is imported, and prepared once, is there before the second
        tracemalloc.start()
        try:
            dkfm.compare_kernels([kernel], X, y, **given, shrinkage=shrinkage)
            taken = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert 16 * n**2 < taken < 8.1 * squares * n**2
