"""Solve systems, and decide between classes, in extended precision."""

import numpy as np


def solve_in_extended_precision(A, b):
    """Return the solution of a positive definite system, by Gaussian elimination."""
    A, b = A.copy(), b.copy()
    for i in range(len(A)):
        factors = A[i + 1 :, i] / A[i, i]
        A[i + 1 :] -= factors[:, np.newaxis] * A[i]
        b[i + 1 :] -= factors * b[i]
    for i in reversed(range(len(A))):
        b[i] = (b[i] - A[i, i + 1 :] @ b[i + 1 :]) / A[i, i]
    return b


def decide_in_extended_precision(K, cross, y, w, shrinkage):
    """Return the decisions between two classes of new rows, with the inverse of S_w + lambda by Woodbury's identity."""
    K, cross, w = (values.astype(np.longdouble) for values in (K, cross, w))
    p, means = w / w.sum(), np.array([w * (y == c) / w[y == c].sum() for c in (0, 1)])
    T, roots, difference = np.eye(len(w)) - means[y], np.sqrt(p), means[1] - means[0]
    scatter = T @ K @ T.T
    ridge = shrinkage * (p @ scatter.diagonal()) / w.sum()
    system = roots[:, np.newaxis] * scatter * roots + ridge * np.eye(len(w))
    solved = solve_in_extended_precision(system, roots * (T @ K @ difference))
    b = (difference - T.T @ (roots * solved)) / ridge
    offset = means.mean(axis=0) @ K @ b
    return (cross @ b - offset + np.log(p[y == 1].sum() / p[y == 0].sum())).astype(float)
