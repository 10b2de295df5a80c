"""Kernels defined by user functions, and the precomputed kernel."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from dkfm.core.chunking import row_slices
from dkfm.core.rows import Array, Rows
from dkfm.errors import DkfmError, InvalidInputError, KernelError
from dkfm.kernels.base import Kernel, PreparedKernel
from dkfm.kernels.pairwise.block_operations import PreparedBlock, are_products_in_float32_range


@dataclass(frozen=True)
class Function(Kernel):  # numpydoc ignore=PR02
    """A kernel defined by your function ``f(X, Y)``, which returns the whole block.

    The kernel is assumed to be positive semi-definite; a fit checks this.

    Parameters
    ----------
    function : callable
        Pure function that takes rows X (n, d) and Y (m, d), read-only and float64, and returns the block (n, m).

    Notes
    -----
    A saved model holds the import path ``module:function`` of the function and a digest of its source, but not its
    code. `dkfm.load` imports the function only with ``trusted=["module:function"]``.

    Examples
    --------
    >>> import numpy as np
    >>> from dkfm.kernels import Function
    >>> Function(lambda X, Y: np.minimum(X, Y.T))([[1.0], [2.0]], [[3.0], [1.0]])
    array([[1., 1.],
           [2., 1.]])
    """

    function: Callable[[Array, Array], object]
    peak_blocks = 3
    """The array that the function returns, one temporary array of the function, and the copy of the result."""

    def __post_init__(self) -> None:
        _require_callable(self, self.function, "f(X, Y)")

    def block(self, X: Array, Y: Array) -> Array:
        """Return a copy of f(X, Y), because the function may keep its array; check shape, dtype and symmetry."""
        values = call_user_function(self, self.function, read_only_view(X), read_only_view(Y))
        if values.shape != (len(X), len(Y)):
            raise KernelError(
                f"{self!r} must return a block of shape {(len(X), len(Y))} for {len(X)} and {len(Y)} rows, "
                f"and returned shape {values.shape}{_HINTS[type(self)] if values.shape == () else ''}."
            )
        if X is Y:
            self._require_symmetric(values)
        return values

    def _require_symmetric(self, values: np.ndarray) -> None:
        for rows in row_slices(len(values), 256):
            differences = np.abs(values[rows] - values[:, rows].T)
            if differences.max() > 1e-8 * np.abs(values[rows]).max():
                i, j = np.unravel_index(int(differences.argmax()), differences.shape)
                raise KernelError(f"{self!r} is not symmetric in rows {rows.start + i} and {j}, which every kernel is.")

    def __repr__(self) -> str:
        return f"Function({display_name(self.function)})"


@dataclass(frozen=True)
class Pairwise(Kernel):  # numpydoc ignore=PR02
    """A kernel defined by your function ``f(x, y)``, which returns one number, as scikit-learn's callables do.

    It calls a Python function for each pair of rows; `Function`, which computes whole blocks, is about a hundred times
    faster. The kernel is assumed to be positive semi-definite; a fit checks this.

    Parameters
    ----------
    function : callable
        Pure function that takes two rows (d,), read-only and float64, and returns a number.

    Examples
    --------
    >>> from dkfm.kernels import Pairwise
    >>> Pairwise(lambda x, y: float(x @ y))([[1.0, 2.0]], [[3.0, 4.0]])
    array([[11.]])
    """

    function: Callable[[Array, Array], object]

    def __post_init__(self) -> None:
        _require_callable(self, self.function, "f(x, y)")

    def block(self, X: Array, Y: Array) -> Array:
        """Return f of all pairs; if X is Y, call it once for each unordered pair."""
        left, right, block = read_only_view(X), read_only_view(Y), np.empty((len(X), len(Y)))
        for i, x in enumerate(left):
            for j, y in enumerate(right[: i + 1] if X is Y else right):
                value = call_user_function(self, self.function, x, y)
                if value.size != 1:
                    raise KernelError(f"{self!r} must return one number for two rows, and returned {value.size}.")
                block[i, j] = value.item()
                if X is Y:
                    block[j, i] = block[i, j]
        return block

    def estimate_extra_value_seconds(self, d: int) -> float:
        """Estimate the seconds of a call of a short function."""
        return 3e-6

    def diagonal(self, X: Array) -> Array:
        """Return f(x, x) of each row."""
        return np.array([self.block(x[np.newaxis], x[np.newaxis])[0, 0] for x in X])

    def __repr__(self) -> str:
        return f"Pairwise({display_name(self.function)})"


@dataclass(frozen=True)
class Outer(PreparedKernel):  # numpydoc ignore=PR02
    """The kernel ``g(x) g(y)`` of one feature, which your function g computes.

    Positive semi-definite, of rank one.

    Parameters
    ----------
    g : callable
        Function that takes rows X (n, d), read-only and float64, and returns numbers (n,). The number of a row must not
        depend on other rows.

    Examples
    --------
    >>> from dkfm.kernels import Outer
    >>> Outer(lambda X: X.sum(axis=1))([[1.0, 2.0]], [[3.0, 4.0]])
    array([[21.]])
    """

    g: Callable[[Array], object]
    supports_float32 = supports_out = True

    def __post_init__(self) -> None:
        _require_callable(self, self.g, "g(X)")

    def prepare(self, landmarks: Array) -> PreparedBlock:
        """Evaluate the landmarks once."""
        right = self._evaluate(landmarks)
        right_fits = bool(are_products_in_float32_range(np.square(right)).all())

        def block(Z: Array, out: Array | None = None, /) -> Array:
            left = self._evaluate(Z)
            values: Array = np.empty((len(left), len(right)), Z.dtype) if out is None else out
            np.multiply.outer(left.astype(Z.dtype), right.astype(Z.dtype), out=values)
            if Z.dtype == np.float32:
                inexact = ~(are_products_in_float32_range(np.square(left)) & right_fits)
                values[inexact] = np.multiply.outer(left[inexact], right)
            return values

        return block

    def diagonal(self, X: Array) -> Array:
        """Return g(x)^2."""
        return np.square(self._evaluate(X))

    def _evaluate(self, X: Array) -> Array:
        values = call_user_function(self, self.g, read_only_view(X.astype(np.float64, copy=False)))
        if values.shape != (len(X),):
            raise KernelError(f"{self!r} must return shape {(len(X),)} for {len(X)} rows, and returned {values.shape}.")
        return values

    def __repr__(self) -> str:
        return f"Outer({display_name(self.g)})"


def _require_callable(kernel: Kernel, function: object, form: str) -> None:
    if not callable(function) or isinstance(function, Kernel):
        raise KernelError(f"{type(kernel).__name__} needs a function {form}, and got {function!r:.100}.")


def call_user_function(kernel: Kernel, function: Callable[..., object], *rows: Array) -> Array:
    """Call a user function on rows; return a float64 copy of its result, and raise its exceptions as a KernelError."""
    try:
        values = np.asarray(function(*rows))
    except DkfmError:
        raise
    except Exception as error:
        hint = _HINTS.get(type(kernel), "")
        raise KernelError(f"{kernel!r} raised {type(error).__name__}: {error}{hint}.") from error
    if values.dtype.kind not in "biuf":
        raise KernelError(f"{kernel!r} must return real numbers, and returned dtype {values.dtype}.")
    return np.array(values, dtype=np.float64)


_HINTS: dict[type[Kernel], str] = {
    Function: " (a function of two rows belongs in kernels.Pairwise)",
    Pairwise: " (a function of blocks belongs in kernels.Function)",
}
"""Ends of error messages, for a user who has chosen the wrong one of these two classes."""


def read_only_view(rows: Array) -> Array:
    """Return a read-only view for a user function, because the rows belong to the user and all tiles share them."""
    view = rows.view()
    view.flags.writeable = False
    return view


def display_name(function: object) -> str:
    """Return the qualified name of a function, or its repr if it has none."""
    return getattr(function, "__qualname__", None) or repr(function)


@dataclass(frozen=True)
class Precomputed(PreparedKernel):  # numpydoc ignore=PR02
    """Precomputed kernel: a row z holds its kernel values ``k(z, X)`` with the training points.

    With ``kernel="precomputed"``, the `fit` of an estimator takes the Gram matrix of the training points, and
    `transform` takes the block k(Z, X). Landmarks are columns of this block. The kernel is assumed to be positive
    semi-definite; a fit checks this.

    Parameters
    ----------
    columns : int, optional
        Number N of training points; a fit fills it in.

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
    is_precomputed = True

    def __post_init__(self) -> None:
        n = self.columns
        if n is not None and (isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1):
            raise KernelError(f"Precomputed needs a positive integer as columns, or None, and got {n!r:.50}.")
        if n is not None:
            object.__setattr__(self, "columns", int(n))

    def resolve(self, X: Rows) -> Kernel:
        """Fill in the number of training points, or check it."""
        if self.columns not in (None, X.shape[1]):
            raise KernelError(f"{self!r} is of another Gram matrix than this, which has {X.shape[1]} columns.")
        return replace(self, columns=X.shape[1])

    def prepare(self, landmarks: Array) -> PreparedBlock:
        """Return a function that selects the columns of the landmarks from rows of kernel values."""
        columns = landmarks[:, 0].astype(np.intp)
        in_range = self.columns is not None and columns.min() >= 0 and columns.max() < self.columns
        if not in_range or not (columns == landmarks[:, 0]).all():
            raise KernelError(f"{self!r} has no such columns as {landmarks.min()} to {landmarks.max()}.")

        def block(Z: Array) -> Array:
            selected: Array = Z[:, columns]
            return selected

        return block

    def diagonal(self, X: Array) -> Array:
        """Raise an InvalidInputError for any rows: a row k(z, X) does not contain k(z, z)."""
        raise InvalidInputError("A precomputed kernel does not know k(z, z): give diag=, of shape (n,).")

    def __call__(self, X: object, Y: object = None) -> Array:
        """Raise a KernelError, because there are no points to compare."""
        raise KernelError("A precomputed kernel has no points to compare; it belongs to an estimator.")
