"""scikit-learn's own tests of `KernelPCA` find their words in dkfm's errors."""

import pytest
from sklearn.decomposition.tests import test_kernel_pca as theirs

import dkfm


@pytest.fixture(autouse=True)
def ours(monkeypatch):
    monkeypatch.setattr(theirs, "KernelPCA", dkfm.KernelPCA)


def test_an_inverse_of_a_precomputed_kernel_is_refused_in_their_words():
    theirs.test_kernel_pca_invalid_parameters()


@pytest.mark.parametrize("solver", ["auto", "dense", "arpack"])
@pytest.mark.filterwarnings("ignore::dkfm.errors.DkfmWarning")  # of a negative part that two components do not need
def test_an_indefinite_kernel_is_refused_in_their_words(solver):
    theirs.test_precomputed_kernel_not_psd(solver)
