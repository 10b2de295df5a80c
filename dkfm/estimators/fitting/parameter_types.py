"""Define the types of parameters of estimators, for type checkers."""

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

import numpy as np

Basis: TypeAlias = Literal["symmetric", "spectral", "cholesky"]
Build: TypeAlias = Literal["auto", "gram", "columns", "rounds", "tiled"]
Certify: TypeAlias = Literal["all", "sample"]
ComponentPolicy: TypeAlias = Literal["auto", "raise", "clip"]
DType: TypeAlias = Literal["float64", "float32"] | type[np.float64] | type[np.float32]
EigenSolver: TypeAlias = Literal["auto", "dense", "arpack", "randomized"]
Formulation: TypeAlias = Literal["combined", "dual", "primal"]
IndefinitePolicy: TypeAlias = Literal["raise", "clip"]
Selector: TypeAlias = Literal["uniform", "kmeans", "pivots", "random_pivots"]


class HasShape(Protocol):
    """An array, sparse array or data frame."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of each dimension of the array."""


Landmarks: TypeAlias = Selector | HasShape | Sequence[int] | Sequence[Sequence[float]]
"""Type of ``landmarks=``: a selector, indices of training rows, or points."""
Solver: TypeAlias = Literal["auto", "dense", "tiled", "cg"]
