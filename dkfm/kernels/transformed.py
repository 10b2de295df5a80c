"""Kernels of changed rows: warped by a map, of some columns only."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import isfinite

import numpy as np

from dkfm.core.rows import Array, Rows, as_rows, scale_columns
from dkfm.errors import InvalidInputError, KernelError
from dkfm.kernels.algebra import Power, Product, Scaled, Sum, Wrapper, parenthesize
from dkfm.kernels.base import Kernel, register_combination
from dkfm.kernels.custom import call_user_function, qualified_name, read_only_view
from dkfm.kernels.pairwise.blocks import Evaluator
from dkfm.kernels.parameters import as_number, as_scalar


@dataclass(frozen=True)
class Affine:
    """The map of rows ``x -> scale * x + shift``, for `Kernel.warp`.

    Parameters
    ----------
    scale, shift : float, or one for each column

    Examples
    --------
    >>> from dkfm.kernels import Affine, Linear
    >>> Linear().warp(Affine(2, -1))([[1.0, 0.5]])
    array([[1.]])
    """

    scale: float | tuple[float, ...] = 1.0
    shift: float | tuple[float, ...] = 0.0

    def __post_init__(self) -> None:
        for name in ("scale", "shift"):
            value = as_scalar(getattr(self, name))
            several = isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes)
            parts: Iterable[object] = value if several else (value,)  # type: ignore[assignment]  # as just seen
            numbers = tuple(as_number(part) for part in parts)
            if not numbers or not all(isfinite(number) for number in numbers):
                raise KernelError(f"Affine needs finite numbers as {name}, and got {value!r:.50}.")
            object.__setattr__(self, name, numbers if several else numbers[0])

    def __call__(self, X: Rows) -> Rows:
        """Return the map of float64 rows (n, d); sparse rows stay sparse where nothing is shifted."""
        factors = [np.asarray(value) for value in (self.scale, self.shift)]
        if any(f.ndim and len(f) != X.shape[1] for f in factors):
            raise KernelError(f"{self!r} has other columns than these rows, which have {X.shape[1]}.")
        scale, shift = factors
        if not isinstance(X, np.ndarray):
            if shift.any():
                raise InvalidInputError(f"{self!r} shifts every value and would make sparse rows dense.")
            return scale_columns(X, np.broadcast_to(scale, X.shape[1]))
        mapped: Array = X * scale + shift
        return mapped


RowMap = Affine | Callable[[Array], object]
"""A map of rows (n, d) to rows (n, d'), row by row."""


class _Mapped(Wrapper):
    """A kernel of rows that are changed first."""

    @abstractmethod
    def _mapped(self, X: Rows) -> Rows:
        """Return the changed rows."""

    @property
    def landmark_copies(self) -> int:
        """The changed landmarks, and what the kernel makes of them."""
        return 1 + self.kernel.landmark_copies

    def prepare(self, landmarks: Rows) -> Evaluator:
        """Change the landmarks once."""
        mapped = self._mapped(landmarks)
        prepared = self.kernel.make_evaluator(mapped)

        def block(Z: Rows, out: Array | None = None, /) -> Array:
            rows = mapped if Z is landmarks else self._mapped(Z)
            if rows.shape[1] != mapped.shape[1]:
                raise InvalidInputError(
                    f"{self!r} made rows of {rows.shape[1]} columns, and made {mapped.shape[1]} of the landmarks."
                )
            return prepared(rows, out)

        return block

    def resolve(self, X: Rows) -> Kernel:
        """Resolve the kernel on changed rows."""
        return replace(self, kernel=self.kernel.resolve(self._mapped(X)))  # type: ignore[type-var]  # every subclass is a dataclass

    def diagonal(self, X: Rows) -> Array:
        """Return the diagonal of the changed rows."""
        return self.kernel.evaluate_diagonal(self._mapped(X))


@register_combination
@dataclass(frozen=True)
class Warped(_Mapped):
    """A kernel of mapped rows, ``k(h(x), h(y))``; ``k.warp(h)`` makes one. As definite as the kernel.

    Parameters
    ----------
    kernel : Kernel
    h : Affine or callable
        A function of yours gets dense read-only float64 rows (n, d) and returns as many rows; what it makes of a row
        must not depend on the others.

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
        """No: what a map makes of float32 rows need not fit into float32."""
        return False

    @property
    def supports_sparse(self) -> bool:
        """Where the map does not fill zeros, and the kernel takes them."""
        return isinstance(self.h, Affine) and not np.any(self.h.shift) and self.kernel.supports_sparse

    @property
    def translation_invariant(self) -> bool:
        """Where the map keeps differences, to scale, and the kernel is."""
        return isinstance(self.h, Affine) and self.kernel.translation_invariant

    def _mapped(self, X: Rows) -> Rows:
        if isinstance(self.h, Affine):
            return self.h(X)
        name = f"The rows that {qualified_name(self.h)} returned"
        rows = as_rows(call_user_function(self, self.h, read_only_view(X)), name)  # type: ignore[arg-type]  # dense, for it is not sparse here
        if rows.shape[0] != X.shape[0]:
            raise InvalidInputError(f"{name} are {rows.shape[0]}, and must be as many as came, {X.shape[0]}.")
        return rows

    def __repr__(self) -> str:
        h = repr(self.h) if isinstance(self.h, Affine) else qualified_name(self.h)
        return f"{parenthesize(self.kernel, Sum, Product, Scaled, Power)}.warp({h})"


@register_combination
@dataclass(frozen=True)
class Columns(_Mapped):
    """A kernel of some columns only; ``k.on(columns)`` makes one. As definite as the kernel.

    Parameters
    ----------
    kernel : Kernel
    columns : int or sequence of int
        Numbers of columns, from 0, each once.

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
        columns = as_scalar(self.columns)
        given = (columns,) if isinstance(columns, int | np.integer) else columns
        if not isinstance(given, Sequence | np.ndarray) or not len(given):
            raise KernelError(f"A kernel is of columns by their numbers, and not of {self.columns!r:.50}.")
        for column in given:
            if isinstance(column, bool) or not isinstance(column, int | np.integer) or column < 0:
                raise KernelError(f"A kernel is of columns by their numbers, from 0, and not of {column!r:.50}.")
        if len(set(given)) < len(given):
            raise KernelError(f"A kernel takes each column once, and got {given!r:.50}.")
        object.__setattr__(self, "columns", tuple(int(column) for column in given))

    def _mapped(self, X: Rows) -> Rows:
        columns: tuple[int, ...] = self.columns  # type: ignore[assignment]  # a tuple since it was made
        if max(columns) >= X.shape[1]:
            raise KernelError(f"{self!r} takes column {max(columns)} and the rows have {X.shape[1]} columns.")
        return X[:, list(columns)]

    def __repr__(self) -> str:
        return f"{parenthesize(self.kernel, Sum, Product, Scaled, Power)}.on({self.columns!r})"
