"""Names of columns between two models: what one of them returns, and what the other was fitted to."""

from collections.abc import Sequence
from typing import cast

from dkfm.core.frames import format_names
from dkfm.core.rows import Array
from dkfm.errors import InvalidInputError


def select_fitted_columns(model: object, F: Array) -> object:
    """Return rows as a model wants them that was fitted to a data frame: with its names of columns."""
    names = getattr(model, "feature_names_in_", None)
    if names is None or len(names) != F.shape[1]:
        return F
    import pandas as pd

    return pd.DataFrame(F, columns=names)


def require_column_order(names: Sequence[str] | None, own: Sequence[str], what: str) -> None:
    """Raise where columns have names of a model's outputs and are not these outputs in their order.

    Names of the user's own say nothing about the order, and are not compared.
    """
    if names is None or not set(names) & set(own) or list(names) == list(own):
        return
    place = next((at for at, (a, b) in enumerate(zip(names, own, strict=False)) if a != b), min(len(names), len(own)))
    found, wanted = (cast("Sequence[str]", [*given, "nothing"])[place] for given in (names, own))
    raise InvalidInputError(
        f"{what} must have the columns that transform returns, in order: column {place} is {wanted!r:.100} there, "
        f"and here {found!r:.100}."
    )


def require_fitted_columns(model: object, names: Sequence[str] | None) -> None:
    """Raise where columns have other names than those that a model was fitted to, or another order."""
    seen = getattr(model, "feature_names_in_", None)
    if seen is not None and names is not None and list(seen) != list(names):
        raise InvalidInputError(
            f"X has {format_names(names)} and the {type(model).__name__} was fitted to {format_names(list(seen))}, "
            "in order."
        )
