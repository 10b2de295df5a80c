"""Display an estimator in a notebook: scikit-learn's diagram and, after a fit, a table of the model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from sklearn.base import BaseEstimator

from dkfm.core.display import html_cards
from dkfm.core.display.quantities import format_bytes
from dkfm.numerics.model import Model

_SHOWN_VALUES = 5
"""Largest number of penalties of targets that are shown."""


class HtmlDisplayMixin(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Add a table of the fitted model to the HTML display of scikit-learn."""

    model_: Model
    _saved_location: str | None = None
    """Location to which `save` wrote the estimator, or from which `load` read it."""

    @property
    def _repr_html_(self) -> Callable[[], str]:
        # If scikit-learn's display is switched off, this raises the AttributeError that IPython expects.
        render = super()._repr_html_
        return lambda: render() + self._fitted_html()

    def _repr_mimebundle_(self, **kwargs: object) -> dict[str, str]:
        bundle: dict[str, str] = super()._repr_mimebundle_(**kwargs)
        return {kind: text + self._fitted_html() if kind == "text/html" else text for kind, text in bundle.items()}

    def _fitted_html(self) -> str:
        """Return the table of the model, or an empty string before a fit."""
        if "model_" not in vars(self):
            return ""
        model = self.model_
        rows, columns = model.landmarks.shape[0], model.n_features_in
        sparsity = "" if isinstance(model.landmarks, np.ndarray) else ", sparse"
        attributes, fitted = vars(self), {}
        if "certificate_" in attributes:
            fitted["certificate"] = str(attributes["certificate_"])
        if "training_certificate_" in attributes:
            fitted["training rows"] = str(attributes["training_certificate_"])
        if hasattr(type(self), "error_bound_"):
            bound = getattr(self, "error_bound_", None)
            fitted["error bound"] = "not known, for training rows were sampled" if bound is None else f"{bound:.1e}"
        if "rounding_" in attributes:
            fitted["rounding"] = f"{attributes['rounding_']:.1e} of the spread of the outputs"
        if attributes.get("total_variance_", 0.0) > 0:  # NaN if unknown
            share = self.explained_variance_.sum() / attributes["total_variance_"]
            fitted["share of the variance"] = f"{share:.1%}"
        for name in ("shrinkage_", "alpha_"):
            chosen = np.atleast_1d(getattr(self, name, ()))
            fitted[name.rstrip("_")] = ", ".join(f"{value:.3g}" for value in chosen[:_SHOWN_VALUES])
        facts = {
            "outputs": ", ".join(f"{name} ({head.width:,})" for name, head in model.heads.items()),
            "rank": f"{self.rank_:,}" if hasattr(self, "rank_") else "",
            "landmarks": f"{rows:,} x {columns:,}{sparsity}",
            **fitted,
            "precision": str(model.dtype),
            "size": f"{format_bytes(model.nbytes)} in memory",
            "saved as": self._saved_location or "",
        }
        return html_cards.html_card(
            f"{type(self).__name__}, fitted", repr(model.kernel), {k: v for k, v in facts.items() if v}
        )
