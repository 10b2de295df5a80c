"""A kernel made of a function of the user's."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dkfm.errors import KernelError
from dkfm.kernels.base import Kernel
from dkfm.kernels.rows import Array
from dkfm.tiling import row_slices

__all__ = ["Function"]


@dataclass(frozen=True)
class Function(Kernel):
    """A kernel of your own: ``f(X, Y)`` returns the whole block.

    Parameters
    ----------
    function : callable
        From rows X (n, d) and Y (m, d), float64, read-only, to the block (n, m). It must be a pure function.

    Notes
    -----
    A model with such a kernel cannot be saved, and so not be used by `batch_score`, only by `transform`: dkfm never
    writes code into a store, nor runs code from one.

    Examples
    --------
    >>> import numpy as np
    >>> from dkfm.kernels import Function
    >>> Function(lambda X, Y: np.minimum(X, Y.T))([[1.0], [2.0]], [[3.0], [1.0]])
    array([[1., 1.],
           [2., 1.]])
    """

    function: Callable[[Array, Array], object]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise KernelError(f"Function needs a callable f(X, Y), and got {self.function!r}.")

    @property
    def blocks(self) -> int:
        """What the function returned, a temporary of its own, and the copy."""
        return 3

    def block(self, X: Array, Y: Array) -> Array:
        """Return f(X, Y), checked for shape, dtype and symmetry and copied: the function may keep what it returned."""
        values = np.asarray(self.function(_read_only(X), _read_only(Y)))
        if values.shape != (len(X), len(Y)):
            raise KernelError(
                f"{self!r} must return a block of shape {(len(X), len(Y))} for {len(X)} and {len(Y)} rows, "
                f"and returned shape {values.shape}."
            )
        if values.dtype.kind not in "biuf":
            raise KernelError(f"{self!r} must return real numbers, and returned dtype {values.dtype}.")
        if X is Y:
            self._require_symmetric(values)
        return np.array(values, dtype=np.float64)

    def _require_symmetric(self, values: np.ndarray) -> None:
        for rows in row_slices(len(values), 256):
            gap = np.abs(values[rows] - values[:, rows].T)
            if gap.max() > 1e-8 * np.abs(values[rows]).max():
                i, j = np.unravel_index(int(gap.argmax()), gap.shape)
                raise KernelError(f"{self!r} is not symmetric in rows {rows.start + i} and {j}, which every kernel is.")

    def __repr__(self) -> str:
        return f"Function({getattr(self.function, '__qualname__', repr(self.function))})"


def _read_only(rows: Array) -> Array:
    """Return a view that a function cannot change: the rows are the user's, and every tile's."""
    view = rows.view()
    view.flags.writeable = False
    return view
