"""log(1 + t) of blocks: NumPy's where it is vectorized, and a corrected logarithm elsewhere."""

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dkfm.kernels import RationalQuadratic
from dkfm.kernels.pairwise import block_operations
from dkfm.kernels.pairwise.block_operations import log1p_in_place

VALUES = st.one_of(
    st.floats(0, 1e308), st.floats(0, 4), st.floats(1e-18, 1e-14), st.floats(2.0**52, 2.0**54), st.just(0.0)
)


@pytest.fixture(params=["baseline(X86_V2)", "X86_V4"])
def instructions(request, monkeypatch):
    """Processor instructions that NumPy's `log1p` is for: without vectors, and with them."""
    monkeypatch.setattr(block_operations, "_find_instruction_set", lambda *_: request.param)
    return request.param


@given(st.lists(VALUES, min_size=1, max_size=40), st.sampled_from([np.float64, np.float32]))
def test_corrected_logarithms_are_within_three_units_in_the_last_place(values, dtype):
    t = np.clip(values, 0, np.finfo(dtype).max).astype(dtype)
    found = t.copy()
    block_operations._correct_logarithms(found)
    with mpmath.workdps(40):
        for number, value in zip(t.tolist(), found, strict=True):
            error = abs(mpmath.mpf(float(value)) - mpmath.log1p(number))
            assert error <= 3 * mpmath.mpf(float(np.spacing(value))), (number, value)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_infinite_values_have_infinite_logarithms(instructions, dtype):
    values = np.array([[0.0, 1.0, np.inf], [np.nan, 2.0, 3.0]], dtype)
    with np.errstate(all="raise"):
        found = log1p_in_place(values.copy())
    np.testing.assert_allclose(found, np.log1p(values), rtol=1e-6)
    np.testing.assert_array_equal(found[0, :2], log1p_in_place(values[0, :2].copy()))  # whatever is beside them
    assert log1p_in_place(np.zeros(0, dtype)).shape == (0,)


@pytest.mark.parametrize("alpha", [1e-3, 0.5, 1.0, 1.0 + 2.0**-52, 30.0, 1e6])
def test_values_are_those_of_the_formula_with_40_digits(instructions, alpha, rng):
    X, Y = rng.normal(size=(20, 3)), np.vstack([rng.normal(size=(20, 3)), np.full((1, 3), 1e200)])
    found = RationalQuadratic(alpha, 0.7)(X, Y)
    assert (found[:, -1] == 0).all()  # squares that overflow
    with mpmath.workdps(40):
        for x, row in zip(X, found, strict=True):
            for y, value in zip(Y[:-1], row, strict=False):
                square = mpmath.fsum((mpmath.mpf(a) - mpmath.mpf(b)) ** 2 for a, b in zip(x, y, strict=True))
                exact = (1 + square / (2 * mpmath.mpf(alpha) * mpmath.mpf(0.7) ** 2)) ** -mpmath.mpf(alpha)
                assert abs(value - exact) < 1e-14
