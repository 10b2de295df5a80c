"""Compare the column names that one model returns with those that another was fitted to."""

from collections.abc import Sequence
from typing import cast

from dkfm.core.display.quantities import format_names
from dkfm.core.rows import Array
from dkfm.errors import InvalidInputError


def to_named_frame(model: object, F: Array) -> object:
    """Return features as a data frame with the column names of a model's fit, or as they are if it had none."""
    names = getattr(model, "feature_names_in_", None)
    if names is None or len(names) != F.shape[1]:
        return F
    import pandas as pd

    return pd.DataFrame(F, columns=names)


def require_column_order(names: Sequence[str] | None, output_names: Sequence[str], what: str) -> None:
    """Raise if columns have names of a model's outputs `output_names`, but not all of them in order.

    Names that the user chose do not determine the order, and are not compared.
    """
    if names is None or not set(names) & set(output_names) or list(names) == list(output_names):
        return
    shorter = min(len(names), len(output_names))
    first = next((i for i in range(shorter) if names[i] != output_names[i]), shorter)
    actual, expected = (cast("Sequence[str]", [*columns, "nothing"])[first] for columns in (names, output_names))
    raise InvalidInputError(
        f"{what} must have the columns that transform returns, in order: column {first} is {expected!r:.100} there, "
        f"and here {actual!r:.100}."
    )


def require_fitted_columns(model: object, names: Sequence[str] | None) -> None:
    """Raise if the column names or their order differ from those of a model's fit."""
    fitted = getattr(model, "feature_names_in_", None)
    if fitted is not None and names is not None and list(fitted) != list(names):
        given, expected = format_names(names), format_names(list(fitted))
        raise InvalidInputError(f"X has {given} and the {type(model).__name__} was fitted to {expected}, in order.")
