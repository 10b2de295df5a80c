"""What the tests of kernels share."""

from dkfm import kernels

SIGNED = [
    kernels.Gaussian(1.5),
    kernels.Gaussian(None),
    kernels.Laplacian(2.0),
    kernels.Laplacian(None),
    kernels.Exponential(1.3),
    kernels.Matern(0.5),
    kernels.Matern(1.5, 2.0),
    kernels.Matern(2.5),
    kernels.Matern(0.3),
    kernels.Matern(1.0),
    kernels.Matern(40.0),
    kernels.Matern(100.0, 5.0),
    kernels.RationalQuadratic(0.7, 2.0),
    kernels.Periodic(2.0, 1.5),
    kernels.NegativeSquaredDistance(2.0),
    kernels.Linear(),
    kernels.Polynomial(3, scale=0.5, offset=1.0),
    kernels.Polynomial(12, scale=None, offset=1.0),
    kernels.Cosine(),
    kernels.ArcCosine(0),
    kernels.ArcCosine(1),
    kernels.ArcCosine(2),
    kernels.Sigmoid(0.5, 0.1),
    kernels.Constant(2.0),
    kernels.Gaussian(2.0) + kernels.Linear(),
    kernels.Gaussian(2.0) * kernels.Polynomial(2),
    0.5 * kernels.Laplacian(1.0),
    (kernels.Linear() + 1.0) ** 3,
    kernels.PowerSeries(kernels.Gaussian(2.0), (1.0, 0.0, 2.0)),
    kernels.Exp(kernels.Cosine()),
    kernels.Exp(0.1 * kernels.NegativeSquaredDistance()),
    kernels.Normalized(kernels.Polynomial(3, offset=1.0)),
    kernels.Polynomial(9, scale=1 / 1568, offset=0.5).warp(kernels.Affine(2, -1)),
    kernels.Linear().warp(kernels.Affine(2.0)),
    kernels.Gaussian(2.0).on((0,)) * kernels.Linear().on(0),
]


HISTOGRAMS = [
    kernels.ChiSquared(0.5),
    kernels.AdditiveChiSquared(),
    kernels.HistogramIntersection(),
    kernels.JensenShannon(),
]
