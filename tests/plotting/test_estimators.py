"""Pictures of estimators: each is that of the arrays that the estimator computes."""

import errno
import os

import dask.array as da
import numpy as np
import pandas as pd
import pytest
from sklearn.exceptions import NotFittedError

import dkfm
from dkfm import kernels, plotting
from dkfm.errors import InvalidInputError, StoreError
from dkfm.plotting.data import sample_row_numbers

GAUSSIAN = kernels.Gaussian(1.5)


@pytest.fixture(scope="module")
def rows():
    return np.random.default_rng(0).normal(size=(80, 2))


def offsets(axes):
    return np.concatenate([points.get_offsets() for points in axes.collections])


@pytest.mark.parametrize(
    ("estimator", "title", "name"),
    [
        (dkfm.KernelPCA(3, kernel=GAUSSIAN), "Kernel principal components", "component"),
        (dkfm.KernelFisher(kernel=GAUSSIAN), "Kernel Fisher discriminants", "discriminant"),
        (dkfm.ExactFeatureMap(GAUSSIAN), "Features", "feature"),
    ],
)
@pytest.mark.parametrize("lazy", [False, True])
def test_components_of_an_estimator_are_those_of_its_transform(estimator, title, name, lazy, rows):
    estimator.fit(rows, np.arange(80) % 3)
    axes = plotting.components(estimator, X=da.from_array(rows, chunks=(30, 2)) if lazy else rows)
    np.testing.assert_allclose(offsets(axes), estimator.transform(rows)[:, :2], rtol=1e-9, atol=1e-9)
    assert (axes.get_title(), axes.get_xlabel()) == (title, f"{name} 1")


@pytest.mark.costly
@pytest.mark.parametrize("estimator", [dkfm.KernelPCA(2, kernel=GAUSSIAN), dkfm.ExactFeatureMap(GAUSSIAN, tol=0.1)])
def test_novelty_of_an_estimator_is_that_of_its_score(estimator, rows):
    estimator.fit(rows)
    name = "reconstruction error" if isinstance(estimator, dkfm.KernelPCA) else "residual"
    score = getattr(estimator, name.replace(" ", "_"))
    axes = plotting.novelty(rows, rows + 3, estimator=estimator)
    expected = plotting.novelty(score(rows), score(rows + 3), quantity=name)
    assert axes.get_xlabel() == name
    assert [bar.get_height() for bar in axes.patches] == [bar.get_height() for bar in expected.patches]


def test_display_draws_what_each_estimator_has(rows):
    y = np.arange(80) % 3
    phi, pca = dkfm.ExactFeatureMap(GAUSSIAN).fit(rows), dkfm.KernelPCA(3, kernel=GAUSSIAN).fit(rows)
    cholesky = dkfm.ExactFeatureMap(GAUSSIAN, basis="cholesky").fit(rows)
    fisher = dkfm.KernelFisher(kernel=GAUSSIAN).fit(rows, y)

    def titles(*arguments):
        return [axes.get_title().split(",")[0].split(" of")[0] for axes in plotting.display(*arguments)]

    assert titles(phi) == titles(cholesky) == ["Spectrum", "Errors"]
    assert titles(phi, rows) == ["Spectrum", "Errors", "Features"]
    assert titles(pca) == ["Spectrum"]
    assert titles(pca, rows, y) == ["Spectrum", "Kernel principal components"]
    assert titles(fisher, rows, y) == ["Kernel Fisher discriminants"]
    precomputed = dkfm.ExactFeatureMap("precomputed").fit(GAUSSIAN(rows, rows))
    assert titles(precomputed) == ["Spectrum"]
    with pytest.raises(InvalidInputError, match="display needs the rows X to draw a KernelFisher"):
        plotting.display(fisher)
    figure = plotting.display(pca)[0].figure
    assert [axes.figure for axes in plotting.display(pca, ax=figure.axes)] == [figure]


@pytest.mark.parametrize(
    "draw",
    [
        plotting.spectrum,
        plotting.display,
        lambda estimator: plotting.components(estimator, X=np.zeros((2, 2))),
        lambda estimator: plotting.novelty(np.zeros((2, 2)), np.zeros((2, 2)), estimator=estimator),
    ],
)
def test_estimators_that_are_not_fitted_are_refused_as_scikit_learn_does(draw):
    with pytest.raises(NotFittedError):
        draw(dkfm.KernelPCA(2))


def test_what_has_no_such_picture_is_refused(rows):
    pca = dkfm.KernelPCA(2, kernel=GAUSSIAN).fit(rows)
    fisher = dkfm.KernelFisher(kernel=GAUSSIAN).fit(rows, np.arange(80) % 3)
    with pytest.raises(InvalidInputError, match="needs the rows X"):
        plotting.components(pca)
    with pytest.raises(InvalidInputError, match="X is for an estimator"):
        plotting.components(pca.transform(rows), X=rows)
    with pytest.raises(InvalidInputError, match="KernelFisher has no novelty score"):
        plotting.novelty(rows, rows, estimator=fisher)
    ridge = dkfm.KernelRidge(kernel=GAUSSIAN).fit(rows, rows[:, 0])
    for X in (None, rows):
        with pytest.raises(InvalidInputError, match="display cannot draw a KernelRidge"):
            plotting.display(ridge, X)
        with pytest.raises(InvalidInputError, match="draws what transform returns, and a KernelRidge has none"):
            plotting.components(ridge, X=X)


@pytest.mark.parametrize(
    "labels",
    [
        np.append(np.zeros(79), np.nan),
        np.array(["a"] * 79 + [None], object),
        np.array([1] * 79 + [float("nan")], object),
        np.array(["2020-01-01"] * 79 + ["NaT"], "M8[D]"),
    ],
)
def test_a_row_without_a_label_is_named(labels, rows):
    with pytest.raises(InvalidInputError, match=r"labels must be a label a row, and is .* in row 79 \(1 of 80 rows\)"):
        plotting.components(rows, labels)
    many, labels_of_many = np.tile(rows, (200, 1)), np.tile(labels, 200)
    first = next(row for row in sample_row_numbers(16_000, 5_000) if row % 80 == 79)
    with pytest.raises(InvalidInputError, match=f" in row {first} "):
        plotting.components(many, labels_of_many)


def test_axes_have_the_names_of_the_columns_and_scores(rows):
    frame = pd.DataFrame(rows, columns=["width", r"$\frac{$"])
    fisher = dkfm.KernelFisher(kernel=GAUSSIAN).fit(frame, frame.width > 0)
    axes = plotting.decision_regions(fisher, frame)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("width", r"\$\frac{\$")
    axes.figure.canvas.draw()
    assert plotting.contours(fisher, frame)[0].get_title() == "discriminant 1"
    assert plotting.spectrum(dkfm.ExactFeatureMap(GAUSSIAN, basis="cholesky").fit(rows)).get_ylabel() == "pivot"


def test_pictures_of_several_axes_are_saved_and_only_as_png_into_a_folder(rows, tmp_path):
    axes = plotting.contours(dkfm.KernelPCA(3, kernel=GAUSSIAN).fit(rows), rows)
    for name, words in (("x.pdf", r"x\.pdf does not end with \.png"), ("none/x.png", "its folder is not there")):
        with pytest.raises(InvalidInputError, match=words):
            plotting.save_picture(axes, tmp_path / name)
    with pytest.raises(InvalidInputError, match="no axes to save"):
        plotting.save_picture([], tmp_path / "x.png")
    with pytest.raises(StoreError, match="name too long"):
        plotting.save_picture(axes, tmp_path / f"{'a' * 300}.png")
    plotting.save_picture(np.array(axes), tmp_path / "y.png")
    axes = plotting.contours(dkfm.KernelPCA(3, kernel=GAUSSIAN).fit(rows), rows)
    plotting.save_picture(axes, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_written_leaves_the_earlier_one(rows, tmp_path, monkeypatch):
    path, pca = tmp_path / "x.png", dkfm.KernelPCA(1, kernel=GAUSSIAN).fit(rows)
    plotting.save_picture(plotting.contours(pca, rows), path)
    earlier, axes = path.read_bytes(), plotting.contours(pca, rows)

    def fill_disk(file, **_):
        file.write(earlier[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(axes[0].figure, "savefig", fill_disk)
    with pytest.raises(StoreError, match="No space left"):
        plotting.save_picture(axes, path)
    assert path.read_bytes() == earlier
    assert list(tmp_path.iterdir()) == [path]
