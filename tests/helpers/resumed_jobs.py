"""What the tests of resume share."""

import numpy as np

import dkfm

NAMES = ["a", "b", "c", "d"]


def score(made, target, source="rows.npy", **options):
    options = {"chunk_rows": 20, "progress": False} | options
    model = made / ("model" if source.endswith(".parquet") else "unnamed")
    return dkfm.batch_score(model, made / source, target, **options)


def values(target, output=None):
    return dkfm.open_scores(target, output).compute(scheduler="synchronous")


def expected(made, output="scores"):
    pca = dkfm.load(made / "unnamed")
    rows = np.load(made / "rows.npy")
    return pca.transform(rows) if output == "scores" else pca.reconstruction_error(rows)[:, np.newaxis]
