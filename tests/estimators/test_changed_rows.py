"""Rows that change while a fit reads them: it ends, tells the change and nothing else, and leaves the estimator."""

import numpy as np
import pytest
from sklearn.utils.validation import check_is_fitted

from dkfm import ExactFeatureMap, kernels
from dkfm.errors import InvalidInputError, NotPSDError
from dkfm.estimators.fitting import out_of_core_rows
from dkfm.gram import streamed_pivots
from dkfm.gram.streamed_rows import StreamedRows

K = kernels.Gaussian(2.0)
X = np.random.default_rng(0).normal(size=(700, 3))


@pytest.fixture
def path(tmp_path):
    """Path of the rows."""
    np.save(tmp_path / "x.npy", X)
    return tmp_path / "x.npy"


def test_rows_that_change_meanwhile_leave_the_estimator_as_it_was(path, monkeypatch):
    phi = ExactFeatureMap(K, basis="cholesky", tol=1e-3)
    find = out_of_core_rows.find_streamed_pivots

    def change(*given):
        found = find(*given)
        np.save(path, X + 1)
        return found

    monkeypatch.setattr(out_of_core_rows, "find_streamed_pivots", change)
    with pytest.raises(InvalidInputError, match=r"changed while it was read, .*; fit again"):
        phi.fit(path)
    with pytest.raises(Exception, match="not fitted"):
        check_is_fitted(phi)


@pytest.mark.parametrize("when", ["before the search", "in a round"])
def test_rows_that_change_end_a_search_after_its_round(path, monkeypatch, when):
    rounds, run_round, open_rows = [], streamed_pivots._run_round, StreamedRows.from_source

    def run_and_change(*given):
        rounds.append(given)
        run_round(*given)
        if when == "in a round":
            np.save(path, X + 1)

    def open_and_change(*given):
        if when == "before the search":
            np.save(path, X + 1)
        return open_rows(*given)

    monkeypatch.setattr(streamed_pivots, "_run_round", run_and_change)
    monkeypatch.setattr(StreamedRows, "from_source", open_and_change)
    with pytest.raises(InvalidInputError, match=r"x.npy changed while it was read, .*; fit again"):
        ExactFeatureMap(K, basis="cholesky").fit(path)
    assert len(rounds) == 1


@pytest.mark.parametrize("changes", [True, False])
def test_an_error_that_a_change_of_rows_explains_is_told_as_that(path, changes, monkeypatch):
    def fail(*_):
        if changes:
            np.save(path, X + 1)
        raise NotPSDError("The Gram matrix is not positive semi-definite.")

    monkeypatch.setattr(out_of_core_rows, "find_streamed_pivots", fail)
    with pytest.raises(InvalidInputError if changes else NotPSDError, match="changed while" if changes else "not pos"):
        ExactFeatureMap(K, basis="cholesky").fit(path)
