"""A warning names the line of the caller, whatever lies between: contexts, other modules of dkfm, and scikit-learn."""

import warnings

import numpy as np
import pandas as pd
import pytest
from sklearn.pipeline import make_pipeline

import dkfm
from helpers.recorded import drop_resource_warnings

WARNED = {
    "a negative part of components": lambda X, y: dkfm.KernelPCA(3, kernel="sigmoid").fit(X),
    "a certificate of components": lambda X, y: dkfm.KernelPCA(3, kernel="linear").fit(X + 1e7),
    "a negative part of a map": lambda X, y: dkfm.ExactFeatureMap("sigmoid", on_indefinite="clip").fit(X),
    "a negative part of discriminants": lambda X, y: dkfm.KernelFisher(kernel="sigmoid", on_indefinite="clip").fit(
        X, y > 0
    ),
    "a negative part of a regression": lambda X, y: dkfm.KernelRidge(1.0, kernel="sigmoid", on_indefinite="clip").fit(
        X, y
    ),
    "a pipeline": lambda X, y: make_pipeline(dkfm.KernelPCA(3, kernel="sigmoid")).set_output(transform="pandas").fit(X),
    "landmarks": lambda X, y: dkfm.ExactFeatureMap("linear", landmarks="uniform", n_landmarks=500).fit(X),
}


@pytest.mark.parametrize("what", WARNED)
def test_a_warning_names_the_line_of_the_caller(what, rng):
    X = rng.normal(size=(200, 3))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        WARNED[what](X, X[:, 0])
    assert {one.filename for one in drop_resource_warnings(warned)} == {__file__}


def test_a_warning_of_a_job_names_the_line_of_the_caller(rng, tmp_path):
    pca = dkfm.KernelPCA(2).fit(rng.normal(size=(50, 3)))
    frame = pd.DataFrame(rng.normal(size=(20, 3)), columns=["a", "b", "c"])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        dkfm.batch_score(pca, frame, tmp_path / "x.zarr", chunk_rows=1, progress=False)
    assert {one.filename for one in drop_resource_warnings(warned)} == {__file__}
    np.testing.assert_array_equal(dkfm.open_scores(tmp_path / "x.zarr").shape, (20, 2))
