"""Certify discriminants: compare the covariances and the means of their outputs with the values that define them."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import reduce

import numpy as np

from dkfm.core.rows import Array, Rows
from dkfm.numerics import links
from dkfm.numerics.certificates.certificate import Certificate, certify_block
from dkfm.numerics.model import Head
from dkfm.numerics.roots import EPS
from dkfm.numerics.scorer import Scorer

_COMPARED = "discriminants"
"""Value of `Certificate.compared` for discriminants."""


def certify_discriminants(
    score: Scorer,
    tiles: Iterable[Rows],
    indicators: Array,
    expected: Mapping[str, tuple[Array, Array]],
    ridge: float,
) -> Certificate:
    """Compare the covariance within the classes, and the class means, of the training outputs with T'T and M.

    Parameters
    ----------
    score : Scorer
        A prepared model.
    tiles : iterable of ndarray or csr_array of shape (n, d)
        All training rows, as the model scores them.
    indicators : ndarray of shape (N, C)
        Weight of each row in the column of its class, and 0 elsewhere.
    expected : mapping of str to tuple of ndarray of shape (p, p), ndarray of shape (C, p)
        For the name of each head, which computes combinations T (q, p) of discriminants: the expected T'T and class
        means M. T'T is the sum of the covariance and of ``ridge b'Kb`` for the weights b. Links are not applied.
    ridge : float
        Ridge ``lambda`` of the discriminants.
    """
    heads = {name: head for name in expected if (head := _get_head_without_link(score, name)).n_columns}
    found, start = {name: _OutputSums(head, indicators.shape[1]) for name, head in heads.items()}, 0
    scored = replace(score, model=replace(score.model, heads=heads))
    with np.errstate(over="ignore", invalid="ignore"):  # the caller raises for a certificate that is not finite
        for tile in tiles if heads else ():
            rows = slice(start, start + tile.shape[0])
            for name, outputs in scored.score_heads(heads, tile).items():
                found[name].add(outputs.astype(np.float64), rows, indicators[rows])
            start = rows.stop
        sizes = indicators.sum(axis=0)
        measured = [sums.compare(*expected[name], sizes, ridge) for name, sums in found.items()]
    return reduce(Certificate.combine, measured, Certificate(0.0, 0.0, 0, compared=_COMPARED))


class _OutputSums:
    """Sums of the outputs of a head over the training rows, by class."""

    def __init__(self, head: Head, classes: int) -> None:
        p = head.n_columns
        self._head = head
        self._of_classes, self._second_moments, self._with_weights = (np.zeros((m, p)) for m in (classes, p, p))

    def add(self, outputs: Array, rows: slice, indicators: Array) -> None:
        """Add the outputs (n, p) of some rows; `indicators` (n, C) have the weight of a row in its class, else 0."""
        self._of_classes += indicators.T @ outputs
        self._second_moments += (outputs * indicators.sum(axis=1, keepdims=True)).T @ outputs
        self._with_weights += self._head.weights[rows, : self._head.n_columns].T @ (
            outputs + _get_offset_or_zeros(self._head)
        )

    def compare(self, products: Array, class_means: Array, sizes: Array, ridge: float) -> Certificate:
        """Compare the sums with the expected T'T (p, p) and class means (C, p); `sizes` (C,) are weights of classes."""
        means = self._of_classes / sizes[:, np.newaxis]
        within = (self._second_moments - (means * sizes[:, np.newaxis]).T @ means) / sizes.sum()
        lengths = _measure_lengths(products, class_means)
        found = certify_block(within + ridge * self._with_weights, products, lengths, lengths)
        unit = float(lengths.max())
        return found.combine(certify_block(unit * means, unit * class_means, np.full(len(sizes), unit), lengths))


def certify_direction_products(
    score: Scorer,
    name: str,
    tiles: Iterable[Rows],
    products: Array,
    mean_coefficients: Array,
    offset_constants: Array,
    max_squared_length: float,
) -> Certificate:
    """Compare ``b'Kb`` of a head's weights b with its expected value, and ``b'Km`` with the offset, for any landmarks.

    Parameters
    ----------
    score, name
        A prepared model, and the name of a head, whose link is not applied.
    tiles : iterable of ndarray or csr_array of shape (n, d)
        All landmarks, as the model scores them.
    products : ndarray of shape (p, p)
        Expected ``b'Kb``.
    mean_coefficients : ndarray of shape (N,)
        Coefficients m of the mean of the training rows.
    offset_constants : ndarray of shape (p,)
        Part of the offset besides ``b'Km``.
    max_squared_length : float
        Largest squared length of a direction of variance 1; its product with ``eps m'Km`` is an error of that variance.
    """
    head, start = _get_head_without_link(score, name), 0
    offset, p = _get_offset_or_zeros(head), head.n_columns
    if not p:
        return Certificate(0.0, 0.0, 0, compared=_COMPARED)
    left, found = np.column_stack([head.weights[:, :p], mean_coefficients]).astype(np.float64), np.zeros((p + 1, p + 1))
    with_mean = Head(left.astype(head.weights.dtype), np.append(offset, 0.0).astype(head.weights.dtype))
    scored = replace(score, model=replace(score.model, heads={name: with_mean}))
    for tile in tiles:
        S = scored(name, tile).astype(np.float64) + np.append(offset, 0.0)
        found += left[start : start + len(S)].T @ S
        start += len(S)
    hidden = min(1.0, EPS * abs(float(found[-1, -1])) * max_squared_length)
    found, of_mean = found[:, :p], offset - offset_constants
    lengths = np.sqrt(products.diagonal() + of_mean**2)
    unit = float(lengths.max())
    found[-1] *= unit
    measured = certify_block(found, np.vstack([products, unit * of_mean]), np.append(lengths, unit), lengths)
    return measured.combine(Certificate(hidden, hidden, 0, compared=_COMPARED))


def certify_cast(cast: Scorer, exact: Scorer, rows: Rows, expected: Mapping[str, tuple[Array, Array]]) -> Certificate:
    """Compare the outputs of a model in lower precision, for some rows, with those of the same model in float64.

    Parameters
    ----------
    cast, exact : Scorer
        The prepared models.
    rows : ndarray or csr_array of shape (n, d)
        Rows to score.
    expected : mapping of str to tuple of ndarray of shape (p, p), ndarray of shape (C, p)
        As in `certify_discriminants`. Errors are relative to the spread of an output, ``sqrt(diag T'T + max M^2)``.
    """
    worst, ones = Certificate(0.0, 0.0, 0, compared=_COMPARED), np.ones(rows.shape[0])
    for name, (products, class_means) in expected.items():
        if len(products):
            lengths = _measure_lengths(products, class_means)
            with np.errstate(over="ignore", invalid="ignore"):  # as in `certify_discriminants`
                found, truth = (scorer(name, rows).astype(np.float64) / lengths for scorer in (cast, exact))
            worst = worst.combine(certify_block(found, truth, ones, np.ones(len(lengths))))
    return replace(worst, pairs=0)  # they are not pairs of discriminants


def _measure_lengths(products: Array, class_means: Array) -> Array:
    """Return the spread of each output (p,), from the expected T'T (p, p) and class means M (C, p)."""
    lengths: Array = np.sqrt(np.square(class_means).max(axis=0) + products.diagonal())
    return lengths


def _get_head_without_link(score: Scorer, name: str) -> Head:
    return replace(score.model.head(name), link=links.IDENTITY)


def _get_offset_or_zeros(head: Head) -> Array:
    return np.zeros(head.n_columns) if head.offset is None else head.offset.astype(np.float64)
