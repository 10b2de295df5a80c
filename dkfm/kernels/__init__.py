"""Kernel functions; sums, products and other functions of kernels are kernels too.

>>> from dkfm import kernels
>>> kernels.Gaussian(5.0) + 0.5 * kernels.Polynomial(3)
Gaussian(sigma=5.0) + 0.5 * Polynomial(degree=3, scale=1.0, offset=0.0)
"""

from dkfm.kernels.algebra import Constant, Product, Scaled, Sum
from dkfm.kernels.base import Definiteness, Kernel
from dkfm.kernels.custom import Function, Outer, Pairwise, Precomputed
from dkfm.kernels.dot_product import ArcCosine, Cosine, Linear, Polynomial, Sigmoid
from dkfm.kernels.functions_of_kernels import Exp, Normalized, Power, PowerSeries
from dkfm.kernels.histogram import AdditiveChiSquared, ChiSquared, HistogramIntersection, JensenShannon
from dkfm.kernels.kernel_specs import KernelSpec, as_kernel, from_sklearn
from dkfm.kernels.separable import Laplacian, Periodic
from dkfm.kernels.stationary import Exponential, Gaussian, Matern, NegativeSquaredDistance, RationalQuadratic
from dkfm.kernels.transformed import Affine, Columns, Standardize, Warped

__all__ = [
    "AdditiveChiSquared",
    "Affine",
    "ArcCosine",
    "ChiSquared",
    "Columns",
    "Constant",
    "Cosine",
    "Definiteness",
    "Exp",
    "Exponential",
    "Function",
    "Gaussian",
    "HistogramIntersection",
    "JensenShannon",
    "Kernel",
    "KernelSpec",
    "Laplacian",
    "Linear",
    "Matern",
    "NegativeSquaredDistance",
    "Normalized",
    "Outer",
    "Pairwise",
    "Periodic",
    "Polynomial",
    "Power",
    "PowerSeries",
    "Precomputed",
    "Product",
    "RationalQuadratic",
    "Scaled",
    "Sigmoid",
    "Standardize",
    "Sum",
    "Warped",
    "as_kernel",
    "from_sklearn",
]
