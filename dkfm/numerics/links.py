"""The closed registry of a head's last step: from the product of a tile to what the user asked for."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from dkfm.core.rows import Array
from dkfm.errors import UnsupportedStoreError

Diagonal = Callable[[], Array]
"""What computes the diagonal k(z, z) (n,), where a link asks for it."""

Codes = npt.NDArray[np.int64]
"""Of classes: 0, 1, .. in their order."""

Link = Callable[[Array, Diagonal], Array | Codes]
"""(product (n, q), diagonal) -> result (n, width)."""

IDENTITY = "identity"
RESIDUAL = "residual"
CENTRED_RESIDUAL = "centred_residual"
ARGMAX = "argmax"
SIGMOID = "sigmoid"
SOFTMAX = "softmax"
MODIFIED_HUBER = "modified_huber"
NOT_NEGATIVE = "not_negative"

NO_CODE = -1
"""Of a row that has no class, for its product is not finite; where others have NaN."""


def _identity(product: Array, diagonal: Diagonal) -> Array:
    return product


def _residual(product: Array, diagonal: Diagonal) -> Array:
    """``k(z, z) - |phi(z)|^2``, clipped at 0: the squared distance of z from the span of the landmarks."""
    difference: Array = diagonal() - np.einsum("ij,ij->i", product, product, dtype=np.float64)
    np.maximum(difference, 0.0, out=difference)
    return difference[:, np.newaxis]


def _centred_residual(product: Array, diagonal: Diagonal) -> Array:
    """Take the last column, ``2 <phi(z), m> - |m|^2``, too: the squared distance from a span through the mean m."""
    squares = np.einsum("ij,ij->i", product[:, :-1], product[:, :-1], dtype=np.float64)
    difference: Array = diagonal() - product[:, -1] - squares
    np.maximum(difference, 0.0, out=difference)
    return difference[:, np.newaxis]


def _argmax(product: Array, diagonal: Diagonal) -> Codes:
    """Return the class whose column is largest; of one column 1 where it is positive, else 0."""
    codes: Codes = product.argmax(axis=1) if product.shape[1] > 1 else (product[:, 0] > 0).astype(np.int64)
    codes[_lost(product)] = NO_CODE
    return codes[:, np.newaxis]


def _not_negative(product: Array, diagonal: Diagonal) -> Codes:
    """Return 1 where the one column is 0 or more, else 0: how scikit-learn's outlier detectors decide."""
    codes = (product >= 0).astype(np.int64)
    codes[_lost(product)] = NO_CODE
    return codes


def _sigmoid(product: Array, diagonal: Diagonal) -> Array:
    """Return 1 / (1 + exp(-product)): of one column that of both classes, of more as shares of their sum."""
    from scipy.special import expit, log_expit, softmax

    if product.shape[1] == 1:
        chances: Array = expit(np.hstack([-product, product]))
    else:
        chances = softmax(log_expit(product), axis=1)
    chances[_lost(product)] = np.nan
    return chances


def _softmax(product: Array, diagonal: Diagonal) -> Array:
    from scipy.special import softmax

    chances: Array = softmax(product, axis=1)
    chances[_lost(product)] = np.nan
    return chances


def _modified_huber(product: Array, diagonal: Diagonal) -> Array:
    """Return ``(clip(product, -1, 1) + 1) / 2``, as `_sigmoid` does; of all classes the same where all are 0."""
    halves = (np.clip(np.hstack([-product, product]) if product.shape[1] == 1 else product, -1, 1) + 1) / 2
    sums = halves.sum(axis=1, keepdims=True)
    halves[sums[:, 0] == 0] = 1
    chances: Array = halves / np.where(sums == 0, halves.shape[1], sums)
    chances[_lost(product)] = np.nan
    return chances


def _lost(product: Array) -> npt.NDArray[np.bool_]:
    finite: npt.NDArray[np.bool_] = np.logical_and.reduce(np.isfinite(product), axis=1)
    return ~finite


_REGISTRY: dict[str, Link] = {
    IDENTITY: _identity,
    RESIDUAL: _residual,
    CENTRED_RESIDUAL: _centred_residual,
    ARGMAX: _argmax,
    SIGMOID: _sigmoid,
    SOFTMAX: _softmax,
    MODIFIED_HUBER: _modified_huber,
    NOT_NEGATIVE: _not_negative,
}


def link_by_name(name: object) -> Link:
    """Return a link; a name that is not in the registry is refused."""
    if not isinstance(name, str) or name not in _REGISTRY:
        raise UnsupportedStoreError(f"There is no link {name!r}; dkfm knows {', '.join(sorted(_REGISTRY))}.")
    return _REGISTRY[name]


def needs_diagonal(name: str) -> bool:
    """Whether a link needs k(z, z), and gives one squared distance a row."""
    return name in (RESIDUAL, CENTRED_RESIDUAL)


def returns_codes(name: str) -> bool:
    """Whether a link gives codes of classes."""
    return name in (ARGMAX, NOT_NEGATIVE)


def count_classes(columns: int) -> int:
    """Return how many classes a product of so many columns decides between."""
    return 2 if columns == 1 else columns


def output_width(name: str, columns: int) -> int:
    """Return the columns of what a link makes of a product with so many.

    >>> output_width("argmax", 10), output_width("sigmoid", 1), output_width("softmax", 3)
    (1, 2, 3)
    """
    if needs_diagonal(name) or returns_codes(name):
        return 1
    return count_classes(columns) if name in (SIGMOID, MODIFIED_HUBER) else columns


def result_dtype(name: str, dtype: np.dtype[np.floating]) -> np.dtype[np.generic]:
    """Return what a link makes of products of a dtype: int64 codes, or the same."""
    return np.dtype(np.int64) if returns_codes(name) else dtype


def valid_rows(values: Array | Codes) -> npt.NDArray[np.bool_]:
    """Return which rows (n,) of what a link made (n, width) are of a finite product."""
    valid = values >= 0 if values.dtype.kind == "i" else np.isfinite(values)
    found: npt.NDArray[np.bool_] = np.logical_and.reduce(valid, axis=1)
    return found
