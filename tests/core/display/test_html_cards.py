"""What notebooks show of kernels and estimators is true, escaped, and leaves scikit-learn's diagrams as they are."""

import copy
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from sklearn import config_context
from sklearn.base import clone
from sklearn.linear_model import RidgeClassifier
from sklearn.pipeline import make_pipeline

import dkfm
from dkfm.core.display import html_cards
from dkfm.core.display.quantities import format_bytes
from dkfm.kernels import Constant, Function, Gaussian, Linear, Polynomial

VOID = {"br", "input", "meta", "img", "hr", "link"}


class Page(HTMLParser):
    """The texts of the cells of dkfm's tables by their headings, and whether every element is closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.cells, self.caption, self.heading = [], [], {}, "", ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "caption" in self.open:
            self.caption += data
        elif "th" in self.open:
            self.heading = data
        elif "td" in self.open:
            self.cells[self.heading] = self.cells.get(self.heading, "") + data


def card_of(text):
    """Return the page of the one card in a text."""
    start = text.rindex('<table class="dkfm-card">')
    page = Page(text[start:])
    assert page.open == []
    return page


def inner(X, Y):
    return X @ Y.T


@pytest.fixture
def rows(rng):
    return rng.normal(size=(60, 3))


@pytest.fixture
def hostile(monkeypatch):
    monkeypatch.setattr(inner, "__qualname__", '<script>alert("1")</script>')
    return Function(inner)


def test_a_kernel_is_shown_as_a_formula_with_what_is_known_of_it():
    page = card_of((Gaussian(5.0) + 0.5 * (Polynomial(3) + 1.0) ** 2)._repr_html_())
    assert page.caption == "Kernel Sum"
    assert page.cells["kernel"] == (
        "Gaussian(sigma=5.0) + 0.5 · (Polynomial(degree=3, scale=1.0, offset=0.0) + Constant(value=1.0))2"
    )
    assert page.tags.count("sup") == 1
    assert page.cells["definiteness"] == "positive semi-definite"
    assert page.cells["rows"] == "dense or sparse"
    assert card_of(dkfm.kernels.Laplacian()._repr_html_()).cells["rows"] == "dense"
    assert card_of(dkfm.kernels.Sigmoid()._repr_html_()).cells["definiteness"] == "indefinite"


def test_many_numbers_are_shown_as_the_first_and_the_last():
    shown = card_of(Gaussian(tuple(np.linspace(1, 2, 784)))._repr_html_()).cells["kernel"]
    assert re.fullmatch(r"Gaussian\(sigma=\(1\.0, 1\.00\d+, …, 2\.0\)\)", shown)
    assert card_of(Gaussian((1.0, 2.0, 3.0))._repr_html_()).cells["kernel"] == "Gaussian(sigma=(1.0, 2.0, 3.0))"


def test_a_fitted_map_shows_its_rank_certificate_bytes_and_kernel(rows):
    phi = dkfm.ExactFeatureMap(Gaussian("median"), basis="cholesky", dtype="float32").fit(rows)
    page = card_of(phi._repr_html_())
    assert page.caption == "ExactFeatureMap, fitted"
    assert page.cells["kernel"] == repr(phi.kernel_)
    assert "median" not in page.cells["kernel"]
    assert page.cells["rank"] == str(phi.rank_)
    assert page.cells["outputs"] == f"features ({phi.rank_}), residual (1)"
    assert page.cells["landmarks"] == f"{phi.model_.landmarks.shape[0]} x 3"
    assert page.cells["certificate"] == str(phi.certificate_)
    assert page.cells["precision"] == "float32"
    assert page.cells["size"] == f"{format_bytes(phi.model_.nbytes)} in memory"
    assert "saved as" not in page.cells


def test_fitted_components_show_how_many_they_are_and_that_rows_are_sparse(rows):
    import scipy.sparse

    page = card_of(dkfm.KernelPCA(2).fit(scipy.sparse.csr_array(rows))._repr_html_())
    assert page.cells["outputs"].startswith("scores (2), ")
    assert page.cells["landmarks"] == "60 x 3, sparse"
    assert "rank" not in page.cells


def test_what_a_fit_chose_is_shown(rows):
    pca, fisher = dkfm.KernelPCA(2).fit(rows), dkfm.KernelFisher(shrinkage="auto").fit(rows, rows[:, 0] > 0)
    shown = card_of(pca._repr_html_()).cells["share of the variance"]
    assert shown == f"{pca.explained_variance_ratio_.sum():.1%}"
    assert card_of(fisher._repr_html_()).cells["shrinkage"] == f"{fisher.shrinkage_:.3g}"
    one, two = (dkfm.KernelRidge("loo").fit(rows, rows[:, columns]) for columns in (0, [0, 1]))
    assert card_of(one._repr_html_()).cells["alpha"] == f"{one.alpha_:.3g}"
    assert card_of(two._repr_html_()).cells["alpha"] == ", ".join(f"{alpha:.3g}" for alpha in two.alpha_)
    assert "alpha" not in card_of(pca._repr_html_()).cells


def test_a_folded_model_shows_its_outputs_and_what_folding_rounds(rows):
    phi = dkfm.ExactFeatureMap(Gaussian(2.0)).fit(rows)
    folded = dkfm.fold(phi, RidgeClassifier().fit(phi.transform(rows), rows[:, 0] > 0))
    page = card_of(folded._repr_html_())
    assert page.caption == "Folded, fitted"
    assert "decision_function (1)" in page.cells["outputs"]
    assert page.cells["rounding"] == f"{folded.rounding_:.1e} of the spread of the outputs"
    assert "certificate" not in page.cells


@pytest.mark.slow
def test_a_saved_or_loaded_estimator_shows_where_until_it_is_fitted_again(rows, tmp_path):
    pca = dkfm.KernelPCA(2, kernel=Gaussian(2.0)).fit(rows)
    pca.save(tmp_path / "model")
    loaded = dkfm.load(tmp_path / "model")
    where = str(tmp_path / "model")
    for estimator in (pca, loaded, copy.deepcopy(loaded)):
        assert card_of(estimator._repr_html_()).cells["saved as"] == where
    dkfm.batch_score(pca, rows, tmp_path / "scores.zarr", progress=False)
    assert card_of(pca._repr_html_()).cells["saved as"] == where
    assert "saved as" not in card_of(pca.fit(rows)._repr_html_()).cells
    assert where not in clone(loaded)._repr_html_()


def test_where_it_is_saved_shows_no_credentials(rows):
    import fsspec

    pca = dkfm.KernelPCA(2, kernel=Gaussian(2.0)).fit(rows)
    fsspec.filesystem("memory").store.clear()
    pca.save("memory://user:secret@models/model")
    text = card_of(pca._repr_html_()).cells["saved as"]
    assert text.endswith("models/model")
    assert "secret" not in text


def test_what_is_not_fitted_is_drawn_by_scikit_learn_alone():
    assert "dkfm-card" not in dkfm.KernelPCA(2)._repr_html_()
    assert "KernelPCA" in dkfm.KernelPCA(2)._repr_html_()


def test_both_ways_of_showing_are_the_diagram_with_the_table_below(rows):
    pca = dkfm.KernelPCA(2, kernel=Gaussian(2.0)).fit(rows)
    for text in (pca._repr_html_(), pca._repr_mimebundle_()["text/html"]):
        assert text.index("sk-top-container") < text.index('<table class="dkfm-card">')
    assert pca._repr_mimebundle_()["text/plain"] == repr(pca)


def test_nothing_is_drawn_where_scikit_learn_is_told_so(rows):
    pca = dkfm.KernelPCA(2, kernel=Gaussian(2.0)).fit(rows)
    with config_context(display="text"):
        assert not hasattr(pca, "_repr_html_")
        assert pca._repr_mimebundle_() == {"text/plain": repr(pca)}


def test_a_pipeline_still_draws_its_estimators(rows, hostile):
    pipeline = make_pipeline(dkfm.ExactFeatureMap(hostile), RidgeClassifier())
    for drawn in (pipeline, pipeline.fit(rows, rows[:, 0] > 0)):
        text = drawn._repr_html_()
        assert "sk-estimator" in text
        assert "ExactFeatureMap" in text
        assert "<script>alert" not in text


def test_names_of_functions_are_escaped(rows, hostile):
    for shown in (hostile, dkfm.ExactFeatureMap(hostile).fit(rows)):
        text = shown._repr_html_()
        assert "<script>alert" not in text
        page = card_of(text)
        assert "script" not in page.tags
        assert page.cells["kernel"] == 'Function(<script>alert("1")</script>)'


def test_every_text_of_a_card_is_escaped():
    page = card_of(html_cards.html_card("<b>", "<i>", {"<u>": "<s>"}))
    assert page.caption == "<b>"
    assert page.cells == {"kernel": "<i>", "<u>": "<s>"}


def test_no_style_reaches_beyond_the_card_or_sets_a_colour_of_text_or_ground():
    style = re.search(r"<style>(.*?)</style>", Constant()._repr_html_().replace("\n", ""))[1]
    rules = re.findall(r"([^{}]+)\{([^{}]*)\}", style)
    assert "".join(f"{a}{{{b}}}" for a, b in rules) == style
    for selectors, declarations in rules:
        assert all(selector.startswith("table.dkfm-card") for selector in selectors.split(","))
        for name, value in re.findall(r"(color|background)\s*:\s*([^;]+)", declarations):
            assert (name, value) in {("color", "inherit"), ("background", "transparent")}


def test_a_kernel_of_ones_own_is_shown_too(rows):
    class Own(dkfm.kernels.Kernel):
        def block(self, X, Y):
            return X @ Y.T

    assert card_of(Own()._repr_html_()).caption == "Kernel Own"
    assert card_of(dkfm.ExactFeatureMap(Own()).fit(rows)._repr_html_()).cells["rank"] == "3"
    assert card_of((Own() + Linear())._repr_html_()).caption == "Kernel Sum"
