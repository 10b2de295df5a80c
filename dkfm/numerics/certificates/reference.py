"""The outputs of a model by their formula, in one expression of NumPy, and what rounding allows them to differ.

It has nothing of the tile loop, so that scores can be held against it.
"""

import numpy as np

from dkfm.core.rows import Array, Rows, as_float64
from dkfm.numerics import links
from dkfm.numerics.model import Model

_ROUNDING = 64
_NARROW_KERNEL = 1e-5
"""What a kernel value in float32 may be off, of the largest k(x, x)."""


def reference_scores(model: Model, name: str, Z: Rows) -> tuple[Array, Array]:
    """Return ``link(k(Z, X) W - b)`` of some rows in float64, and how far other ways to it may be from it.

    Parameters
    ----------
    model : Model
        With its weights in memory.
    name : str
        Of a head.
    Z : ndarray or csr_array of shape (n, d), float64

    Returns
    -------
    values, allowed : ndarray of shape (n, width), float64
        Of a row that overflows values that are not finite; of one without a class NaN.
        ``allowed`` is ``64 eps (sum |k| |W| + |b|)``, taken through the link; in float32 with what a kernel value may
        be off there.
    """
    head, eps = model.head(name), float(np.finfo(model.dtype).eps)
    K = np.asarray(model.kernel.make_evaluator(model.points)(Z), np.float64)
    W = np.asarray(head.weights[:, : head.columns], np.float64)
    b = np.zeros(head.columns) if head.offset is None else np.asarray(head.offset, np.float64)
    diagonal = np.asarray(model.kernel.evaluate_diagonal(as_float64(Z)), np.float64)
    error = _ROUNDING * eps * (np.abs(K) @ np.abs(W) + np.abs(b))
    error += float(np.finfo(model.dtype).tiny) * (1 + np.abs(W).sum(axis=0))  # of what underflows
    if model.dtype == np.float32:
        largest = max(float(np.abs(diagonal).max()), float(np.abs(model.kernel.evaluate_diagonal(model.points)).max()))
        error += _NARROW_KERNEL * largest * np.abs(W).sum(axis=0)
    product = K @ W - b
    if head.rotation is not None:
        s = np.asarray(head.rotation, np.float64)
        return (product * s) @ W.T, (error * np.abs(s)) @ np.abs(W.T)
    found = links.link_by_name(head.link)(product, lambda: diagonal)
    values = np.where(links.valid_rows(found)[:, np.newaxis], found, np.nan).astype(np.float64)
    if not links.needs_diagonal(head.link):
        return values, error_through_link(head.link, product, error, eps)
    # Of a sum of squares twice the errors of its terms, and their own.
    squares: Array = (2 * np.abs(product) * error + error**2 + _ROUNDING * eps * product**2).sum(axis=1)
    squares += error.sum(axis=1) + _ROUNDING * eps * np.abs(diagonal)
    return values, squares[:, np.newaxis]


def error_through_link(link: str, product: Array, error: Array, eps: float) -> Array:
    """Return what errors of a product (n, q) come to behind its link, (n, width).

    Parameters
    ----------
    link : str
        Not one of distances.
    product, error : ndarray of shape (n, q), float64
    eps : float
        The rounding unit of what the link is computed in.
    """
    if link == links.IDENTITY:
        return error
    worst: Array = error.max(axis=1, keepdims=True)
    both = product if product.shape[1] > 1 else np.hstack([-product, product])
    if links.returns_codes(link):
        ordered = np.sort(both, axis=1)
        clear = ordered[:, -1:] - ordered[:, -2:-1] > 2 * worst
        return np.where(clear, 0.5, float(both.shape[1]))  # what is not clear may be any class
    if link == links.MODIFIED_HUBER:
        halves = (np.clip(both, -1, 1) + 1) / 2
        sums, wrong = halves.sum(axis=1, keepdims=True), worst * halves.shape[1]
        share: Array = worst * (1 + halves.shape[1]) / np.maximum(sums - wrong, eps) + _ROUNDING * eps
        return np.where(sums > 2 * wrong, share, 1.0) * np.ones(both.shape[1])
    # The derivatives of chances by what they are made of are no more than 1.
    return np.asarray(worst + _ROUNDING * eps) * np.ones(links.output_width(link, product.shape[1]))
