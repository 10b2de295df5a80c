"""Compute the outputs of a model directly from their formula, with bounds of the rounding error.

The tile loop of `Scorer` is not used, so that its scores can be compared with these outputs.
"""

from collections.abc import Iterable

import numpy as np

from dkfm.core.rows import Array, Rows, as_float64
from dkfm.numerics import links
from dkfm.numerics.model import Head, Model

_ROUNDING = 64
"""Largest error of a sum, in rounding units."""

_FLOAT32_KERNEL_ERROR = 1e-5
"""Largest error of a kernel value in float32, relative to the largest k(x, x)."""


class ReferenceScorer:
    """Compute the outputs of a model from their formula, and bounds of the rounding errors of scores.

    Parameters
    ----------
    model : Model
        A model with its weights in memory.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._evaluate = model.kernel.make_evaluator(model.original_landmarks)
        self._own = np.abs(_evaluate_diagonal(model, model.original_landmarks))

    def compute(self, names: Iterable[str], Z: Rows) -> dict[str, tuple[Array, Array]]:
        """Return ``link(k(Z, X) W - b)`` for some heads and rows, and the largest difference that rounding allows.

        Parameters
        ----------
        names : iterable of str
            Names of heads.
        Z : ndarray or csr_array of shape (n, d)
            Rows in float64.

        Returns
        -------
        dict of str to (values, allowed)
            `values` (n, width) are the outputs in float64. A row that overflows has values that are not finite; a row
            without a class has NaN. `allowed` (n, width) is ``64 eps (sum (|k| + s) |W| + |b|)``, propagated through
            the link. Here s is ``sqrt(k(x, x) k(z, z))``, because rounding errors of small kernel values may be
            relative to it. It is 0 for a precomputed kernel, whose values are exact. In float32, the error of a kernel
            value is added.
        """
        K = np.asarray(self._evaluate(Z), np.float64)
        diagonal = _evaluate_diagonal(self._model, Z)
        return {name: self._compute_head(self._model.head(name), K, diagonal) for name in names}

    def _compute_head(self, head: Head, K: Array, diagonal: Array) -> tuple[Array, Array]:
        dtype = self._model.dtype
        W = np.asarray(head.weights[:, : head.n_columns], np.float64)
        b = np.zeros(head.n_columns) if head.offset is None else np.asarray(head.offset, np.float64)
        magnitudes, lengths = np.abs(W), np.sqrt(np.abs(diagonal))
        error = np.abs(K) @ magnitudes + np.outer(lengths, np.sqrt(self._own) @ magnitudes) + np.abs(b)
        error *= _ROUNDING * float(np.finfo(dtype).eps)
        error += float(np.finfo(dtype).tiny) * (1 + magnitudes.sum(axis=0))  # for underflow
        if dtype == np.float32:
            largest = max(float(np.abs(diagonal).max()), float(self._own.max()))
            error += _FLOAT32_KERNEL_ERROR * largest * magnitudes.sum(axis=0)
        product = K @ W - b
        if head.sqrt_eigenvalues is not None:
            s = np.asarray(head.sqrt_eigenvalues, np.float64)
            return (product * s) @ W.T, (error * np.abs(s)) @ magnitudes.T
        return _apply_link(head.link, product, error, diagonal, float(np.finfo(dtype).eps))


def _evaluate_diagonal(model: Model, rows: Rows) -> Array:
    """Return k(z, z) of rows, the scale of the rounding errors of their kernel values; 0 for a precomputed kernel."""
    if model.kernel.is_precomputed:
        return np.zeros(rows.shape[0])
    return np.asarray(model.kernel.evaluate_diagonal(as_float64(rows)), np.float64)


def _apply_link(link: str, product: Array, error: Array, diagonal: Array, eps: float) -> tuple[Array, Array]:
    """Return the outputs of a link for products with known errors, and bounds of the errors of the outputs."""
    output = links.link_by_name(link)(product, lambda: diagonal)
    values = np.where(links.find_valid_rows(output)[:, np.newaxis], output, np.nan).astype(np.float64)
    if not links.needs_diagonal(link):
        return values, propagate_error_through_link(link, product, error, eps)
    # The error of a square is the sum of 2 |value| error, the square of the error, and rounding.
    squares: Array = (2 * np.abs(product) * error + error**2 + _ROUNDING * eps * product**2).sum(axis=1)
    squares += error.sum(axis=1) + _ROUNDING * eps * np.abs(diagonal)
    return values, squares[:, np.newaxis]


def propagate_error_through_link(link: str, product: Array, error: Array, eps: float) -> Array:
    """Bound the errors of a link's output (n, width), given bounds of those of its input (n, q).

    Parameters
    ----------
    link : str
        Name of a link that does not need the diagonal.
    product, error : ndarray of shape (n, q)
        Product and its errors, in float64.
    eps : float
        Rounding unit of the dtype in which the link is computed.
    """
    if link == links.IDENTITY:
        return error
    worst: Array = error.max(axis=1, keepdims=True)
    both = product if product.shape[1] > 1 else np.hstack([-product, product])
    if links.returns_codes(link):
        ordered = np.sort(both, axis=1)
        clear = ordered[:, -1:] - ordered[:, -2:-1] > 2 * worst
        return np.where(clear, 0.5, float(both.shape[1]))  # any class is possible if the decision is not clear
    if link == links.MODIFIED_HUBER:
        clipped = (np.clip(both, -1, 1) + 1) / 2
        sums, wrong = clipped.sum(axis=1, keepdims=True), worst * clipped.shape[1]
        share: Array = worst * (1 + clipped.shape[1]) / np.maximum(sums - wrong, eps) + _ROUNDING * eps
        return np.where(sums > 2 * wrong, share, 1.0) * np.ones(both.shape[1])
    if link not in (links.SIGMOID, links.SOFTMAX):
        raise AssertionError(f"the errors of the link {link!r} are not known")
    # The derivatives of probabilities with respect to the product are at most 1.
    return np.asarray(worst + _ROUNDING * eps) * np.ones(links.output_width(link, product.shape[1]))
