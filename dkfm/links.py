"""The closed registry of a head's last step: from the product of a tile to what the user asked for."""

from collections.abc import Callable

import numpy as np

from dkfm.errors import UnsupportedStoreError
from dkfm.kernels.rows import Array

__all__ = ["CENTRED_RESIDUAL", "IDENTITY", "RESIDUAL", "Diagonal", "Link", "by_name", "is_scalar"]

Diagonal = Callable[[], Array]
"""What computes the diagonal k(z, z) (n,), where a link asks for it."""

Link = Callable[[Array, Diagonal], Array]
"""(product (n, q), diagonal) -> result (n, width)."""

IDENTITY = "identity"
RESIDUAL = "residual"
CENTRED_RESIDUAL = "centred_residual"


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


_REGISTRY: dict[str, Link] = {IDENTITY: _identity, RESIDUAL: _residual, CENTRED_RESIDUAL: _centred_residual}


def by_name(name: object) -> Link:
    """Return a link; a name that is not in the registry is refused."""
    if not isinstance(name, str) or name not in _REGISTRY:
        raise UnsupportedStoreError(f"There is no link {name!r}; dkfm knows {', '.join(sorted(_REGISTRY))}.")
    return _REGISTRY[name]


def is_scalar(name: str) -> bool:
    """Whether a link gives one number a row, whatever the width of the product."""
    return name != IDENTITY
