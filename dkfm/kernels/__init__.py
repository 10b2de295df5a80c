"""Kernels, as values: name one, give it numbers, add and multiply it with others.

>>> from dkfm import kernels
>>> kernels.Gaussian(5.0) + 0.5 * kernels.Polynomial(3)
Gaussian(sigma=5.0) + 0.5 * Polynomial(degree=3, scale=1.0, offset=0.0)
"""

from dkfm.kernels.angle import ArcCosine
from dkfm.kernels.base import Definiteness, Kernel
from dkfm.kernels.compose import Constant, Power, Product, Scaled, Sum
from dkfm.kernels.dot import Cosine, Linear, Polynomial, Sigmoid
from dkfm.kernels.function import Function, Outer, Pairwise
from dkfm.kernels.histogram import AdditiveChiSquared, ChiSquared, HistogramIntersection, JensenShannon
from dkfm.kernels.manhattan import Laplacian
from dkfm.kernels.maps import Affine, Columns, Warped
from dkfm.kernels.matern import Matern
from dkfm.kernels.periodic import Periodic
from dkfm.kernels.precomputed import Precomputed
from dkfm.kernels.series import Exp, Normalized, PowerSeries
from dkfm.kernels.stationary import Exponential, Gaussian, NegativeSquaredDistance, RationalQuadratic
from dkfm.kernels.translate import KernelSpec, as_kernel, from_sklearn

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
    "Sum",
    "Warped",
    "as_kernel",
    "from_sklearn",
]
