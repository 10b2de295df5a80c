"""Certify models: compare what a model returns with the kernel values or eigenvalues that define it.

The model itself computes the compared values, so that damaged weights, landmarks or offsets increase the errors.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from math import isnan

import numpy as np
import numpy.typing as npt

from dkfm.core.rows import Array, Rows
from dkfm.errors import CertificateError, InvalidInputError, UnsupportedStoreError, warn_caller
from dkfm.kernels.base import Kernel, evaluate_block
from dkfm.numerics import training_statistics
from dkfm.numerics.roots import row_lengths
from dkfm.numerics.scorer import Scorer

MAX_SAMPLED_ROWS = 512

LIMITS = {"float64": 1e-6, "float32": 1e-2}
"""Largest error, relative to the largest value, without a warning at the fit, by the dtype of the model."""

_COMPARED = {
    "components": ("pair", "pairs of components"),
    "discriminants": ("pair", "pairs of discriminants"),
    "predictions": ("prediction", "predictions"),
}
"""For comparisons other than pairs of points: words for what gives the scale of an error, and for what is counted."""

_SHORTEST_LENGTH = float(np.sqrt(np.finfo(np.float64).tiny))
"""Length ``sqrt k(x, x)`` of a row below which k(x, x) underflows."""


@dataclass(frozen=True)
class Certificate:
    """Measured errors of a model; in exact arithmetic they are 0, or the part that selected landmarks leave out.

    Attributes
    ----------
    error : float
        Largest ``|error|``, relative to the largest ``|k|``.
    relative_error : float
        Largest ``|error| / sqrt(k(x, x) k(z, z))``, relative to the scale of each pair, so that pairs of small k(x, x)
        count as much as others. For a map, rows are also compared with sums of all landmarks with random signs, to
        which every weight contributes. The scale of such a sum is that of its terms, so that its error may exceed the
        error of every pair.
    pairs : int
        Number of comparisons: pairs; for a map also rows with these sums, and rows with themselves.
    sampled_rows : int, optional
        Number of training rows in a random sample; other rows may have larger errors. None if the certificate is not
        restricted to a random sample.
    compared : {"components", "discriminants", "predictions"}, optional
        What has these errors: pairs of components or of discriminants, or single predictions. None for pairs of points.
        Small components have large relative errors in correct models too.
    """

    error: float
    relative_error: float
    pairs: int
    sampled_rows: int | None = None
    compared: str | None = None

    @classmethod
    def from_dict(cls, stored: object) -> "Certificate":
        """Return the certificate in a stored dictionary; raise an error if it is invalid."""
        required, optional = {"error", "relative_error", "pairs"}, {"sampled_rows", "compared"}
        if not isinstance(stored, dict) or set(stored) - optional != required:
            raise UnsupportedStoreError("The certificate of this model is not what dkfm writes.")
        error, relative, pairs = stored["error"], stored["relative_error"], stored["pairs"]
        counts = [pairs, stored.get("sampled_rows", 1)]
        are_counts = all(type(count) is int for count in counts) and counts[1] > 0
        are_valid = isinstance(error, float) and isinstance(relative, float) and are_counts and not isnan(error)
        compared = stored.get("compared")
        if not are_valid or compared not in (None, *_COMPARED):
            raise UnsupportedStoreError("The certificate of this model is not what dkfm writes.")
        return cls(error, relative, pairs, stored.get("sampled_rows"), compared)

    def to_dict(self) -> dict[str, float]:
        """Return the dictionary that is stored; it leaves out fields that are None."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def combine(self, other: "Certificate") -> "Certificate":
        """Return the larger errors of two certificates, and the sum of their pairs; NaN counts as the largest."""
        error, relative = np.maximum([self.error, self.relative_error], [other.error, other.relative_error])
        sampled = [rows for rows in (self.sampled_rows, other.sampled_rows) if rows is not None]
        pairs, compared = self.pairs + other.pairs, self.compared or other.compared
        return Certificate(float(error), float(relative), pairs, max(sampled, default=None), compared)

    def require_not_worse_than(self, fitted: "Certificate", or_given: str = "") -> None:
        """Raise a CertificateError if this measurement exceeds that of the fit by more than machines may differ.

        `or_given` names an argument of the user, such as a Gram matrix, that may belong to another fit.
        """
        same = self.error <= 10 * fitted.error + 1e-14 and self.relative_error <= 10 * fitted.relative_error + 1e-14
        if not same:  # also true for NaN
            cause = "its values have changed" + (f", or {or_given} is not that of the fit" if or_given else "")
            raise CertificateError(
                f"The model measures {self}, and measured {fitted} when it was fitted: {cause}; take a copy of it that "
                "has not, or fit it again."
            )

    def require_error_at_most(self, bound: float) -> None:
        """Raise a CertificateError if `error` exceeds the bound that the numerical rank explains."""
        if not self.error <= bound:
            raise CertificateError(f"The model measures {self} on these points, and its rank explains {bound:.1e}.")

    def require_relative_error_at_most(self, bound: float) -> None:
        """Raise a CertificateError if `relative_error` exceeds the error bound of the map."""
        if not self.relative_error <= bound:
            raise CertificateError(f"The model measures {self} on these points, and its error bound is {bound:.1e}.")

    def __str__(self) -> str:
        largest = f"{self.error:.1e} of the largest"
        each, what = ("pair", "pairs") if self.compared is None else _COMPARED[self.compared]
        measured = f"{self.relative_error:.1e} of each {each}'s own scale, {largest}, {self.pairs:,} {what}"
        if self.sampled_rows is None:
            return measured
        return f"{measured} of a random sample of {self.sampled_rows:,} training rows, not of all of them"


def warn_if_error_is_large(
    error: float, dtype: np.dtype[np.floating], finding: str, remedy: str, limit: float | None = None
) -> None:
    """Warn if the error of a fitted model exceeds a limit, by default 1e-6, or 1e-2 in float32.

    Parameters
    ----------
    error : float
        `Certificate.relative_error` for a map. For components and discriminants `Certificate.error`, because their
        relative error is large for small components even in correct models.
    dtype : dtype
        Dtype of the model.
    finding, remedy : str
        Parts of the warning: the finding with the number, and the remedy.
    limit : float, optional
        Largest error without a warning.

    Warns
    -----
    DkfmWarning
        The error exceeds the limit.
    """
    limit = LIMITS[dtype.name] if limit is None else limit
    if not error <= limit:  # also true for NaN
        warn_caller(f"{finding}, and at most {limit:.0e} is expected; {remedy}.")


def describe_overflow(dtype: np.dtype[np.floating], kernel: Kernel) -> str:
    """Return an error message: values that a model of this kernel computes on its own rows overflow a dtype."""
    remedy = 'fit with dtype="float64", or ' if dtype == np.float32 else ""
    return (
        f"{dtype} does not hold the values of {kernel!r} on these rows, or the coefficients of the model: {remedy}"
        "scale the rows or the kernel, down if the values are large, and up if they are tiny."
    )


def certify_map(
    scorer: Scorer,
    X: Rows,
    kernel_rows: Rows | None = None,
    Z: Rows | None = None,
    tiles: Iterable[Rows] = (),
    diagonal: Array | None = None,
    mean: Array | None = None,
) -> Certificate:
    """Compare ``<phi(x), phi(z)>`` with ``k(x, z)``.

    Parameters
    ----------
    scorer : Scorer
        A prepared model with a head "features".
    X : ndarray or csr_array of shape (s, d)
        Rows x.
    kernel_rows : ndarray or csr_array of shape (s, d), optional
        The same rows in the form that the kernel takes: for a precomputed kernel, the numbers of their columns. By
        default X.
    Z : ndarray or csr_array of shape (m, d), optional
        Points z, of which at most 512 are used, evenly spread; by default X.
    tiles : iterable of ndarray or csr_array, optional
        Tiles of all landmarks, if X are some of them. The rows are then also paired with two fixed combinations of all
        landmarks with random signs, one of them scaled by length, so that the certificate depends on all weights.
    diagonal : ndarray of shape (N,), optional
        k(x, x) of all landmarks; needed with `tiles`.
    mean : ndarray of shape (N,), optional
        Mean of a centred map, as in `roots.make_map_heads`; its features are added back to those of the rows.

    Returns
    -------
    Certificate
        Errors of the features, which have the model's dtype; their inner products are computed in float64.
    """
    points = X if kernel_rows is None else kernel_rows
    features, found, expected, left, right = _compute_both_blocks(scorer, X, points, Z, mean)
    if mean is None:
        measured = certify_block(found, expected, left, right)
    else:  # centring rounds relative to the length of the mean, which may be far larger than that of a row
        size = float(np.square(scorer.apply_weights("features", mean[np.newaxis]).astype(np.float64)).sum())
        error = certify_block(found, expected, left, right, size).error
        head = replace(scorer.model.head("features"), offset=None)
        uncentred = replace(scorer, model=replace(scorer.model, heads={"features": head}))
        features, found, *_ = _compute_both_blocks(uncentred, X, points, Z, None)
        measured = replace(certify_block(found, expected, left, right), error=error)
    if diagonal is None:
        return measured
    return measured.combine(_certify_random_combinations(scorer, features, left, tiles, diagonal))


def compute_relative_map_errors(score: Scorer, X: Rows, Z: Rows | None = None, mean: Array | None = None) -> Array:
    """Return ``|<phi(x), phi(z)> - k(x, z)| / sqrt(k(x, x) k(z, z))`` for all pairs, (s, m), of X and sampled Z."""
    _, found, expected, *lengths = _compute_both_blocks(score, X, X, Z, mean)
    return _scale_errors(np.abs(found - expected), *lengths)


def _compute_both_blocks(
    score: Scorer, X: Rows, points: Rows, Z: Rows | None, mean: Array | None
) -> tuple[Array, Array, Array, Array, Array]:
    """Return features of X, their inner products with those of Z, the expected kernel values, and both lengths.

    Lengths are ``sqrt k(x, x)`` of the rows of X and of Z. Z is X by default; `points` are X in the form that the
    kernel takes.
    """
    model, d = score.model, score.model.n_features_in
    Z = X if Z is None else Z[sample_evenly(Z.shape[0])]
    if Z.shape[1] != d:
        raise InvalidInputError(f"The points have {Z.shape[1]} columns and the model was fitted with {d}.")
    expected = evaluate_block(model.kernel, Z, points).T
    left = _uncentred_features(score, X, mean)
    right = left if Z is X else _uncentred_features(score, Z, mean)
    if model.kernel.is_precomputed:  # k(z, z) is known only for training rows
        diagonals = expected.diagonal(), expected.diagonal()
    else:
        diagonals = model.kernel.evaluate_diagonal(X), model.kernel.evaluate_diagonal(Z)
    left_lengths, right_lengths = (row_lengths(np.asarray(values, np.float64)) for values in diagonals)
    return left, left @ right.T, expected, left_lengths, right_lengths


def _uncentred_features(score: Scorer, X: Rows, mean: Array | None) -> Array:
    """Return the features (s, r) in float64, with the subtracted mean added back."""
    centre = 0.0 if mean is None else score.apply_weights("features", mean[np.newaxis])
    uncentred: Array = np.asarray(score("features", X) + centre, np.float64)
    return uncentred


def _certify_random_combinations(
    score: Scorer, features: Array, lengths: Array, tiles: Iterable[Rows], diagonal: Array
) -> Certificate:
    """Compare the inner products of features (s, r) and two random combinations of all landmarks with kernel values."""
    combined = training_statistics.kernel_values_of_random_combinations(score, tiles, diagonal)
    # The combinations get the length of the longest row, so that their errors have the scale of the rows.
    longest = float(lengths.max(initial=0.0))
    combined *= longest
    found = features @ score.apply_weights("features", combined).astype(np.float64).T
    expected = combined[:, sample_evenly(len(diagonal))].T
    return certify_block(found, expected, lengths, np.full(len(combined), longest))


def sample_evenly(n: int) -> npt.NDArray[np.intp]:
    """Return the numbers of at most 512 of n rows, evenly spread."""
    return np.linspace(0, n - 1, min(n, MAX_SAMPLED_ROWS)).astype(np.intp)


def certify_block(
    found: Array, expected: Array, left_lengths: Array, right_lengths: Array, size: float = 0.0
) -> Certificate:
    """Return the certificate of a block (s, m), with the lengths ``sqrt k(x, x)`` of its rows and of its columns.

    `size` is a lower limit of the largest value, to which `Certificate.error` is relative.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # overflow gives an infinite error
        error = np.abs(found - expected)
    largest = max(
        size, float(np.abs(expected).max()), *(float(np.square(v.max())) for v in (left_lengths, right_lengths))
    )
    relative = float(_scale_errors(error, left_lengths, right_lengths).max())
    return Certificate(_ratio(float(error.max()), largest), relative, found.size)


def _scale_errors(error: Array, left_lengths: Array, right_lengths: Array) -> Array:
    """Return errors (s, m) divided by the lengths of both sides, in two divisions because their product may overflow.

    A k(x, x) below the smallest normal number has lost digits by underflow, and counts as that number.
    """
    scaled = error.copy()
    with np.errstate(over="ignore"):  # overflow gives an infinite error
        for lengths in (left_lengths[:, np.newaxis], right_lengths):
            scaled /= np.maximum(lengths, _SHORTEST_LENGTH)
    return scaled


def _ratio(error: float, scale: float) -> float:
    return error / scale if scale > 0 else (0.0 if error == 0 else float("inf"))
