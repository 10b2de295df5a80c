"""Search for pairs that break the error bound of a map: random maps, then a climb from the worst pairs.

    python tests/benchmarks/bounds.py [MAPS] [FIRST SEED]

Each seed draws rows, a kernel, a basis, a dtype, landmarks and a truncation. The map is compared with kernel values in
extended precision on pairs of a training row with training rows, and with new rows: like them, tiny, far, beside them,
and 0. Every 20th map is then climbed: z, and x with a new fit for each step, move where error over bound grows.
300 maps are drawn by default; some are refused by their kernel or dtype. The last lines have the number of broken
bounds, and the quartiles of bound over largest error, of the maps and of the climbs; the exit code is 1 if a bound was
broken.
A pair of which the features hold nothing errs by its own scale: with a bound of 1, bound over error is then 1.
"""

import sys
import warnings

import numpy as np

from dkfm import ExactFeatureMap, kernels
from dkfm.errors import DkfmError, DkfmWarning
from dkfm.numerics import scorer

wide = np.longdouble
PI = wide("3.14159265358979323846264338327950288")
BASES = ("symmetric", "spectral", "cholesky")
CLIMBED = 20

LARGEST = {dtype: float(np.sqrt(np.finfo(dtype).max)) for dtype in ("float64", "float32")}
"""Length ``sqrt k(z, z)`` from which on values or features of z may overflow."""

SMALLEST = {dtype: float(np.finfo(dtype).tiny / np.finfo(dtype).eps) for dtype in ("float64", "float32")}
"""Size below which a kernel value or a feature underflows, which no bound of relative errors counts. Features of x are
at most as long as ``sqrt k(x, x)``."""


def products(X, Y):
    return (X[:, np.newaxis] * Y).sum(axis=2)


def squares(X, Y):
    return np.square(X[:, np.newaxis] - Y).sum(axis=2)


def gaussian(sigma):
    return lambda X, Y: np.exp(-squares(X, Y) / (2 * wide(sigma) ** 2))


def exponential(X, Y):
    return np.exp(-np.sqrt(squares(X, Y)) / 2)


def periodic(X, Y):
    phase = PI * (X[:, np.newaxis] - Y) / wide(2.5)
    return np.exp(-2 * np.square(np.sin(phase)).sum(axis=2) / wide(1.5) ** 2)


def chi_squared(X, Y):
    sums = X[:, np.newaxis] + Y
    shares = np.square(X[:, np.newaxis] - Y) / np.where(sums > 0, sums, 1)
    return np.exp(-shares.sum(axis=2) / 2)


def intersection(X, Y):
    return np.minimum(X[:, np.newaxis], Y).sum(axis=2)


def matern(X, Y):
    r = np.sqrt(3 * squares(X, Y)) / wide(1.5)
    return (1 + r) * np.exp(-r)


def units(X):
    """Return rows of length 1, or 0, and their lengths (n, 1)."""
    lengths = np.sqrt(np.square(X).sum(axis=1, keepdims=True))
    return X / np.where(lengths > 0, lengths, 1), lengths


def normalized(truth, X, Y):
    return truth(X, Y) / own_lengths(truth, X)[:, np.newaxis] / own_lengths(truth, Y)


def cosine(X, Y):
    return products(units(X)[0], units(Y)[0])


def angles(X, Y):
    """Return the angles between rows, which keep their digits where they are small."""
    half = np.sqrt(squares(units(X)[0], units(Y)[0])) / 2
    return 2 * np.arcsin(np.minimum(half, 1))


def arc_cosine(X, Y):
    """Cho and Saul's kernel of order 1."""
    angle, scale = angles(X, Y), units(X)[1] * units(Y)[1].T
    return scale / PI * (np.sin(angle) + (PI - angle) * np.cos(angle))


KERNELS = (
    (kernels.Gaussian(0.3), gaussian(0.3)),
    (kernels.Gaussian(2.0), gaussian(2.0)),
    (kernels.Gaussian(30.0), gaussian(30.0)),
    (kernels.Laplacian(1.5), lambda X, Y: np.exp(-np.abs(X[:, np.newaxis] - Y).sum(axis=2) / wide(1.5))),
    (kernels.Matern(1.5, 1.5), matern),
    (kernels.RationalQuadratic(1.0, 0.5), lambda X, Y: 1 / (1 + 2 * squares(X, Y))),
    (kernels.Linear(), products),
    (kernels.Polynomial(2, scale=0.5, offset=0.0), lambda X, Y: (products(X, Y) / 2) ** 2),
    (kernels.Polynomial(5, scale=0.125, offset=1.0), lambda X, Y: (products(X, Y) / 8 + 1) ** 5),
    (kernels.Polynomial(9, scale=0.0625, offset=0.0), lambda X, Y: (products(X, Y) / 16) ** 9),
    (1e-120 * kernels.Polynomial(3), lambda X, Y: wide(1e-120) * products(X, Y) ** 3),
    (
        kernels.Gaussian(2.0) * kernels.Linear() + kernels.Polynomial(2, offset=0.0),
        lambda X, Y: gaussian(2.0)(X, Y) * products(X, Y) + products(X, Y) ** 2,
    ),
    (kernels.ArcCosine(1), arc_cosine),
    (kernels.Exponential(2.0), exponential),
    (kernels.Cosine(), cosine),
    (
        kernels.Normalized(kernels.Polynomial(3, offset=1.0)),
        lambda X, Y: normalized(lambda A, B: (products(A, B) + 1) ** 3, X, Y),
    ),
    (kernels.Exp(kernels.Polynomial(2, scale=0.25, offset=1.0)), lambda X, Y: np.exp((products(X, Y) / 4 + 1) ** 2)),
    (kernels.Periodic(2.5, 1.5), periodic),
    (kernels.ChiSquared(0.5), chi_squared),
    (kernels.HistogramIntersection(), intersection),
    (kernels.Linear() * kernels.Cosine(), lambda X, Y: products(X, Y) * cosine(X, Y)),
    (kernels.Cosine() * kernels.Gaussian(0.3), lambda X, Y: cosine(X, Y) * gaussian(0.3)(X, Y)),
    (
        kernels.Polynomial(2, scale=0.5, offset=1.0) * kernels.Matern(1.5, 1.5),
        lambda X, Y: (products(X, Y) / 2 + 1) ** 2 * matern(X, Y),
    ),
    (kernels.Cosine() ** 3 + 0.5 * kernels.Exponential(2.0), lambda X, Y: cosine(X, Y) ** 3 + exponential(X, Y) / 2),
)


def admit(kernel, rows):
    """Return rows that a kernel takes: those of histograms without negative numbers."""
    return np.abs(rows) if isinstance(kernel, kernels.ChiSquared | kernels.HistogramIntersection) else rows


def draw_rows(rng, n, d):
    X = rng.normal(size=(n, d))
    shape = rng.integers(7)
    if shape == 1:  # mixed lengths
        X *= np.exp(rng.uniform(-8, 3, size=(n, 1)))
    elif shape == 2:  # two clusters, at a large shift
        X += 10.0 ** rng.uniform(0, 4) * rng.choice([-1, 1], size=(n, 1))
    elif shape == 3:  # one cluster far from 0
        X += 10.0 ** rng.uniform(0, 6)
    elif shape == 4:  # rows that occur twice
        X[n // 2 :] = X[: n - n // 2]
    elif shape == 5:  # nearly equal rows
        X[1::2] = X[: n // 2 * 2 : 2] + 10.0 ** rng.uniform(-9, -3) * X[1::2]
    elif shape == 6:  # small numbers
        X *= 10.0 ** rng.uniform(-5, -1)
    return X


def draw_points(rng, X):
    like = X[rng.integers(len(X), size=8)] + rng.normal(size=(8, X.shape[1])) * X.std(axis=0)
    beside = X[:8] + 1e-7 * rng.normal(size=X[:8].shape) * np.abs(X[:8])
    return np.concatenate([like, 1e-6 * like, 1e3 * like, -like, beside, np.zeros((1, X.shape[1]))])


def draw_options(rng, n):
    basis = BASES[rng.integers(3)]
    options = {"basis": basis, "dtype": ("float64", "float32")[int(rng.integers(4) == 0)]}
    landmarks = (None, None, "uniform", "pivots", "random_pivots")[rng.integers(5)]
    if landmarks:
        options |= {"landmarks": landmarks, "random_state": 0}
        options |= {"n_landmarks": int(rng.integers(1, n + 1))} if rng.integers(2) or landmarks != "pivots" else {}
    if rng.integers(4) == 0:
        options["tol"] = float(10.0 ** rng.uniform(-8, -1))
    elif rng.integers(6) == 0 and basis != "cholesky":
        options["rcond"] = float(10.0 ** rng.uniform(-12, -2))
    return options, rng.uniform() if rng.integers(5) == 0 else None


def fit(kernel, X, options, share):
    """Return a map, truncated to a share of its rank; None if its kernel or its dtype refuses these rows."""
    try:
        phi = ExactFeatureMap(kernel, **options).fit(admit(kernel, X))
    except DkfmError:
        return None
    return phi if share is None else phi.truncate(int(np.ceil(share * phi.rank_)))


def ratios(phi, truth, X, Z):
    """Return ``|<phi(x), phi(z)> - k(x, z)| / (E sqrt(k(x, x) k(z, z)))``, (n, m)."""
    X, Z = (admit(phi.kernel_, np.atleast_2d(rows)) for rows in (X, Z))
    with np.errstate(all="ignore"):
        score = scorer.prepare_scorer(phi.model_)  # rows that overflow are no error here, and are left out below
        F, G = (score("features", rows).astype(np.float64) for rows in (X, Z))
        errors = np.abs(F @ G.T - truth(X.astype(wide), Z.astype(wide)))
        left, right = own_lengths(truth, X), own_lengths(truth, Z)
        found = errors / left[:, np.newaxis] / right / phi.error_bound_
        known = np.concatenate([left, own_lengths(truth, np.asarray(phi.model_.original_landmarks))])
        held = right * np.minimum(known[known > 0].min(initial=np.inf), 1.0) >= SMALLEST[phi.dtype]
        held = held & (left >= SMALLEST[phi.dtype])[:, np.newaxis]
        if isinstance(phi.kernel_, kernels.Periodic) and phi.dtype == "float32":  # which rounds numbers, and so phases
            landmarks = np.asarray(phi.model_.original_landmarks)
            centre = landmarks.mean(axis=0)
            held &= np.abs(Z - centre).max(axis=1) <= np.abs(landmarks - centre).max()
        held &= (right < LARGEST[phi.dtype]) & (known.max() * right < LARGEST[phi.dtype] ** 2)
    found = np.where(np.isnan(found), np.inf, found)  # of an error that is not a number
    return np.where(held & (errors != 0), found, 0.0).astype(np.float64)


def own_lengths(truth, rows):
    """Return ``sqrt k(x, x)``, (n,)."""
    return np.sqrt(np.array([truth(row[np.newaxis], row[np.newaxis])[0, 0] for row in rows.astype(wide)]))


def climb(rng, kernel, truth, X, options, share, worst):
    """Move z, then x, where the ratio grows; return the largest ratio that was found."""
    i, z, best = worst
    phi, step = fit(kernel, X, options, share), 0.3
    for _ in range(40):
        moved = z + step * rng.normal(size=(16, len(z))) * max(np.abs(z).max(), 1e-3)
        found = ratios(phi, truth, X[i], moved)[0]
        if found.max() > best:
            z, best = moved[found.argmax()], found.max()
        else:
            step /= 2
    step = 0.1
    for _ in range(6):
        moved = X.copy()
        moved[i] += step * rng.normal(size=X.shape[1]) * max(np.abs(X[i]).max(), 1e-3)
        other = fit(kernel, moved, options, share)
        found = 0.0 if other is None else ratios(other, truth, moved[i], z)[0, 0]
        if found > best:
            X, best = moved, found
        else:
            step /= 2
    return best


def search(seed):
    """Return the largest ratio of the map of a seed, and after a climb; None if its kernel refuses its rows."""
    rng = np.random.default_rng(seed)
    n, d = int(rng.integers(2, 50)), int(rng.integers(1, 12))
    (kernel, truth), X = KERNELS[rng.integers(len(KERNELS))], draw_rows(rng, n, d)
    options, share = draw_options(rng, n)
    phi = fit(kernel, X, options, share)
    if phi is None:
        return None
    Z = np.concatenate([X, draw_points(rng, X)])
    found = ratios(phi, truth, X, Z)
    i, j = np.unravel_index(found.argmax(), found.shape)
    worst = float(found[i, j])
    climbed = climb(rng, kernel, truth, X, options, share, (i, Z[j], worst)) if seed % CLIMBED == 0 else None
    about = f"{kernel!r} n={n} d={d} {options} share={share} bound={phi.error_bound_:.1e}"
    return worst, climbed, about


def main():
    count, first = ([int(argument) for argument in sys.argv[1:]] + [300, 0][len(sys.argv) - 1 :])[:2]
    warnings.simplefilter("ignore", DkfmWarning)
    worst, climbed, refused = [], [], 0
    for seed in range(first, first + count):
        result = search(seed)
        if result is None:
            refused += 1
            continue
        worst.append(result[0])
        climbed += [] if result[1] is None else [result[1]]
        if max(result[0], result[1] or 0.0) > 1:
            print(f"broken {max(result[0], result[1] or 0.0):.2f} times, seed {seed}: {result[2]}", flush=True)
    summarize(f"{len(worst)} maps ({refused} refused)", worst)
    if climbed:
        summarize(f"{len(climbed)} climbs", climbed)
    sys.exit(int(max(worst + climbed) > 1))


def summarize(what, found):
    low, median, high = 1 / np.quantile(np.maximum(found, 1e-300), [0.75, 0.5, 0.25])
    print(
        f"{what}: {sum(w > 1 for w in found)} broken; bound over error: median {median:.0f}, quartiles {low:.0f} and ",
        end="",
    )
    print(f"{high:.0f}, least {1 / max(found):.2f}")


if __name__ == "__main__":
    main()
