"""What the tests of resume share."""

import numpy as np
import pytest

import dkfm

NAMES = ["a", "b", "c", "d"]


def score(made, target, source="rows.npy", **options):
    options = {"chunk_rows": 20, "progress": False} | options
    return dkfm.batch_score(made / "model", made / source, target, **options)


def values(target, output=None):
    return dkfm.open_scores(target, output).compute(scheduler="synchronous")


def expected(made, output="scores"):
    pca = dkfm.load(made / "model")
    rows = np.load(made / "rows.npy")
    with pytest.warns(UserWarning, match="feature names"):
        return pca.transform(rows) if output == "scores" else pca.reconstruction_error(rows)[:, np.newaxis]
