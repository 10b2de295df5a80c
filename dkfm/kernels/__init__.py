"""Kernels, as values: name one, give it numbers, add and multiply it with others.

>>> from dkfm import kernels
>>> kernels.Gaussian(5.0) + 0.5 * kernels.Polynomial(3)
Gaussian(sigma=5.0) + 0.5 * Polynomial(degree=3, scale=1.0, offset=0.0)
"""

from dkfm.kernels.base import Kernel
from dkfm.kernels.compose import Constant, Power, Product, Scaled, Sum
from dkfm.kernels.dot import Linear, Polynomial
from dkfm.kernels.function import Function
from dkfm.kernels.stationary import Gaussian, Laplacian

__all__ = [
    "Constant",
    "Function",
    "Gaussian",
    "Kernel",
    "Laplacian",
    "Linear",
    "Polynomial",
    "Power",
    "Product",
    "Scaled",
    "Sum",
]
