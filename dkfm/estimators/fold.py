"""`fold`: a linear model that was trained on features, folded into the kernel: one product a row, and no features."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from sklearn.utils.validation import check_is_fitted

from dkfm.core.rows import Array
from dkfm.errors import InvalidInputError, NotSupportedError
from dkfm.estimators.feature_names import require_column_order, select_fitted_columns
from dkfm.estimators.fitting import class_labels, linear_models
from dkfm.estimators.fitting.linear_models import PREDICT, TRANSFORM, LinearModel
from dkfm.estimators.folded_model import Folded, FoldedTransformer, sample_landmarks
from dkfm.estimators.transformer import ModelTransformerMixin
from dkfm.numerics import links, scorer
from dkfm.numerics.certificates import certificate, reference
from dkfm.numerics.model import Head, Model

_PROBES = 64
"""Random features that a model is read against where there are no points."""

_REFUSED, _CONSTANT = 0.1, 1e-6
"""Of the spread of an output: what folded and unfolded may differ by; of its size: the spread of a constant."""


def fold(feature_map: ModelTransformerMixin, model: object) -> Folded:
    """Fold a linear model that was trained on features into their kernel: ``k(Z, X) W - b`` instead of features.

    Every product with an N x N matrix goes: a row costs N kernel values and N multiplications for each column of the
    model. What comes back holds arrays, not the model: it is saved without pickle, and `dkfm score` takes it.

    Parameters
    ----------
    feature_map : ExactFeatureMap, KernelPCA, KernelFisher, or another fold that transforms
        Fitted.
    model : estimator of scikit-learn's
        Fitted to what `feature_map` returns: a linear classifier or regressor (LogisticRegression, RidgeClassifier,
        LinearSVC, those of SGD, LinearDiscriminantAnalysis, LinearRegression, Ridge, Lasso, and others that derive from
        scikit-learn's linear models), PCA, TruncatedSVD, partial least squares and CCA, or a Pipeline of these and
        StandardScaler.

    Returns
    -------
    Folded
        With those of `predict`, `decision_function`, `predict_proba` and `transform` that the model has.

    Raises
    ------
    NotSupportedError
        A model that is not affine in the features, or of whose outputs rounding leaves nothing.

    Warns
    -----
    DkfmWarning
        Folded and unfolded differ by more than 1e-6 of an output's spread (1e-2 in float32): a scaler, or a model
        without a penalty, divides by what is mostly rounding.

    Notes
    -----
    Features are linear in ``k(z, X)`` (Ghiasi-Shirazi and Qaraei, eq. 4), and so is everything linear in them. Folded
    and unfolded differ by at most ``64 eps (sum |k| |W_map| |A| + |b|)``, which is checked on the landmarks.

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
        raise InvalidInputError(f"feature_map must be a fitted feature map of dkfm's, and is {feature_map!r:.100}.")
    check_is_fitted(feature_map, "model_")
    head = feature_map.model_.head(feature_map._output)
    check_is_fitted(model)
    found = linear_models.read_linear_model(model)
    width = next(iter(found.outputs.values()))[0].matrix.shape[0]
    if width != head.width:
        raise InvalidInputError(f"The model was fitted to {width} features, and the map returns {head.width}.")
    require_column_order(
        getattr(model, "feature_names_in_", None),
        list(feature_map.get_feature_names_out()),
        f"The rows of {model!r:.50}",
    )
    folded = (FoldedTransformer if TRANSFORM in found.outputs else Folded)()
    folded._serve(_model(feature_map.model_, head, found))
    folded.model_name_, folded.kind_ = type(model).__name__, found.kind
    if found.classes is not None:
        folded.classes_ = class_labels.require_storable(found.classes)
    folded._take_column_names(feature_map)
    features = _features(feature_map)
    _require_as_read(model, found, features)
    if not feature_map.kernel_.is_precomputed:
        folded.rounding_ = _rounding(folded, feature_map.model_, found, features)
        _judge(folded.rounding_, folded.model_.dtype)
    return folded


def _model(of: Model, head: Head, found: LinearModel) -> Model:
    """Return the model of a map whose head is followed by the maps of a linear model, in its precision."""
    made: dict[int, tuple[Array, Array]] = {}
    heads: dict[str, Head] = {}
    for name, (after, link) in found.outputs.items():
        if id(after) not in made:
            with np.errstate(over="ignore"):  # what float32 does not hold is refused below
                W, b = (array.astype(of.dtype) for array in linear_models.compose_head(head, after))
            if not (np.isfinite(W).all() and np.isfinite(b).all()):
                raise NotSupportedError(f"The weights of {name} are not finite in {of.dtype}: it cannot be folded.")
            made[id(after)] = W, b
        heads[name] = Head(*made[id(after)], link=link)
    return replace(of, heads=heads)


def _features(feature_map: ModelTransformerMixin) -> Array:
    """Return features of landmarks, at most 512; random ones where landmarks are numbers of a precomputed kernel."""
    model, name = feature_map.model_, feature_map._output
    if model.kernel.is_precomputed:
        random = np.random.default_rng(0).normal(size=(_PROBES, model.head(name).width))
        return random.astype(model.dtype)
    return scorer.prepare_scorer(model)(name, sample_landmarks(model))


def _require_as_read(model: object, found: LinearModel, F: Array) -> None:
    """Raise unless a model returns of features what was read in it, within what rounding allows."""
    F64, eps = F.astype(np.float64), float(np.finfo(F.dtype).eps)
    for name, (after, link) in found.outputs.items():
        product = F64 @ after.matrix - after.offset
        error = 64 * eps * (np.abs(F64) @ np.abs(after.matrix) + np.abs(after.offset))
        expected = links.link_by_name(link)(product, _no_diagonal)
        returned = np.asarray(getattr(model, name)(select_fitted_columns(model, F)))
        if found.classes is not None and name == PREDICT and returned.ndim == 1:
            returned = np.searchsorted(found.classes, returned)
        returned = returned.reshape(len(F), -1)
        same = returned.shape == expected.shape
        if (
            not same
            or not (np.abs(returned - expected) <= reference.error_through_link(link, product, error, eps)).all()
        ):
            raise NotSupportedError(
                f"The {name} of {type(model).__name__} is not what its coefficients say, so that it cannot be folded; "
                "it can still run on what transform returns."
            )


def _rounding(folded: Folded, of: Model, found: LinearModel, F: Array) -> float:
    """Return by how much folded and unfolded outputs of landmarks differ, as a share of each output's spread."""
    shares = [0.0]
    for name, (after, link) in found.outputs.items():
        if link == links.IDENTITY:
            unfolded = F.astype(np.float64) @ after.matrix - after.offset
            difference = np.abs(folded._scorer()(name, sample_landmarks(of)) - unfolded).max(axis=0)
            # Of an output that is all but constant its size counts.
            spread = np.maximum(np.ptp(unfolded, axis=0), _CONSTANT * np.abs(unfolded).max(axis=0))
            shares.append(float(np.divide(difference, spread, out=difference, where=difference != 0).max()))
    return float(np.max(shares))  # a NaN is the largest


def _judge(rounding: float, dtype: np.dtype[np.floating]) -> None:
    told = f"Folded and unfolded differ by {rounding:.1e} of an output's spread on the landmarks"
    remedy = (
        "a scaler, or a model without a penalty, divides by what is mostly rounding; truncate the map or leave it out"
    )
    if not rounding <= _REFUSED:
        raise NotSupportedError(f"{told}: {remedy}.")
    certificate.warn_above(rounding, dtype, told, remedy)


def _no_diagonal() -> Array:
    raise AssertionError("no linear model needs k(z, z)")
