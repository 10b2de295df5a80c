"""Certify discriminants: compare the covariances and the means of their outputs with those that define them."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from dkfm.core.rows import Array, Rows
from dkfm.numerics import links
from dkfm.numerics.certificates.certificate import Certificate, certify_block
from dkfm.numerics.model import Head
from dkfm.numerics.roots import EPS
from dkfm.numerics.scorer import Scorer


def certify_discriminants(
    score: Scorer, name: str, tiles: Iterable[Rows], indicators: Array, expected: tuple[Array, Array], ridge: float
) -> Certificate:
    """Compare the covariance within the classes, and the class means, of the training outputs with T'T and M.

    Parameters
    ----------
    score : Scorer
        A prepared model.
    name : str
        Name of a head of combinations T (q, p) of discriminants; its link is left out.
    tiles : iterable of ndarray or csr_array of shape (n, d)
        All training rows, as the model scores them.
    indicators : ndarray of shape (N, C)
        Weight of each row in the column of its class, and 0 elsewhere.
    expected : tuple of ndarray of shape (p, p), ndarray of shape (C, p)
        T'T, which is the sum of the covariance and of ``ridge b'Kb`` for the weights b; and the class means M.
    ridge : float
        Ridge ``lambda`` of the discriminants.
    """
    head, (products, class_means), start = _get_head_without_link(score, name), expected, 0
    offset, p = _get_offset_or_zeros(head), head.n_columns
    if not p:
        return Certificate(0.0, 0.0, 0)
    sums, second, squares = np.zeros_like(class_means), np.zeros((p, p)), np.zeros((p, p))
    scored = replace(score, model=replace(score.model, heads={name: head}))
    for tile in tiles:
        S = scored(name, tile).astype(np.float64)
        rows = slice(start, start + len(S))
        sums += indicators[rows].T @ S
        second += (S * indicators[rows].sum(axis=1, keepdims=True)).T @ S
        squares += head.weights[rows, :p].T @ (S + offset)
        start = rows.stop
    sizes = indicators.sum(axis=0)
    means = sums / sizes[:, np.newaxis]
    within = (second - (means * sizes[:, np.newaxis]).T @ means) / sizes.sum()
    lengths = np.sqrt(np.square(class_means).max(axis=0) + products.diagonal())
    found = certify_block(within + ridge * squares, products, lengths, lengths)
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
        As in `certify_discriminants`.
    tiles : iterable of ndarray or csr_array of shape (n, d)
        All landmarks, as the model scores them.
    products : ndarray of shape (p, p)
        Expected ``b'Kb``.
    mean_coefficients : ndarray of shape (N,)
        Coefficients m of the mean of the training rows.
    offset_constants : ndarray of shape (p,)
        Part of the offset beside ``b'Km``.
    max_squared_length : float
        Largest squared length of a direction of variance 1; ``eps m'Km`` times it is an error of that variance.
    """
    head, start = _get_head_without_link(score, name), 0
    offset, p = _get_offset_or_zeros(head), head.n_columns
    if not p:
        return Certificate(0.0, 0.0, 0)
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
    return measured.combine(Certificate(hidden, hidden, 0))


def _get_head_without_link(score: Scorer, name: str) -> Head:
    return replace(score.model.head(name), link=links.IDENTITY)


def _get_offset_or_zeros(head: Head) -> Array:
    return np.zeros(head.n_columns) if head.offset is None else head.offset.astype(np.float64)
