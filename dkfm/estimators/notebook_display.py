"""How an estimator is shown in a notebook: scikit-learn's diagram, and once it is fitted, what was fitted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from sklearn.base import BaseEstimator

from dkfm.core import budget, notebook_display
from dkfm.numerics.model import Model


class HtmlDisplayMixin(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """An estimator with a model, drawn as scikit-learn draws estimators, a table of the model below."""

    model_: Model
    _lies_at: str | None = None
    """Where `save` put what is fitted, or `load` found it."""

    @property
    def _repr_html_(self) -> Callable[[], str]:
        # Not there where scikit-learn is told to draw nothing: then this raises the AttributeError that says so.
        drawn = super()._repr_html_
        return lambda: drawn() + self._fitted_html()

    def _repr_mimebundle_(self, **kwargs: object) -> dict[str, str]:
        bundle: dict[str, str] = super()._repr_mimebundle_(**kwargs)
        return {kind: text + self._fitted_html() if kind == "text/html" else text for kind, text in bundle.items()}

    def _fitted_html(self) -> str:
        """Return the table, or nothing before a fit."""
        if "model_" not in vars(self):
            return ""
        model = self.model_
        rows, columns = model.landmarks.shape[0], model.columns
        kept = "" if isinstance(model.landmarks, np.ndarray) else ", sparse"
        known, fitted = vars(self), {}
        if "certificate_" in known:
            fitted["certificate"] = str(known["certificate_"])
        if "rounding_" in known:
            fitted["rounding"] = f"{known['rounding_']:.1e} of the spread of the outputs"
        facts = {
            "outputs": ", ".join(f"{name} ({head.width:,})" for name, head in model.heads.items()),
            "rank": f"{self.rank_:,}" if hasattr(self, "rank_") else "",
            "landmarks": f"{rows:,} x {columns:,}{kept}",
            **fitted,
            "precision": str(model.dtype),
            "size": f"{budget.format_bytes(model.nbytes)} in memory",
            "saved as": self._lies_at or "",
        }
        return notebook_display.html_card(
            f"{type(self).__name__}, fitted", repr(model.kernel), {k: v for k, v in facts.items() if v}
        )
