"""Define the links, a closed registry: a link is the last step of a head, from the product of a tile to the output."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from dkfm.core.rows import Array
from dkfm.errors import UnsupportedStoreError

ComputeDiagonal = Callable[[], Array]
"""Function that computes the diagonal k(z, z), (n,); only some links call it."""

Codes = npt.NDArray[np.int64]
"""Codes of classes: 0, 1, .. in the order of the classes."""

Link = Callable[[Array, ComputeDiagonal], Array | Codes]
"""Function of a product (n, q) and a diagonal that returns the output (n, width)."""

IDENTITY = "identity"
RESIDUAL = "residual"
CENTRED_RESIDUAL = "centred_residual"
ARGMAX = "argmax"
SIGMOID = "sigmoid"
SOFTMAX = "softmax"
MODIFIED_HUBER = "modified_huber"
NOT_NEGATIVE = "not_negative"

NO_CODE = -1
"""Code of a row whose product is not finite, and so has no class; links that return floats give NaN."""

_OUTPUTS_OF_CLASSES = ("decision_function", "predict_proba")
"""Outputs with a column for each class, but for a single one that decides between two classes."""


def name_class_columns(output: str, width: int, classes: Sequence[object]) -> tuple[str, ...]:
    """Return the labels, as text, of the classes that the columns of an output stand for; empty if they do not."""
    return tuple(map(str, classes)) if output in _OUTPUTS_OF_CLASSES and width == len(classes) else ()


def _identity(product: Array, diagonal: ComputeDiagonal) -> Array:
    return product


def _residual(product: Array, diagonal: ComputeDiagonal) -> Array:
    """Return ``k(z, z) - |phi(z)|^2``, clipped at 0: the squared distance of z from the span of the landmarks."""
    difference: Array = diagonal() - np.einsum("ij,ij->i", product, product, dtype=np.float64)
    np.maximum(difference, 0.0, out=difference)
    return difference[:, np.newaxis]


def _centred_residual(product: Array, diagonal: ComputeDiagonal) -> Array:
    """Return the squared distance of z from an affine span through the mean m, clipped at 0.

    The last column of the product is ``2 <phi(z), m> - |m|^2``. It and the squares of the other columns are subtracted
    from k(z, z).
    """
    squares = np.einsum("ij,ij->i", product[:, :-1], product[:, :-1], dtype=np.float64)
    difference: Array = diagonal() - product[:, -1] - squares
    np.maximum(difference, 0.0, out=difference)
    return difference[:, np.newaxis]


def _argmax(product: Array, diagonal: ComputeDiagonal) -> Codes:
    """Return the class with the largest column; with a single column return 1 if it is positive, else 0."""
    codes: Codes = product.argmax(axis=1) if product.shape[1] > 1 else (product[:, 0] > 0).astype(np.int64)
    codes[_mask_nonfinite_rows(product)] = NO_CODE
    return codes[:, np.newaxis]


def _heaviside(product: Array, diagonal: ComputeDiagonal) -> Codes:
    """Return 1 if the single column is 0 or more, else 0, as scikit-learn's outlier detectors decide."""
    codes = (product >= 0).astype(np.int64)
    codes[_mask_nonfinite_rows(product)] = NO_CODE
    return codes


def _sigmoid(product: Array, diagonal: ComputeDiagonal) -> Array:
    """Return probabilities from ``1 / (1 + exp(-product))``.

    A single column gives the probabilities of both classes; more columns are divided by their sum.
    """
    from scipy.special import expit, log_expit, softmax

    if product.shape[1] == 1:
        probabilities: Array = expit(np.hstack([-product, product]))
    else:
        probabilities = softmax(log_expit(product), axis=1)
    probabilities[_mask_nonfinite_rows(product)] = np.nan
    return probabilities


def _softmax(product: Array, diagonal: ComputeDiagonal) -> Array:
    from scipy.special import softmax

    probabilities: Array = softmax(product, axis=1)
    probabilities[_mask_nonfinite_rows(product)] = np.nan
    return probabilities


def _modified_huber(product: Array, diagonal: ComputeDiagonal) -> Array:
    """Return probabilities from ``p = (clip(product, -1, 1) + 1) / 2``.

    One column gives both classes, 1 - p and p. More columns are divided by their sum; if that is 0, all classes have
    the same probability.
    """
    clipped = (np.clip(np.hstack([-product, product]) if product.shape[1] == 1 else product, -1, 1) + 1) / 2
    sums = clipped.sum(axis=1, keepdims=True)
    clipped[sums[:, 0] == 0] = 1
    probabilities: Array = clipped / np.where(sums == 0, clipped.shape[1], sums)
    probabilities[_mask_nonfinite_rows(product)] = np.nan
    return probabilities


def _mask_nonfinite_rows(product: Array) -> npt.NDArray[np.bool_]:
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
    NOT_NEGATIVE: _heaviside,
}


def link_by_name(name: object) -> Link:
    """Return the link of a name; raise an error if the name is not in the registry."""
    if not isinstance(name, str) or name not in _REGISTRY:
        raise UnsupportedStoreError(f"There is no link {name!r}; dkfm knows {', '.join(sorted(_REGISTRY))}.")
    return _REGISTRY[name]


def needs_diagonal(name: str) -> bool:
    """Return whether a link needs k(z, z) and returns one squared distance per row."""
    return name in (RESIDUAL, CENTRED_RESIDUAL)


def returns_codes(name: str) -> bool:
    """Return whether a link returns codes of classes."""
    return name in (ARGMAX, NOT_NEGATIVE)


def count_classes(columns: int) -> int:
    """Return the number of classes that a product with `columns` columns distinguishes."""
    return 2 if columns == 1 else columns


def output_width(name: str, columns: int) -> int:
    """Return the number of columns that a link returns for a product with `columns` columns.

    >>> output_width("argmax", 10), output_width("sigmoid", 1), output_width("softmax", 3)
    (1, 2, 3)
    """
    if needs_diagonal(name) or returns_codes(name):
        return 1
    return count_classes(columns) if name in (SIGMOID, MODIFIED_HUBER) else columns


def result_dtype(name: str, dtype: np.dtype[np.floating]) -> np.dtype[np.generic]:
    """Return the dtype of a link's output for a product of `dtype`: int64 for codes, otherwise `dtype`."""
    return np.dtype(np.int64) if returns_codes(name) else dtype


def find_valid_rows(output: Array | Codes) -> npt.NDArray[np.bool_]:
    """Return which rows (n,) of a link's output (n, width) come from a finite product."""
    valid = output >= 0 if output.dtype.kind == "i" else np.isfinite(output)
    valid_in_all: npt.NDArray[np.bool_] = np.logical_and.reduce(valid, axis=1)
    return valid_in_all
