"""Pictures: what is drawn is what was given, a sample says so, and nothing needs a display."""

import subprocess
import sys

import dask
import dask.array as da
import matplotlib.pyplot as plt
import numpy as np
import pytest

import dkfm
from dkfm import kernels, plotting
from dkfm.errors import DkfmError, InvalidInputError, MissingExtraError
from dkfm.numerics.certificates import certificate
from dkfm.plotting import data


def legend_of(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def notes_of(ax):
    return [text.get_text() for text in ax.texts]


def pixels(ax):
    figure = ax.get_figure(root=True)
    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())


def test_a_spectrum_shows_what_is_kept_what_is_dropped_and_the_cut_between():
    ax = plotting.spectrum([3.0, 2.0, 1e-3], [1e-16, 0.0, 0.0, -1e-17])
    kept, dropped, negative, cut, zeros = ax.lines
    np.testing.assert_array_equal(kept.get_xydata(), [[1, 3], [2, 2], [3, 1e-3]])
    np.testing.assert_array_equal(dropped.get_xydata(), [[4, 1e-16]])
    np.testing.assert_array_equal(negative.get_xydata(), [[7, 1e-17]])
    assert set(cut.get_xdata()) == {3.5}
    assert len(zeros.get_xdata()) == 0
    assert "2 dropped, zero: not drawn" in legend_of(ax)
    assert ax.get_yscale() == "log"
    assert len(plotting.spectrum(da.from_array(np.array([2.0, 1.0]))).lines) == 1


@pytest.mark.parametrize("given", [[[1.0, 2.0]], [], [1.0, 0.0], [1.0, -1.0], [1.0, np.nan], ["a"], [[1.0], 2.0]])
def test_eigenvalues_that_are_none_are_refused(given):
    with pytest.raises(InvalidInputError, match=r"^.+\.$"):
        plotting.spectrum(given)


def test_components_have_a_colour_for_each_label_of_any_kind(rng):
    scores = rng.normal(size=(60, 4))
    for labels in (np.repeat([3, 1, 2], 20), np.repeat(["b", "a", "c"], 20), np.repeat([True, False, True], 20)):
        ax = plotting.components(scores, labels, pair=(3, 1))
        values = np.unique(labels)
        assert legend_of(ax) == [str(value) for value in values]
        for value, points in zip(values, ax.collections, strict=True):
            np.testing.assert_array_equal(points.get_offsets(), scores[labels == value][:, [3, 1]])
        assert len({tuple(points.get_facecolor()[0]) for points in ax.collections}) == len(values)
        assert (ax.get_xlabel(), ax.get_ylabel()) == ("component 4", "component 2")


def test_many_labels_have_a_colour_bar_and_no_legend(rng):
    scores = rng.normal(size=(60, 2))
    for labels, what in ((rng.normal(size=60), "label"), (np.arange(60).astype(str), "among 60 in order")):
        ax = plotting.components(scores, labels)
        assert ax.get_legend() is None
        assert ax.get_figure().axes[1].get_ylabel().endswith(what)


def test_a_single_column_is_a_histogram(rng):
    ax = plotting.components(rng.normal(size=(50, 1)), np.repeat(["a", "b"], 25))
    assert sum(patch.get_height() for patch in ax.patches) == 50
    assert legend_of(ax) == ["a", "b"]


def test_of_many_rows_a_seeded_sample_is_drawn_and_the_picture_says_so(rng):
    scores, labels = rng.normal(size=(20_000, 2)), np.repeat(["a", "b"], 10_000)
    lazily = da.from_array(scores, chunks=(3000, 2)), da.from_array(labels, chunks=7000)
    pictures = [plotting.components(scores, labels), plotting.components(*lazily), plotting.components(scores, labels)]
    points = [np.concatenate([p.get_offsets() for p in ax.collections]) for ax in pictures]
    assert len(points[0]) == data.MAX_PLOT_ROWS
    np.testing.assert_array_equal(points[0], points[1])
    np.testing.assert_array_equal(points[0], points[2])
    assert all(notes_of(ax) == ["5,000 of 20,000 rows, drawn at random"] for ax in pictures)
    assert notes_of(plotting.components(scores[:5000])) == []


@pytest.mark.slow
def test_what_two_dask_arrays_share_is_computed_once_and_only_where_rows_are_drawn():
    seen = []

    def block(block_info=None):
        (low, high), _ = block_info[None]["array-location"]
        seen.append(low)
        return np.column_stack([np.arange(low, high), np.arange(low, high)]).astype(float)

    rows = da.map_blocks(block, chunks=((100,) * 200, (2,)), dtype=float, meta=np.empty((0, 0)))
    with dask.config.set(scheduler="synchronous"):
        plotting.components(rows, rows[:, 0] > 10_000)
    assert len(seen) == len(set(seen)) <= 200


@pytest.mark.slow
def test_a_picture_is_drawn_on_the_axes_that_are_given_and_no_figure_is_made(rng):
    _, places = plt.subplots(2, 4)
    before, X = plt.get_fignums(), rng.normal(size=(40, 2))
    y = X[:, 0] > 0
    phi = dkfm.ExactFeatureMap(kernels.Gaussian(1.0)).fit(X)
    fitted = dkfm.KernelPCA(2, kernel=kernels.Gaussian(1.0)).fit(X)
    one, two, three, four, five, six, *others = places.ravel()
    assert plotting.spectrum([1.0], ax=one) is one
    assert plotting.components(X, y, ax=two) is two
    assert plotting.certificates(phi, ax=three) is three
    assert plotting.novelty([1.0, 2.0], [3.0], ax=four) is four
    assert plotting.decision_regions(Halves(), X, ax=five) is five
    assert plotting.contours(fitted, X, numbers=[1], ax=six) == [six]
    assert plotting.contours(fitted, X, y, ax=others) == others
    assert plt.get_fignums() == before
    assert pixels(one).std() > 10


def test_certificates_draw_the_errors_that_the_certificate_is_the_largest_of(rng):
    X = rng.normal(size=(80, 3))
    for settings in ({}, {"centered": True}, {"basis": "cholesky"}):
        phi = dkfm.ExactFeatureMap(kernels.Gaussian(1.0), **settings).fit(X)
        ax = plotting.certificates(phi)
        counted = sum(patch.get_height() for patch in ax.patches)
        none = int(legend_of(ax)[-1].split()[0].replace(",", ""))
        assert counted + none == phi.model_.landmarks.shape[0] ** 2
        drawn_line = next(line for line in ax.lines if len(line.get_xdata()))
        assert drawn_line.get_xdata()[0] == phi.certificate_.relative_error
        largest = max(p.get_x() + p.get_width() for p in ax.patches if p.get_height())
        assert largest <= 10 * phi.certificate_.relative_error


def test_a_damaged_map_shows_in_its_certificates(rng):
    phi = dkfm.ExactFeatureMap(kernels.Gaussian(1.0), basis="spectral").fit(rng.normal(size=(80, 3)))
    phi.model_.head("features").weights.setflags(write=True)
    phi.model_.head("features").weights[3, 0] += 1e-3
    ax = plotting.certificates(phi)
    assert max(p.get_x() for p in ax.patches if p.get_height()) > 1e-6


@pytest.mark.slow
def test_certificates_pair_landmarks_with_points_in_memory_or_not(rng):
    X, Z = rng.normal(size=(700, 3)), rng.normal(size=(1000, 3))
    phi = dkfm.ExactFeatureMap(kernels.Gaussian(1.0), basis="spectral", progress=False).fit(X)
    ax = plotting.certificates(phi, Z)
    lazily = plotting.certificates(phi, da.from_array(Z, chunks=(300, 3)))
    assert ax.get_title() == lazily.get_title() == "Errors of 262,144 pairs of landmarks and points"
    assert [p.get_height() for p in ax.patches] == [p.get_height() for p in lazily.patches]
    assert legend_of(ax)[-1] == "512 of 700 landmarks, evenly spread"
    spread = certificate.sample_evenly(700)
    found = phi.transform(X[spread]) @ phi.transform(Z[certificate.sample_evenly(1000)]).T
    truth = kernels.Gaussian(1.0)(X[spread], Z[certificate.sample_evenly(1000)])
    shown = max(p.get_x() + p.get_width() for p in ax.patches if p.get_height())
    np.testing.assert_allclose(np.abs(found - truth).max(), shown, rtol=9)


def test_novelty_draws_shares_of_both_and_counts_what_is_beyond(rng):
    known, new = rng.normal(size=1000) ** 2, rng.normal(size=300) ** 2 + 10
    ax = plotting.novelty(known, da.from_array(new, chunks=100), quantity="residual")
    heights = np.array([patch.get_height() for patch in ax.patches]).reshape(2, -1)
    np.testing.assert_allclose(heights.sum(axis=1), 1)
    assert legend_of(ax)[1] == "new rows, 100.0% beyond"
    assert ax.lines[0].get_xdata()[0] == np.quantile(known, 0.95)
    assert notes_of(plotting.novelty(np.arange(6000.0), known)) == ["known: 5,000 of 6,000 rows, drawn at random"]


class Halves:
    def predict(self, X):
        return np.where(X[:, 0] > 0, "right", "left")


def test_decision_regions_have_the_colours_of_their_points(rng):
    X = rng.uniform(-1, 1, size=(80, 2))
    ax = plotting.decision_regions(Halves(), X, Halves().predict(X))
    mesh, left, right = ax.collections
    codes = np.asarray(mesh.get_array()).reshape(160, 160)
    assert set(codes[:, 0]) == {0}
    assert set(codes[:, -1]) == {1}
    for code, points in ((0, left), (1, right)):
        np.testing.assert_allclose(mesh.cmap(mesh.norm(code))[:3], points.get_facecolor()[0][:3])
    assert legend_of(ax) == ["left", "right"]
    assert len(plotting.decision_regions(Halves(), da.from_array(X)).collections) == 2


@pytest.mark.slow
def test_contours_draw_each_component_over_the_plane(rng):
    X = rng.normal(size=(60, 2))
    pca = dkfm.KernelPCA(10, kernel=kernels.Gaussian(1.0)).fit(X)
    assert [ax.get_title() for ax in plotting.contours(pca, X)] == [f"component {i}" for i in range(1, 9)]
    (ax,) = plotting.contours(pca, da.from_array(X), numbers=[9])
    assert ax.get_title() == "component 10"
    low, high = ax.get_xlim()
    assert low < X[:, 0].min() < X[:, 0].max() < high
    assert pixels(ax).std() > 10


class Wrong:
    def predict(self, X):
        return np.zeros((len(X), 2))

    transform = staticmethod(lambda X: np.zeros(len(X)))


class Slope:
    def predict(self, X):
        return X[:, 0] + np.pi * X[:, 1]


class Mixed:
    predict = staticmethod(lambda X: np.array(["a", 1] * (len(X) // 2), dtype=object))


PLANE, LINE = np.zeros((4, 2)), np.arange(4.0)
UNKNOWN = da.from_array(PLANE, chunks=2)[da.from_array(LINE, chunks=2) > 0]
MASKED = np.ma.masked_array(PLANE, [[True, True], *[[False, False]] * 3])
BAD = {
    "scores of one dimension": lambda: plotting.components(LINE),
    "no rows": lambda: plotting.components(np.zeros((0, 2))),
    "other labels": lambda: plotting.components(PLANE, [1, 2]),
    "labels in columns": lambda: plotting.components(PLANE, PLANE),
    "labels of many kinds": lambda: plotting.components(PLANE, np.array(["a", 1, None, 2.0], dtype=object)),
    "a component that is not there": lambda: plotting.components(PLANE, pair=(0, 2)),
    "a pair of three": lambda: plotting.components(PLANE, pair=(0, 1, 1)),
    "a pair of words": lambda: plotting.components(PLANE, pair=("a", "b")),
    "scores that are not finite": lambda: plotting.components(np.full((4, 2), np.nan)),
    "scores of words": lambda: plotting.components(np.full((4, 2), "a")),
    "complex scores": lambda: plotting.components(np.zeros((4, 2), complex)),
    "unknown chunks": lambda: plotting.components(UNKNOWN),
    "not a map": lambda: plotting.certificates(dkfm.KernelPCA(2)),
    "a map that is not fitted": lambda: plotting.certificates(dkfm.ExactFeatureMap(kernels.Linear())),
    "novelty of two dimensions": lambda: plotting.novelty(PLANE, LINE),
    "novelty of nothing": lambda: plotting.novelty(LINE, []),
    "three columns": lambda: plotting.decision_regions(Halves(), np.zeros((4, 3))),
    "predictions in columns": lambda: plotting.decision_regions(Wrong(), PLANE),
    "predictions of many kinds": lambda: plotting.decision_regions(Mixed(), PLANE),
    "predictions of a regression": lambda: plotting.decision_regions(Slope(), PLANE + LINE[:, np.newaxis]),
    "a regression of few values": lambda: plotting.decision_regions(dkfm.KernelRidge().fit(PLANE, LINE), PLANE),
    "words and numbers": lambda: plotting.decision_regions(Halves(), PLANE, LINE),
    "masked scores": lambda: plotting.components(MASKED),
    "masked lazy labels": lambda: plotting.components(PLANE, da.from_array(MASKED[:, 0], chunks=2)),
    "masked labels": lambda: plotting.components(PLANE, MASKED[:, 0]),
    "masked eigenvalues": lambda: plotting.spectrum(MASKED[:, 0] + 1),
    "masked known values": lambda: plotting.novelty(MASKED[:, 0], LINE),
    "a word to display": lambda: plotting.display("x"),
    "a class to display": lambda: plotting.display(dkfm.KernelPCA),
    "a word to save": lambda: plotting.save_picture("ax", "x.png"),
    "no columns": lambda: plotting.contours(Wrong(), PLANE),
    "contours of three columns": lambda: plotting.contours(Wrong(), np.zeros((4, 3))),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_a_sentence_and_leaves_no_figure(what):
    before = plt.get_fignums()
    with pytest.raises(InvalidInputError) as caught:
        BAD[what]()
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)
    assert plt.get_fignums() == before


def test_a_map_of_other_columns_or_of_a_gram_matrix_is_refused(rng):
    X = rng.normal(size=(20, 2))
    with pytest.raises(InvalidInputError, match="Z has 3 features"):
        plotting.certificates(dkfm.ExactFeatureMap(kernels.Linear()).fit(X), rng.normal(size=(5, 3)))
    with pytest.raises(InvalidInputError, match="precomputed"):
        plotting.certificates(dkfm.ExactFeatureMap("precomputed").fit(X @ X.T))
    pca = dkfm.KernelPCA(3, kernel=kernels.Gaussian(1.0)).fit(X)
    with pytest.raises(InvalidInputError, match="as many axes"):
        plotting.contours(pca, X, ax=plt.figure().add_subplot())
    with pytest.raises(InvalidInputError, match="numbers from 0"):
        plotting.contours(pca, X, numbers=[3])


@pytest.mark.slow
def test_pictures_need_no_display_and_show_nothing(tmp_path):
    code = (
        "import os\n"
        "os.environ.pop('DISPLAY', None)\n"
        "import matplotlib\n"
        "from dkfm import plotting\n"
        "from pathlib import Path\n"
        "import matplotlib.pyplot as plt\n"
        "def refused(*_, **__): raise SystemExit('it was shown')\n"
        "plt.show = refused\n"
        "plotting.save_picture(plotting.novelty([1.0, 2.0], [3.0]), Path('one.png'))\n"
        "assert not plt.get_fignums()\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=tmp_path, check=True, timeout=120)
    assert plt.imread(tmp_path / "one.png").std() > 0.02


def test_without_matplotlib_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'dkfm\[plot\]'") as caught:
        plotting.spectrum([1.0])
    assert isinstance(caught.value, DkfmError)
