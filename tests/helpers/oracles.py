"""Dense one-line truths, each written from its formula and sharing no code with dkfm."""

import numpy as np


def gaussian(X, Y, sigma):
    return np.exp(-((X[:, None, :] - Y[None, :, :]) ** 2).sum(-1) / (2 * sigma**2))


def laplacian(X, Y, sigma):
    return np.exp(-np.abs(X[:, None, :] - Y[None, :, :]).sum(-1) / sigma)


def polynomial(X, Y, degree, scale, offset):
    return (scale * np.einsum("id,jd->ij", X, Y) + offset) ** degree


def periodic(X, Y, period, length_scale):
    sines = np.sin(np.pi * (X[:, None, :] - Y[None, :, :]) / period)
    return np.exp(-2 * (sines**2).sum(-1) / length_scale**2)


def arc_cosine(X, Y, order):
    x, y = np.sqrt((X**2).sum(-1)), np.sqrt((Y**2).sum(-1))
    u, v = (X / x[:, None])[:, None, :], (Y / y[:, None])[None, :, :]
    t = 2 * np.arctan2(np.sqrt(((u - v) ** 2).sum(-1)), np.sqrt(((u + v) ** 2).sum(-1)))
    c, s = np.cos(t), np.sin(t)
    J = [np.pi - t, s + (np.pi - t) * c, 3 * s * c + (np.pi - t) * (1 + 2 * c**2)][order]
    return np.multiply.outer(x, y) ** order * J / np.pi


def centred(K):
    H = np.eye(len(K)) - 1 / len(K)
    return H @ K @ H


def symmetric_map(K, Kz, rcond=1e-13):
    """K^(-1/2) k_z for each column of Kz (N, m), as rows (m, N)."""
    values, V = np.linalg.eigh(K)
    keep = values > rcond * values[-1]
    return (V[:, keep] @ (V[:, keep].T @ Kz / np.sqrt(values[keep])[:, None])).T


def primal_scores(K, Kz, q):
    """Eqs. (14)-(16) of the paper: K H u = mu u, u' K^+ u = 1, score k_z' K^+ u - e'u."""
    n = len(K)
    mu, b = np.linalg.eigh(centred(K))
    mu, b = mu[::-1][:q], b[:, ::-1][:, :q]
    H = np.eye(n) - 1 / n
    u = K @ H @ b
    u /= np.sqrt(np.einsum("ij,ij->j", u, np.linalg.solve(K, u)))
    return Kz.T @ np.linalg.solve(K, u) - u.mean(axis=0)


def classical_scores(K, Kz, q):
    """Appendix A of the paper: eq. (37), a of unit length in feature space, and eq. (39) with its signs mended."""
    n = len(K)
    mu, a = np.linalg.eigh(K - K.mean(axis=0) - K.mean(axis=0)[:, None] + K.mean())
    mu, a = mu[::-1][:q], a[:, ::-1][:, :q]
    a /= np.sqrt(mu)
    e = np.full(n, 1 / n)
    return Kz.T @ (a - a.mean(axis=0)) - e @ K @ a + n * (e @ K @ e) * (e @ a)
