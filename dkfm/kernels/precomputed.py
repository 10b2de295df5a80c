"""The kernel whose values the user brings."""

from dataclasses import dataclass, replace

import numpy as np

from dkfm.errors import InvalidInputError, KernelError
from dkfm.kernels.base import Kernel, PreparedKernel
from dkfm.kernels.blocks import Prepared
from dkfm.kernels.rows import Array, Rows

__all__ = ["Precomputed"]


@dataclass(frozen=True)
class Precomputed(PreparedKernel):
    """A kernel that is not computed: a row z is ``[k(z, x_1) .. k(z, x_N)]``, and landmarks are column numbers.

    Estimators take it as ``kernel="precomputed"``: `fit` takes the Gram matrix of the training points, `transform` the
    block k(Z, X). Taken at its word to be positive semi-definite; a fit finds out.

    Parameters
    ----------
    columns : int, optional
        N, the number of training points; a fit fills it in.

    Examples
    --------
    >>> import numpy as np
    >>> from dkfm import KernelPCA
    >>> from dkfm.kernels import Gaussian
    >>> X, Z = np.random.default_rng(0).normal(size=(50, 3)), np.ones((1, 3))
    >>> k = Gaussian(2.0)
    >>> ours = KernelPCA(2, kernel="precomputed").fit(k(X)).transform(k(Z, X))
    >>> bool(np.allclose(ours, KernelPCA(2, kernel=k).fit(X).transform(Z)))
    True
    """

    columns: int | None = None
    of_numbers = True

    def __post_init__(self) -> None:
        n = self.columns
        if n is not None and (isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1):
            raise KernelError(f"Precomputed needs a positive integer as columns, or None, and got {n!r:.50}.")
        if n is not None:
            object.__setattr__(self, "columns", int(n))

    def resolve(self, X: Rows) -> Kernel:
        """Fill in the number of training points."""
        if self.columns not in (None, X.shape[1]):
            raise KernelError(f"{self!r} is of another Gram matrix than this, which has {X.shape[1]} columns.")
        return replace(self, columns=X.shape[1])

    def prepare(self, landmarks: Array) -> Prepared:
        """Return the function that takes the landmarks' columns."""
        columns = landmarks[:, 0].astype(np.intp)
        known = self.columns is not None and columns.min() >= 0 and columns.max() < self.columns
        if not known or not (columns == landmarks[:, 0]).all():
            raise KernelError(f"{self!r} has no such columns as {landmarks.min()} to {landmarks.max()}.")

        def block(Z: Array) -> Array:
            taken: Array = Z[:, columns]
            return taken

        return block

    def diagonal(self, X: Array) -> Array:
        """Raise: a row of k(z, X) does not tell k(z, z)."""
        raise InvalidInputError("A precomputed kernel does not know k(z, z): give diag=, of shape (n,).")

    def __call__(self, X: object, Y: object = None) -> Array:
        """Raise: there are no points to compare."""
        raise KernelError("A precomputed kernel has no points to compare; it belongs to an estimator.")
