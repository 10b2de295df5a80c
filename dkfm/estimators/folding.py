"""Define `fold`, which folds a linear model of features into the kernel, so that no features are computed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from sklearn.utils.validation import check_is_fitted

from dkfm.core.rows import Array
from dkfm.errors import InvalidInputError, NotSupportedError
from dkfm.estimators import linear_model_readers
from dkfm.estimators.columns_between_models import require_column_order, to_named_frame
from dkfm.estimators.fitting.feature_maps import require_loaded_weights
from dkfm.estimators.folded_model import Folded, FoldedTransformer
from dkfm.estimators.linear_model_readers import LinearModel
from dkfm.estimators.mixins.transformer import ModelTransformerMixin
from dkfm.estimators.stored.class_labels import require_storable
from dkfm.estimators.stored.folded import PREDICT, TRANSFORM, sample_landmarks
from dkfm.numerics import links, scorer
from dkfm.numerics.certificates import certificate, reference_scores
from dkfm.numerics.model import Head, Model

_N_RANDOM_FEATURES = 64
"""Number of random feature vectors on which a model is checked if a precomputed kernel has no points."""

_MAX_ROUNDING = 0.1
"""Largest difference between folded and unfolded outputs, relative to the spread of an output."""

_CONSTANT_SPREAD = 1e-6
"""Smallest spread of an output, relative to its magnitude; below it, the output counts as constant."""


def fold(feature_map: ModelTransformerMixin, model: object) -> Folded:
    """Fold a linear model that was trained on features into the kernel of their map.

    The folded model computes ``k(Z, X) W - b`` and no features, so it needs no product with an N x N matrix: a row
    costs N kernel values, and N multiplications for each output of the model. It holds arrays instead of the original
    model, so it is saved without pickle, and `dkfm score` accepts it.

    Parameters
    ----------
    feature_map : ExactFeatureMap, KernelPCA, KernelFisher or FoldedTransformer
        Fitted map.
    model : estimator of scikit-learn
        Estimator fitted to the output of `feature_map`: a linear classifier or regressor (LogisticRegression,
        RidgeClassifier, LinearSVC, the SGD models, LinearDiscriminantAnalysis, LinearRegression, Ridge, Lasso, and
        others whose predictions are ``X coef + intercept``), PCA, TruncatedSVD, partial least squares, CCA, or a
        Pipeline of these and StandardScaler.

    Returns
    -------
    Folded
        Fitted model. It has each of `predict`, `decision_function`, `predict_proba` and `transform` that `model` has.

    Raises
    ------
    NotSupportedError
        The model is not affine in the features, or its outputs are mostly rounding error.

    Warns
    -----
    DkfmWarning
        Folded and unfolded outputs differ by more than 1e-6 of an output's spread (1e-2 in float32), because a scaler,
        or a model without a penalty, divides by values that are mostly rounding error.

    Notes
    -----
    Features are linear in ``k(z, X)`` (Ghiasi-Shirazi and Qaraei, eq. 4), and so are linear functions of features.
    Folded and unfolded outputs differ by at most ``64 eps (sum |k| |W_map| |A| + |b|)``, with A the coefficients of the
    model; `fold` checks this on the landmarks.

    Examples
    --------
    >>> import numpy as np
    >>> from dkfm import ExactFeatureMap, fold
    >>> from dkfm.kernels import Gaussian
    >>> from sklearn.linear_model import LogisticRegression
    >>> X = np.random.default_rng(0).normal(size=(200, 2))
    >>> phi = ExactFeatureMap(Gaussian(1.0), basis="spectral").fit(X)
    >>> ring = LogisticRegression().fit(phi.transform(X), np.hypot(*X.T) < 1)
    >>> folded = fold(phi, ring)
    >>> bool((folded.predict(X) == ring.predict(phi.transform(X))).all())
    True
    """
    if not isinstance(feature_map, ModelTransformerMixin):
        steps = "; give its map and its model, as in fold(p[0], p[1])" if hasattr(feature_map, "steps") else ""
        raise InvalidInputError(
            f"feature_map must be a fitted feature map of dkfm's, and is a {type(feature_map).__name__}{steps}."
        )
    check_is_fitted(feature_map, "model_")
    head = feature_map.model_.head(feature_map._output_head_name)
    require_loaded_weights(feature_map.model_, "A folded model")
    check_is_fitted(model)
    linear = linear_model_readers.read_linear_model(model)
    width = next(iter(linear.affine_outputs.values()))[0].dense_weights.shape[0]
    if width != head.width:
        raise InvalidInputError(f"The model was fitted to {width} features, and the map returns {head.width}.")
    require_column_order(
        getattr(model, "feature_names_in_", None),
        list(feature_map.get_feature_names_out()),
        f"The rows of {model!r:.50}",
    )
    folded = (FoldedTransformer if TRANSFORM in linear.affine_outputs else Folded)()
    folded._set_model(_compose_model(feature_map.model_, head, linear))
    folded.model_name_, folded.kind_ = type(model).__name__, linear.estimator_type
    if linear.classes is not None:
        folded.classes_ = require_storable(linear.classes)
    folded._copy_feature_names_in(feature_map)
    features = _sample_features(feature_map)
    _require_affine_outputs(model, linear, features)
    if not feature_map.kernel_.is_precomputed:
        folded.rounding_ = _measure_rounding(folded, feature_map.model_, linear, features)
        _check_rounding_error(folded.rounding_, folded.model_.dtype)
    return folded


def _compose_model(base: Model, head: Head, linear: LinearModel) -> Model:
    """Return a model whose heads compose a head of a map with the outputs of a linear model, in the map's precision."""
    composed: dict[int, tuple[Array, Array]] = {}
    heads: dict[str, Head] = {}
    for name, (step, link) in linear.affine_outputs.items():
        if id(step) not in composed:
            with np.errstate(over="ignore"):  # an overflow in float32 raises below
                W, b = (array.astype(base.dtype) for array in linear_model_readers.compose_head_with_affine(head, step))
            if not (np.isfinite(W).all() and np.isfinite(b).all()):
                raise NotSupportedError(f"The weights of {name} are not finite in {base.dtype}: it cannot be folded.")
            composed[id(step)] = W, b
        heads[name] = Head(*composed[id(step)], link=link)
    return replace(base, heads=heads)


def _sample_features(feature_map: ModelTransformerMixin) -> Array:
    """Return features of at most 512 landmarks, or random features if a precomputed kernel has no points."""
    model, name = feature_map.model_, feature_map._output_head_name
    if model.kernel.is_precomputed:
        random = np.random.default_rng(0).normal(size=(_N_RANDOM_FEATURES, model.head(name).width))
        return random.astype(model.dtype)
    return scorer.prepare_scorer(model)(name, sample_landmarks(model))


def _require_affine_outputs(model: object, linear: LinearModel, F: Array) -> None:
    """Raise unless the outputs of a model for features agree with its coefficients, up to rounding."""
    F64, eps = F.astype(np.float64), float(np.finfo(F.dtype).eps)
    for name, (step, link) in linear.affine_outputs.items():
        product = F64 @ step.dense_weights - step.offset
        error = 64 * eps * (np.abs(F64) @ np.abs(step.dense_weights) + np.abs(step.offset))
        expected = links.link_by_name(link)(product, _raise_no_diagonal)
        returned = np.asarray(getattr(model, name)(to_named_frame(model, F)))
        if linear.classes is not None and name == PREDICT and returned.ndim == 1:
            returned = np.searchsorted(linear.classes, returned)
        returned = returned.reshape(len(F), -1)
        same_shape = returned.shape == expected.shape
        if (
            not same_shape
            or not (
                np.abs(returned - expected) <= reference_scores.propagate_error_through_link(link, product, error, eps)
            ).all()
        ):
            raise NotSupportedError(
                f"The {name} of {type(model).__name__} is not what its coefficients say, so that it cannot be folded; "
                "it can still run on what transform returns."
            )


def _measure_rounding(folded: Folded, base: Model, linear: LinearModel, F: Array) -> float:
    """Return the largest difference of folded and unfolded outputs of landmarks, relative to an output's spread."""
    ratios = [0.0]
    for name, (step, link) in linear.affine_outputs.items():
        if link == links.IDENTITY:
            unfolded = F.astype(np.float64) @ step.dense_weights - step.offset
            difference = np.abs(folded._get_scorer()(name, sample_landmarks(base)) - unfolded).max(axis=0)
            # For an almost constant output, the difference is relative to its magnitude instead of its spread.
            spread = np.maximum(np.ptp(unfolded, axis=0), _CONSTANT_SPREAD * np.abs(unfolded).max(axis=0))
            ratios.append(float(np.divide(difference, spread, out=difference, where=difference != 0).max()))
    return float(np.max(ratios))  # NaN counts as largest


def _check_rounding_error(rounding: float, dtype: np.dtype[np.floating]) -> None:
    """Raise if the rounding error of a fold is too large; warn if it is larger than expected."""
    message = f"Folded and unfolded differ by {rounding:.1e} of an output's spread on the landmarks"
    remedy = (
        "a scaler, or a model without a penalty, divides by what is mostly rounding; truncate the map or leave it out"
    )
    if not rounding <= _MAX_ROUNDING:
        raise NotSupportedError(f"{message}: {remedy}.")
    certificate.warn_if_error_is_large(rounding, dtype, message, remedy)


def _raise_no_diagonal() -> Array:
    raise AssertionError("no linear model needs k(z, z)")
