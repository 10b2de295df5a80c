"""Represent kernels as functions of one squared distance, so that terms of a sum or product share its computation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dkfm.core.rows import Array, Rows
from dkfm.kernels.pairwise.block_operations import Evaluator, map_rows
from dkfm.kernels.pairwise.distance_effects import Effects, MapValues, scale_effect
from dkfm.kernels.pairwise.squared_distances import prepare_negative_squared_distances


@dataclass(frozen=True)
class RadialForm:
    """A kernel as a function of ``-|x - y|^2 / scale^2``.

    Attributes
    ----------
    scale : float
        Divisor of the columns.
    relative_near_threshold : float
        Smallest share of the squared norms below which squared distances are recomputed from differences.
    map_values : callable
        Function from minus squared distances, which it may overwrite, to kernel values.
    supports_float32 : bool
        Whether the kernel may be computed from float32 distances.
    sensitivity_maps : tuple of (callable, float)
        Kernels that determine which errors of distances matter, and factors of the minus squared distances they take.
    """

    scale: float
    relative_near_threshold: float
    map_values: MapValues
    supports_float32: bool
    sensitivity_maps: Effects

    def prepare(self, landmarks: Rows, dtype: np.dtype[np.floating] | None = None) -> Evaluator:
        """Return a function from rows Z (n, d) to the kernel values of all pairs with the landmarks (m, d).

        `dtype` is the precision of the values, by default that of the landmarks.
        """
        distances = prepare_negative_squared_distances(
            landmarks, self.scale, self.relative_near_threshold, self.sensitivity_maps, dtype, self.map_values
        )
        return lambda Z, out=None, /: map_rows(distances(Z, out), self.map_values)

    def limit_error_share(self, share: float) -> RadialForm:
        """Return the form that allows only this share of the error of a kernel value."""
        effects = tuple((scale_effect(effect, share), factor) for effect, factor in self.sensitivity_maps)
        return replace(self, sensitivity_maps=effects)


def combine_radial_forms(operation: np.ufunc, forms: Sequence[RadialForm]) -> RadialForm:
    """Return the form of kernels combined by an elementwise operation; its scale is the least of theirs."""
    if len(forms) == 1:
        return forms[0]
    if operation is np.multiply:  # the errors of factors add up
        forms = [form.limit_error_share(1 / len(forms)) for form in forms]
    scale = min(form.scale for form in forms)
    factors = [(scale / form.scale) ** 2 for form in forms]

    def map_values(negative_squares: Array) -> Array:
        total: Array | None = None
        for form, factor in zip(forms, factors, strict=True):
            values = form.map_values(negative_squares * factor)
            total = values if total is None else operation(total, values, out=total)
        assert total is not None  # noqa: S101  # there are at least two forms; the type checker cannot know
        return total

    near = max(form.relative_near_threshold for form in forms)
    effects = tuple(
        (effect, inner * factor)
        for form, factor in zip(forms, factors, strict=True)
        for effect, inner in form.sensitivity_maps
    )
    return RadialForm(scale, near, map_values, all(form.supports_float32 for form in forms), effects)
