"""Exponentials of blocks: NumPy's bit for bit, or compiled ones within a unit in the last place, and where."""

import subprocess
import sys

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dkfm.kernels.pairwise import block_operations
from dkfm.kernels.pairwise.block_operations import exp_in_place

LARGEST_FINITE, SMALLEST_NORMAL, SMALLEST_POSITIVE = 709.782712893384, -708.3964185322641, -745.1332191019411
EDGES = [
    number
    for edge in (LARGEST_FINITE, SMALLEST_NORMAL, SMALLEST_POSITIVE, 0.0, -746.0, -709.0, -np.log(2) / 2, np.log(2) / 2)
    for number in (np.nextafter(edge, -np.inf), edge, np.nextafter(edge, np.inf))
]
EXPONENTS = st.one_of(
    st.floats(-746.0, LARGEST_FINITE),
    st.floats(-0.4, 0.4),
    st.floats(-746.0, -708.0),
    st.floats(),
    st.sampled_from(EDGES),
    st.builds(lambda k, ulps: k * np.log(2) / 2 * (1 + ulps * 2.0**-52), st.integers(-2150, 2048), st.integers(-9, 9)),
)


@pytest.fixture(scope="module")
def compiled():
    llvm = pytest.importorskip("llvmlite.binding", reason="the extra fast is not installed; .ci/run has it")
    if not {"avx2", "fma"} <= {name for name, has in llvm.get_host_cpu_features().items() if has}:
        pytest.skip("the processor has no AVX2, for which exponentials are compiled")
    from dkfm.kernels.pairwise.exponential_llvm import compile_exponential

    return compile_exponential()


def assert_precise(exponents, found):
    """Assert errors below 0.75 units in the last place, and 0.875 for denormal numbers, which are rounded twice."""
    with mpmath.workdps(40), np.errstate(over="ignore"):
        for x, value in zip(exponents, found, strict=True):
            if np.isnan(x):
                assert np.isnan(value)
            elif x > LARGEST_FINITE:
                assert value == np.inf
            else:
                error = abs(mpmath.mpf(value) - mpmath.exp(mpmath.mpf(x)))
                limit = 0.75 if value >= np.finfo(float).tiny else 0.875
                assert error < limit * mpmath.mpf(np.spacing(value)), (x, value)


@settings(max_examples=300)
@given(st.lists(EXPONENTS, min_size=1, max_size=40))
def test_compiled_exponentials_are_within_one_unit_in_the_last_place(compiled, exponents):
    found = np.array(exponents)
    compiled(found)
    assert_precise(exponents, found.tolist())


def test_of_a_hundred_compiled_exponentials_98_are_rounded_correctly(compiled, rng):
    for ends in ([-0.35, 0.35], [-30.0, 0.0], [-708.0, 709.0]):
        exponents = rng.uniform(*ends, 100_000)
        found = exponents.copy()
        compiled(found)
        errors = np.abs(found - np.exp(exponents.astype(np.longdouble))) / np.spacing(found)
        assert errors.max() < 0.7
        assert (errors > 0.5).mean() < 0.02


def test_compiled_exponentials_of_edges_are_those_of_numpy(compiled):
    edges = np.array([np.nan, -np.inf, np.inf, -0.0, 5e-324, -1e308, 1e308, *EDGES])
    found = edges.copy()
    compiled(found)
    assert_precise(edges.tolist(), found.tolist())
    with np.errstate(over="ignore", under="ignore"):
        expected = np.exp(edges)
    np.testing.assert_array_equal(found == 0, expected == 0)
    np.testing.assert_array_equal(found[:7], expected[:7])
    assert not np.signbit(found[1:]).any()


@given(st.lists(EXPONENTS, min_size=1, max_size=20).map(lambda few: few * 4), st.integers(0, 20))
def test_a_compiled_exponential_does_not_depend_on_the_others_or_on_its_place(compiled, exponents, offset):
    alone = np.repeat(exponents, 5).reshape(-1, 5)
    together, strided = np.array(exponents), np.full((len(exponents) + offset, 3), 7.0)
    strided[offset:, 1] = exponents
    for row in alone:
        compiled(row[2:3])
    compiled(together)
    compiled(strided[offset:, 1])
    np.testing.assert_array_equal(together, alone[:, 2])
    np.testing.assert_array_equal(strided[offset:, 1], together)
    assert (strided[:, [0, 2]] == 7).all()
    assert (strided[:offset] == 7).all()
    np.testing.assert_array_equal(alone[:, 4], exponents)


@pytest.mark.parametrize("shape", [(3,), (40,), (4, 40)])
def test_read_only_values_stay(compiled, shape, monkeypatch):
    for exponentiate in (compiled, block_operations._exponentiate_with_numpy):
        monkeypatch.setattr(block_operations, "find_exponential", lambda found=exponentiate: found)
        for value in (-1.0, -800.0):
            values = np.full(shape, value)
            values.flags.writeable = False
            with pytest.raises(ValueError, match="read-only"):
                exp_in_place(values)
            assert (values == value).all()


@pytest.mark.parametrize("layout", ["C", "F"])
def test_blocks_of_any_size_take_the_compiled_exponential(compiled, layout, rng, monkeypatch):
    monkeypatch.setattr(block_operations, "find_exponential", lambda: compiled)
    for shape in ((0,), (7,), (0, 3), (3, 0), (2, 3), (300, 200), (3, 40_000)):
        values = np.asarray(rng.uniform(-760, 0, shape), order=layout)
        expected = values.ravel().copy()
        compiled(expected)
        assert exp_in_place(values) is values
        np.testing.assert_array_equal(values.ravel(), expected)
        single = values.astype(np.float32)
        np.testing.assert_array_equal(exp_in_place(single.copy()), np.exp(single))


@pytest.mark.costly
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("shape", [(0,), (7,), (0, 3), (3, 0), (2, 3), (300, 200), (3, 40_000)])
def test_without_compiled_ones_exponentials_are_those_of_numpy_bit_by_bit(shape, dtype, rng, monkeypatch):
    monkeypatch.setattr(block_operations, "find_exponential", lambda: block_operations._exponentiate_with_numpy)
    for ends in ([-1.0, 1.0], [-760.0, -700.0], [-2000.0, 0.0], [-2000.0, -800.0], [700.0, 720.0]):
        for rare in ([], [np.nan, -np.inf, -745.14], [-1.0]):
            values = rng.uniform(*ends, shape).astype(dtype)
            values.flat[1 : 1 + len(rare)] = rare[: max(0, values.size - 1)]
            with np.errstate(over="ignore"):
                expected, found = np.exp(values), values.copy()
                assert exp_in_place(found) is found
                np.testing.assert_array_equal(found, expected)
                assert not np.signbit(found[found == 0]).any()
                part = np.concatenate([values, values])[::2]
                np.testing.assert_array_equal(exp_in_place(part.copy()), np.exp(part))


@pytest.mark.parametrize("has_llvmlite", [False, True])
@pytest.mark.parametrize("current", ["X86_V3", "AVX2", "FMA3__AVX2", "X86_V4", "AVX512_SKX", "baseline(X86_V2)", None])
def test_exponentials_are_compiled_where_numpy_has_none_for_the_processor(current, has_llvmlite, compiled, monkeypatch):
    loops = {} if current is None else {"exp": {"dd": {"current": current, "available": "X86_V4 X86_V3 baseline"}}}
    monkeypatch.setattr("numpy.lib.introspect.opt_func_info", lambda **_: loops)
    uncached = block_operations._find_instruction_set.__wrapped__
    monkeypatch.setattr(block_operations, "_find_instruction_set", uncached)
    monkeypatch.setattr(block_operations, "has_llvm", lambda: has_llvmlite)
    found = block_operations.find_exponential.__wrapped__()
    is_compiled = found is not block_operations._exponentiate_with_numpy
    assert is_compiled == (has_llvmlite and current in {"X86_V3", "AVX2", "FMA3__AVX2"})


CHOICE = """
import sys, numpy as np
from dkfm.kernels import Gaussian
from dkfm.kernels.pairwise import block_operations
x = np.linspace(0, 37, 999)[:, np.newaxis]
values = Gaussian(1.0)(x, np.zeros((1, 1)))
print(block_operations.find_exponential() is not block_operations._exponentiate_with_numpy, "numba" in sys.modules)
np.testing.assert_allclose(values[:, 0], np.exp(-x[:, 0] ** 2 / 2), rtol=1e-12)
"""


def test_numpys_own_report_decides_and_numba_is_not_imported(compiled, monkeypatch):
    dispatched = np._core._multiarray_umath.__cpu_dispatch__
    without = [name for name in dispatched if name.startswith(("AVX512", "X86_V4"))]
    monkeypatch.setenv("NPY_DISABLE_CPU_FEATURES", " ".join(without))
    told = subprocess.check_output([sys.executable, "-W", "ignore", "-c", CHOICE], text=True)
    assert told.split() == ["True", "False"]


def test_no_thread_finds_the_characters_of_llvmlite_half_written():
    pytest.importorskip("llvmlite", reason="the extra fast is not installed; .ci/run has it")
    code = "from llvmlite.ir.values import _escape_string as escape; print(len(escape.__defaults__[0]))"
    for module in ("llvm_compiler", "columnwise_numba"):
        imported = f"import dkfm.kernels.pairwise.{module}; {code}"
        assert int(subprocess.check_output([sys.executable, "-c", imported], text=True)) == 256


def test_threads_compile_in_turn(monkeypatch):
    pytest.importorskip("llvmlite", reason="the extra fast is not installed; .ci/run has it")
    from dkfm.kernels.pairwise import exponential_llvm, llvm_compiler

    build, held = exponential_llvm._build_module, []
    monkeypatch.setattr(
        exponential_llvm, "_build_module", lambda: held.append(llvm_compiler._compiling.locked()) or build()
    )
    exponential_llvm.compile_exponential()(np.zeros(3))
    assert held == [True]
    assert not llvm_compiler._compiling.locked()
