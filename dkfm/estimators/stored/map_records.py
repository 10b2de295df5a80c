"""Check the stored records of feature maps, and convert those of earlier versions."""

from dataclasses import replace
from typing import cast

import numpy as np

from dkfm.core.rows import as_float64
from dkfm.errors import UnsupportedStoreError
from dkfm.storage.model_store import Record


def eigenvalues_or_pivots_name(basis: str) -> str:
    """Return the name under which the values of a root are fitted."""
    return "pivots" if basis == "cholesky" else "eigenvalues"


def require_consistent(record: Record) -> None:
    """Raise an UnsupportedStoreError if the fitted arrays or numbers of a map do not fit its model or its certificates.

    A map whose training rows were sampled knows neither error bounds nor the largest k(x, x); every other map does.
    """
    head, arrays, fitted = record.model.head("residual"), record.extra_arrays, record.fitted
    n, r = head.weights.shape
    on_training = cast("dict[str, dict[str, object]]", fitted["certificates"]).get("training_certificate")
    has_bounds, has_largest = "error_bounds" in arrays, "max_similarity" in cast("dict[str, float]", fitted["numbers"])
    was_sampled = not has_bounds if on_training is None else "sampled_rows" in on_training
    may_be_sampled = record.parameters["certify"] == "sample"
    if has_bounds != has_largest or has_bounds == was_sampled or (was_sampled and not may_be_sampled):
        raise UnsupportedStoreError("The error bounds of a feature map do not fit its certificates.")
    shapes = {eigenvalues_or_pivots_name(str(record.parameters["basis"])): (r,), "scales": (n,)}
    shapes |= {"error_bounds": (r + 1,)} if has_bounds else {}
    shapes |= {"mean": (n,)} if record.parameters["centered"] else {}
    if any(arrays[name].shape != shape for name, shape in shapes.items()) or arrays["dropped"].ndim != 1:
        raise UnsupportedStoreError("The fitted arrays of a feature map do not fit its model.")
    if not (np.isfinite(arrays["scales"]) & (arrays["scales"] >= 0)).all():
        raise UnsupportedStoreError("The scales of a feature map are not lengths of rows.")
    if record.parameters["dtype"] != str(record.model.dtype):
        raise UnsupportedStoreError("A feature map is not of the precision of its model.")


def convert_old(record: Record) -> Record:
    """Return a record as this version saves it: earlier versions certified all rows, and had other error bounds.

    In an earlier version, the root is not scaled, and bounds are in units of ``sqrt(k(z, z) max_n k(x_n, x_n))``. They
    are divided by the length of the shortest known row. If some training rows are not landmarks, and so are not known,
    the bounds become 1, which no error exceeds.
    """
    record = replace(record, parameters={"certify": "all", **record.parameters})
    arrays, model = record.extra_arrays, record.model
    if "scales" in arrays:
        return record
    bounds, n = arrays["error_bounds"], model.landmarks.shape[0]
    if model.kernel.is_precomputed:
        converted = np.where(np.isinf(bounds), np.inf, 1.0)
    else:
        diagonal = model.kernel.evaluate_diagonal(as_float64(model.original_landmarks))
        shortest = float(diagonal[diagonal > 0].min(initial=np.inf))
        certificates = cast("dict[str, object]", record.fitted["certificates"])
        largest = cast("dict[str, float]", record.fitted["numbers"])["max_similarity"]
        known = (
            diagonal.min() == diagonal.max() or certificates.get("training_certificate") == certificates["certificate"]
        )
        converted = bounds * np.sqrt(largest / shortest) if known else np.ones(len(bounds))
        converted = np.where(np.isinf(bounds), np.inf, np.minimum(converted, 1.0))
    return replace(record, extra_arrays={**arrays, "error_bounds": converted, "scales": np.ones(n)})
