"""The exactness suite: every line of the benchmark holds its bounds, beside scikit-learn's map of the same rows."""

import conftest
import numpy as np
import pytest

from benchmarks import exactness

EPS, EPS32 = float(np.finfo(np.float64).eps), float(np.finfo(np.float32).eps)
FACTORS = {"symmetric": 3.0, "spectral": 1.5, "cholesky": 1.5}
"""Of the error of scikit-learn's map: a symmetric root rounds once more."""

IMAGES = conftest.images_247()


def cases(n, lines, *marks):
    return [pytest.param(line, n, id=f"{line.name}, {n}", marks=marks) for line in lines]


SMALL = cases(150, [line for line in exactness.lines(150, IMAGES) if line.scale == 1])
# Those of 300 rows also show that nothing depends on the scale of a kernel.
MEDIUM = cases(300, exactness.lines(300, IMAGES), pytest.mark.slow)
# Those of the paper have its number of rows, and the widest kernel the rank at which float32 is as exact as it claims.
WHOLE = {"k1, MNIST", "k2, MNIST", "Gaussian 1-D wide"}
LARGE = [
    case
    for n in (1000, 1500)
    for case in cases(
        n,
        [line for line in exactness.lines(n, IMAGES) if line.scale == 1 and (line.name in WHOLE) == (n == 1500)],
        pytest.mark.slow,
    )
]


OWN_SCALE = {"cholesky": 1e-13, "spectral": 1e-13}
"""Own-scale error of a map whose scaled matrix is well-conditioned. The spectral one grows with the condition."""


@pytest.mark.parametrize(("line", "n"), SMALL + MEDIUM + LARGE)
def test_a_line_is_as_exact_as_promised(line, n):
    results = exactness.measure(line, n)
    require_absolute_errors(line, n, results)
    condition = results["spectral", "float64"].condition
    for (basis, dtype), found in results.items():
        if basis == "Nystroem":
            continue
        own = max(found.train[1], found.test[1])
        assert found.train[1] <= found.bound, (basis, dtype)
        assert found.test[1] <= found.bound, (basis, dtype)
        if dtype == "float64" and basis in OWN_SCALE and condition < 1e8:
            allowed = max(OWN_SCALE[basis], 2 * EPS * condition**0.5 if basis == "spectral" else 0.0)
            assert own <= allowed, basis


def require_absolute_errors(line, n, results):
    """Errors relative to the largest value, beside those of scikit-learn's map."""
    for basis, factor in FACTORS.items():
        double = results[basis, "float64"]
        for pairs in ("train", "test"):
            error, peer = getattr(double, pairs)[0], getattr(results["Nystroem", "float64"], pairs)[0]
            assert error <= max(factor * peer, 1e-13, EPS * n / 2) or np.isnan(peer), (basis, pairs)
            assert error <= 2e-8, (basis, pairs)
            if "float32" in line.dtypes:
                error32, peer32 = (getattr(results[m, "float32"], pairs)[0] for m in (basis, "Nystroem"))
                assert error32 <= max(1.5 * peer32, 16 * EPS32), (basis, pairs, "float32")
                assert error32 <= 1e-4, (basis, pairs, "float32")
            if double.rank == n:
                assert error <= max(1e-12, 4 * EPS * results["spectral", "float64"].condition ** 0.5), (basis, pairs)
        assert double.residual >= -1e-12, basis
        assert line.rank in (None, double.rank), basis
