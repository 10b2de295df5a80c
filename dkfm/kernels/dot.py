"""Kernels of the inner product <x, y>."""

from dataclasses import dataclass

import numpy as np

from dkfm.errors import KernelError
from dkfm.kernels.base import Kernel, require_number, require_positive
from dkfm.kernels.rows import Array, squared_norms

__all__ = ["Linear", "Polynomial", "integer_power", "require_exponent"]


@dataclass(frozen=True)
class Linear(Kernel):
    """The linear kernel, ``<x, y>``: kernel PCA with it is PCA.

    Examples
    --------
    >>> from dkfm.kernels import Linear
    >>> Linear()([[1.0, 2.0]], [[3.0, 4.0]])
    array([[11.]])
    """

    def block(self, X: Array, Y: Array) -> Array:
        """Return k(X, Y)."""
        return X @ Y.T

    def diagonal(self, X: Array) -> Array:
        """Return |x|^2."""
        return squared_norms(X)


@dataclass(frozen=True)
class Polynomial(Kernel):
    """The polynomial kernel, ``(scale <x, y> + offset)^degree``.

    Parameters
    ----------
    degree : int, >= 1
        A fractional power of a kernel need not be a kernel, so it is refused.
    scale : float, > 0
        scikit-learn calls it ``gamma``.
    offset : float, >= 0
        scikit-learn calls it ``coef0``.

    Notes
    -----
    The paper's k1 (eq. 27) on pixels in [0, 1] is ``Polynomial(9, scale=1/784)``.

    Examples
    --------
    >>> from dkfm.kernels import Polynomial
    >>> Polynomial(2, offset=1.0)([[1.0, 2.0]], [[3.0, 4.0]])
    array([[144.]])
    """

    degree: int = 3
    scale: float = 1.0
    offset: float = 0.0

    def __post_init__(self) -> None:
        require_exponent(self, "degree")
        require_positive(self, "scale")
        if require_number(self, "offset") < 0:
            raise KernelError(f"Polynomial needs offset >= 0, and got {self.offset}.")

    @property
    def blocks(self) -> int:
        """A power is taken by squaring, beside what it is taken of."""
        return 2

    def block(self, X: Array, Y: Array) -> Array:
        """Return k(X, Y)."""
        return self._profile(X @ Y.T)

    def diagonal(self, X: Array) -> Array:
        """Return (scale |x|^2 + offset)^degree."""
        return self._profile(squared_norms(X))

    def _profile(self, products: Array) -> Array:
        products *= self.scale
        products += self.offset
        return integer_power(products, self.degree)


def integer_power(base: Array, exponent: int) -> Array:
    """Raise `base` to a positive integer power by squaring, overwriting it: at most one temporary of its size."""
    result: Array | None = None
    while True:
        if exponent & 1:
            if result is None:
                result = base.copy() if exponent > 1 else base
            else:
                np.multiply(result, base, out=result)
        exponent >>= 1
        if not exponent:
            assert result is not None  # noqa: S101  # the highest bit is set; this tells the type checker
            return result
        np.multiply(base, base, out=base)


def require_exponent(kernel: Kernel, name: str) -> None:
    """Raise a KernelError unless a parameter is a positive integer."""
    value = getattr(kernel, name)
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise KernelError(
            f"{type(kernel).__name__} needs a positive integer as {name}, and got {value!r}: "
            "a product of kernels is a kernel, a fractional power need not be."
        )
    object.__setattr__(kernel, name, int(value))
