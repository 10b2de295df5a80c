"""Columns that have one name together are refused by it when an estimator is fitted."""

import numpy as np
import pytest

import dkfm
from dkfm.errors import InvalidInputError


@pytest.mark.parametrize("names", [["a", "a", "b"], [0, 0, 1]])
@pytest.mark.parametrize("estimator", [dkfm.KernelPCA(2), dkfm.ExactFeatureMap(dkfm.kernels.Gaussian(2.0))])
def test_a_name_that_stands_twice_is_one_sentence(estimator, names):
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(20, 3)), columns=names)
    if names[0] == 0:
        try:
            estimator.fit(frame)
        except InvalidInputError as error:
            assert "\n" not in str(error)  # noqa: PT017  # some versions of scikit-learn take numbers twice
        return
    with pytest.raises(InvalidInputError, match=r"^X has column 'a' more than once; .*\.$"):
        estimator.fit(frame)
