"""Measured exactness of discriminants: the covariance and the means of outputs, held against what they promise."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from dkfm.core.rows import Array, Rows
from dkfm.numerics import links
from dkfm.numerics.certificates.certificate import Certificate, compare_blocks
from dkfm.numerics.model import Head
from dkfm.numerics.roots import EPS
from dkfm.numerics.scorer import Scorer


def certify_discriminants(
    score: Scorer,
    name: str,
    tiles: Iterable[Rows],
    indicators: Array,
    expected: tuple[Array, Array],
    ridge: float,
) -> Certificate:
    """Compare the covariance within the classes, and the class means, of outputs for the training rows with T'T and M.

    Parameters
    ----------
    score : Scorer
    name : str
        Of a head of combinations T (q, p) of discriminants; its link is left out.
    tiles : iterable of ndarray or csr_array of shape (n, d)
        All training rows, as the model scores them.
    indicators : ndarray of shape (N, C)
        The weight of a row in the column of its class, else 0.
    expected : ndarrays of shape (p, p), (C, p)
        T'T, which is the covariance and the ridge of the weights b, ``ridge b'Kb``, together; and M.
    ridge : float
    """
    head, (products, class_means), start = _plain(score, name), expected, 0
    offset, p = _offset(head), head.columns
    if not p:
        return Certificate(0.0, 0.0, 0)
    sums, second, squares = np.zeros_like(class_means), np.zeros((p, p)), np.zeros((p, p))
    scored = Scorer(replace(score.model, heads={name: head}), score.block)
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
    lengths = np.square(class_means).max(axis=0) + products.diagonal()
    found = compare_blocks(within + ridge * squares, products, lengths, lengths)
    unit = float(np.sqrt(lengths.max()))
    return found.worse(compare_blocks(unit * means, unit * class_means, np.full(len(sizes), unit**2), lengths))


def certify_combinations(
    score: Scorer, name: str, tiles: Iterable[Rows], products: Array, mean: Array, constants: Array, longest: float
) -> Certificate:
    """Compare ``b'Kb`` of the weights b of a head with what it is, and ``b'Km`` with the offset: of any landmarks.

    Parameters
    ----------
    score, name
        As `certify_discriminants` takes them.
    tiles : iterable of ndarray or csr_array of shape (n, d)
        All landmarks, as the model scores them.
    products : ndarray of shape (p, p)
    mean : ndarray of shape (N,)
        m, what the mean of the training rows is made of.
    constants : ndarray of shape (p,)
        What the offset has beside ``b'Km``.
    longest : float
        Squared length of the longest direction, of those along which the training rows have the variance 1: the
        rounding of the mean, ``eps m'Km``, is added to that variance this many times.
    """
    head, start = _plain(score, name), 0
    offset, p = _offset(head), head.columns
    if not p:
        return Certificate(0.0, 0.0, 0)
    left, found = np.column_stack([head.weights[:, :p].astype(np.float64), mean]), np.zeros((p + 1, p + 1))
    with_mean = Head(left.astype(head.weights.dtype), np.append(offset, 0.0).astype(head.weights.dtype))
    scored = Scorer(replace(score.model, heads={name: with_mean}), score.block)
    for tile in tiles:
        S = scored(name, tile).astype(np.float64) + np.append(offset, 0.0)
        found += left[start : start + len(S)].T @ S
        start += len(S)
    hidden = min(1.0, EPS * abs(float(found[-1, -1])) * longest)
    found, of_mean = found[:, :p], offset - constants
    lengths = products.diagonal() + of_mean**2
    unit = float(np.sqrt(lengths.max()))
    found[-1] *= unit
    measured = compare_blocks(found, np.vstack([products, unit * of_mean]), np.append(lengths, unit**2), lengths)
    return measured.worse(Certificate(hidden, hidden, 0))


def _plain(score: Scorer, name: str) -> Head:
    return replace(score.model.head(name), link=links.IDENTITY)


def _offset(head: Head) -> Array:
    return np.zeros(head.columns) if head.offset is None else head.offset.astype(np.float64)
