"""Define `Verification`, the result of measuring the errors of a model again."""

from dataclasses import dataclass

import numpy as np

from dkfm.core.rows import Array
from dkfm.numerics.certificates.certificate import Certificate


@dataclass(frozen=True, repr=False)
class Verification:
    """Errors of a model that are measured again after the fit.

    Attributes
    ----------
    certificate : Certificate
        Errors for the rows that the model keeps: the landmarks of a map, or the training rows of components.
    against : Certificate, optional
        Errors of pairs of a landmark and a given point.
    between : Certificate, optional
        Errors of pairs of given points.
    residuals : ndarray of shape (m,), optional
        ``k(z, z) - |phi(z)|^2`` of at most 512 of the given points, clipped at 0.
    bound : float, optional
        Bound of `between.error` but for rounding: the largest residual divided by the largest k(z, z); infinite if the
        kernel was clipped. None without given points, or if the map has no error bound.
    """

    certificate: Certificate
    against: Certificate | None = None
    between: Certificate | None = None
    residuals: Array | None = None
    bound: float | None = None

    def to_dict(self) -> dict[str, object]:
        """Return the certificates; with given points also the median and the largest residual, and the bound."""
        certificates = {"certificate": self.certificate, "against": self.against, "between": self.between}
        facts: dict[str, object] = {name: value.to_dict() for name, value in certificates.items() if value is not None}
        if self.residuals is None:
            return facts
        if self.bound == np.inf:  # residuals of a clipped kernel are not bounds
            return facts | {"bound": self.bound}
        median, largest = float(np.median(self.residuals)), float(self.residuals.max())
        return facts | {"median_residual": median, "max_residual": largest, "bound": self.bound}

    def __str__(self) -> str:
        if self.residuals is None:
            return f"certificate {self.certificate}"
        median, largest = float(np.median(self.residuals)), float(self.residuals.max())
        limit = "compared with no bound, for this map knows none"
        if self.bound is not None:
            limit = f"and at most {self.bound:.1e} of the largest by their residuals, plus rounding"
        residuals = f"residuals: k(z, z) - |phi(z)|^2 has the median {median:.1e}, at most {largest:.1e}, in units of k"
        if self.bound == np.inf:
            limit, residuals = "without a bound", "residuals: none, for the kernel was clipped"
        return (
            f"certificate {self.certificate}\nwith the landmarks: {self.against}\nwith each other: {self.between}, "
            f"{limit}\n{residuals}"
        )

    __repr__ = __str__
