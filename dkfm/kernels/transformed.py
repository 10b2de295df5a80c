"""Kernels of transformed rows: mapped by a function, or restricted to some columns."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from math import isfinite

import numpy as np

from dkfm.core.rows import Array, Rows, as_float64, as_rows, scale_columns
from dkfm.errors import InvalidInputError, KernelError
from dkfm.kernels.algebra import Product, Scaled, Sum, Wrapper, parenthesize
from dkfm.kernels.base import Kernel, register_operator_class
from dkfm.kernels.custom import call_user_function, display_name, read_only_view
from dkfm.kernels.functions_of_kernels import Power
from dkfm.kernels.pairwise.block_operations import Evaluator, make_float64_evaluator
from dkfm.kernels.parameters import as_float_or_nan, unwrap_array


class AffineMap:
    """Base class of affine maps of rows; parameters are finite numbers, or sequences of one number for each column."""

    def __post_init__(self) -> None:
        for parameter in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            value = unwrap_array(getattr(self, parameter.name))
            is_sequence = isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes)
            parts: Iterable[object] = value if is_sequence else (value,)  # type: ignore[assignment]  # a sequence
            numbers = tuple(as_float_or_nan(part) for part in parts)
            if not numbers or not all(isfinite(number) for number in numbers):
                name = type(self).__name__
                raise KernelError(f"{name} needs finite numbers as {parameter.name}, and got {value!r:.50}.")
            object.__setattr__(self, parameter.name, numbers if is_sequence else numbers[0])

    @property
    def keeps_zeros(self) -> bool:
        """Whether the map keeps the zeros of sparse rows."""
        return False

    def __call__(self, X: Rows) -> Rows:
        """Return the mapped float64 rows (n, d); sparse rows stay sparse, or raise if the map does not keep zeros."""
        constants = [np.asarray(getattr(self, parameter.name)) for parameter in fields(self)]  # type: ignore[arg-type]  # as above
        if any(c.ndim and len(c) != X.shape[1] for c in constants):
            raise KernelError(f"{self!r} has other columns than these rows, which have {X.shape[1]}.")
        if not isinstance(X, np.ndarray) and not self.keeps_zeros:
            raise InvalidInputError(f"{self!r} shifts every value and would make sparse rows dense.")
        return self._map(X, *constants)

    @abstractmethod
    def _map(self, X: Rows, *constants: Array) -> Rows:
        """Return the mapped rows, given the parameters as arrays."""


@dataclass(frozen=True)
class Affine(AffineMap):  # numpydoc ignore=PR02
    """The affine map of rows ``x -> scale * x + shift``, for `Kernel.warp`.

    Parameters
    ----------
    scale : float, or one for each column
        Factor of the columns.
    shift : float, or one for each column
        Constant that is added to the columns.

    Examples
    --------
    >>> from dkfm.kernels import Affine, Linear
    >>> Linear().warp(Affine(2, -1))([[1.0, 0.5]])
    array([[1.]])
    """

    scale: float | tuple[float, ...] = 1.0
    shift: float | tuple[float, ...] = 0.0

    @property
    def keeps_zeros(self) -> bool:
        """Whether the shift is 0."""
        return not np.any(self.shift)

    def _map(self, X: Rows, *constants: Array) -> Rows:
        scale, shift = constants
        return X * scale + shift if isinstance(X, np.ndarray) else scale_columns(X, np.broadcast_to(scale, X.shape[1]))


@dataclass(frozen=True)
class Standardize(AffineMap):  # numpydoc ignore=PR02
    """The affine map of rows ``x -> (x - mean) / scale``, for `Kernel.warp`.

    It keeps the digits of columns that are far from 0. The equivalent `Affine` loses them by cancellation.

    Parameters
    ----------
    mean : float, or one for each column
        Constant that is subtracted from the columns.
    scale : float, or one for each column
        Divisor of the columns, not 0.

    Examples
    --------
    >>> from dkfm.kernels import Linear, Standardize
    >>> Linear().warp(Standardize((1e9, 1.0), (2.0, 1.0)))([[1e9 + 1, 3.0]])
    array([[4.25]])
    """

    mean: float | tuple[float, ...] = 0.0
    scale: float | tuple[float, ...] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not np.all(self.scale):
            raise KernelError(f"Standardize divides by its scale, which must not be 0, and got {self.scale!r:.50}.")

    def _map(self, X: Rows, *constants: Array) -> Rows:
        mean, scale = constants
        return np.asarray((X - mean) / scale)


RowMap = AffineMap | Callable[[Array], object]
"""A function of rows (n, d) that returns rows (n, d') and maps each row independently of the others."""


class _TransformedRowsKernel(Wrapper):
    """Base class of kernels that transform the rows before they evaluate an inner kernel."""

    @abstractmethod
    def _transform_rows(self, X: Rows) -> Rows:
        """Return the transformed rows."""

    @property
    def landmark_copies(self) -> int:
        """Number of copies: the transformed landmarks, and those that the inner kernel keeps."""
        return 1 + self.kernel.landmark_copies

    def prepare(self, landmarks: Rows) -> Evaluator:
        """Transform the landmarks once."""
        transformed = self._transform_rows(landmarks)
        prepared = self._prepare_transformed(transformed, landmarks.dtype)

        def block(Z: Rows, out: Array | None = None, /) -> Array:
            rows = transformed if Z is landmarks else self._transform_rows(Z)
            if rows.shape[1] != transformed.shape[1]:
                raise InvalidInputError(
                    f"{self!r} made rows of {rows.shape[1]} columns, and made {transformed.shape[1]} of the landmarks."
                )
            return prepared(rows, out)

        return block

    def _prepare_transformed(self, landmarks: Rows, dtype: np.dtype[np.floating]) -> Evaluator:
        """Prepare the inner kernel for transformed landmarks and blocks of this dtype."""
        return self.kernel.make_evaluator(landmarks)

    def resolve(self, X: Rows) -> Kernel:
        """Resolve the inner kernel on the transformed rows."""
        return replace(self, kernel=self.kernel.resolve(self._transform_rows(X)))  # type: ignore[type-var]  # every subclass is a dataclass

    def diagonal(self, X: Rows) -> Array:
        """Return the diagonal of the inner kernel for the transformed rows."""
        return self.kernel.evaluate_diagonal(self._transform_rows(X))


@register_operator_class
@dataclass(frozen=True)
class Warped(_TransformedRowsKernel):  # numpydoc ignore=PR02
    """A kernel of mapped rows, ``k(h(x), h(y))``, as made by ``k.warp(h)``; its definiteness is that of k.

    Parameters
    ----------
    kernel : Kernel
        Kernel of the mapped rows.
    h : Affine, Standardize or callable
        Map of the rows. Your own function gets dense, read-only float64 rows (n, d) and returns n rows; it must map
        each row independently of the others.

    Examples
    --------
    >>> import numpy as np
    >>> from dkfm.kernels import Linear
    >>> Linear().warp(np.sqrt)([[4.0, 9.0]])
    array([[13.]])
    """

    kernel: Kernel
    h: RowMap

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.h) or isinstance(self.h, Kernel):
            raise KernelError(f"A kernel is warped by an Affine or a function of rows, and not by {self.h!r:.50}.")

    @property
    def supports_float32(self) -> bool:
        """Whether the inner kernel supports float32; rows are mapped, and then centred, in float64."""
        return self.kernel.supports_float32

    def _prepare_transformed(self, landmarks: Rows, dtype: np.dtype[np.floating]) -> Evaluator:
        if dtype == landmarks.dtype:
            return super()._prepare_transformed(landmarks, dtype)
        form = self.kernel.get_valid_radial_form(landmarks.shape[1])
        if isinstance(landmarks, np.ndarray) and form is not None and form.supports_float32:
            return form.prepare(landmarks, dtype)
        return make_float64_evaluator(self.kernel.make_evaluator(landmarks), landmarks.shape[0])

    @property
    def supports_sparse(self) -> bool:
        """Whether the map keeps zeros, and the inner kernel takes sparse rows."""
        return isinstance(self.h, AffineMap) and self.h.keeps_zeros and self.kernel.supports_sparse

    @property
    def translation_invariant(self) -> bool:
        """Whether the inner kernel is translation invariant and the map is affine, so that it scales differences."""
        return isinstance(self.h, AffineMap) and self.kernel.translation_invariant

    def _transform_rows(self, X: Rows) -> Rows:
        X = as_float64(X)
        if isinstance(self.h, AffineMap):
            return self.h(X)
        name = f"The rows that {display_name(self.h)} returned"
        rows = as_rows(call_user_function(self, self.h, read_only_view(X)), name)  # type: ignore[arg-type]  # dense: sparse rows are refused
        if rows.shape[0] != X.shape[0]:
            raise InvalidInputError(f"{name} are {rows.shape[0]}, and must be as many as came, {X.shape[0]}.")
        return rows

    def __repr__(self) -> str:
        h = repr(self.h) if isinstance(self.h, AffineMap) else display_name(self.h)
        return f"{parenthesize(self.kernel, Sum, Product, Scaled, Power)}.warp({h})"


@register_operator_class
@dataclass(frozen=True)
class Columns(_TransformedRowsKernel):  # numpydoc ignore=PR02
    """A kernel of selected columns, as made by ``k.on(columns)``; its definiteness is that of k.

    Parameters
    ----------
    kernel : Kernel
        Kernel of the selected columns.
    columns : int or sequence of int
        Numbers of the columns, counted from 0, each at most once.

    Examples
    --------
    >>> from dkfm.kernels import Linear
    >>> (Linear().on(0) + Linear().on([1, 2]) ** 2)([[1.0, 2.0, 3.0]])
    array([[170.]])
    """

    kernel: Kernel
    columns: int | Sequence[int]

    def __post_init__(self) -> None:
        super().__post_init__()
        columns = unwrap_array(self.columns)
        numbers = (columns,) if isinstance(columns, int | np.integer) else columns
        if not isinstance(numbers, Sequence | np.ndarray) or not len(numbers):
            raise KernelError(f"A kernel is of columns by their numbers, and not of {self.columns!r:.50}.")
        for column in numbers:
            if isinstance(column, bool) or not isinstance(column, int | np.integer) or column < 0:
                raise KernelError(f"A kernel is of columns by their numbers, from 0, and not of {column!r:.50}.")
        if len(set(numbers)) < len(numbers):
            raise KernelError(f"A kernel takes each column once, and got {numbers!r:.50}.")
        object.__setattr__(self, "columns", tuple(int(column) for column in numbers))

    def estimate_extra_value_seconds(self, d: int) -> float:
        """Estimate the seconds of the inner kernel for the selected columns."""
        return self.kernel.estimate_extra_value_seconds(len(self.columns))  # type: ignore[arg-type]  # a tuple since __post_init__

    def _transform_rows(self, X: Rows) -> Rows:
        columns: tuple[int, ...] = self.columns  # type: ignore[assignment]  # a tuple since __post_init__
        if max(columns) >= X.shape[1]:
            raise KernelError(f"{self!r} takes column {max(columns)} and the rows have {X.shape[1]} columns.")
        return X[:, list(columns)]

    def __repr__(self) -> str:
        return f"{parenthesize(self.kernel, Sum, Product, Scaled, Power)}.on({self.columns!r})"
