"""Choose and check the columns of Parquet files: those with numbers, and one with ids or labels."""

from collections.abc import Sequence

from dkfm.core.display.quantities import format_names
from dkfm.core.frames import describe_known_names, require_unique_names
from dkfm.errors import InvalidInputError, MissingExtraError
from dkfm.files.location import Location

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyarrow import compute, types
except ImportError as error:
    raise MissingExtraError("Parquet files need pyarrow; install it with pip install 'dkfm[dataframe]'.") from error

__all__ = [  # listed, because other modules import pyarrow from here
    "compute",
    "default_columns",
    "dictionary_decode_ids",
    "id_value_type",
    "is_text",
    "pa",
    "pq",
    "require_ids",
    "require_numbers",
    "types",
]

_MAX_TYPES = 3
"""Largest number of types that a message names."""


def default_columns(schema: "pa.Schema", hidden: Sequence[str | None]) -> tuple[str, ...]:
    """Return all columns but those hidden and the index of a data frame, which pandas does not count as a column."""
    left_out = {*hidden, *_index_columns(schema)}
    return tuple(name for name in schema.names if name not in left_out)


def _index_columns(schema: "pa.Schema") -> list[str]:
    return [name for name in _read_index_metadata(schema) if isinstance(name, str)]


def _read_index_metadata(schema: "pa.Schema") -> list[object]:
    """Return what pandas stored of its index: names of columns, or a dict for a range."""
    try:
        index_columns = schema.pandas_metadata["index_columns"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []  # not written by pandas, or its metadata are not valid JSON
    return index_columns if isinstance(index_columns, list) else []


def require_numbers(schema: "pa.Schema", columns: tuple[str, ...], path: Location, may_be_empty: bool) -> bool:
    """Raise an error unless each column occurs once and has numbers, or nulls alone; return whether all are float32."""
    require_unique_names(schema.names, f"{path} has")
    column_types = {field.name: field.type for field in schema}
    if missing := [name for name in columns if name not in column_types]:
        is_key = any(f"/{name}=" in str(path) for name in missing)
        hint = " (keys of folders are no features, but may be the id_column)" if is_key else ""
        known = describe_known_names(missing, schema.names)
        raise InvalidInputError(f"{path} has no {format_names(missing)}{hint}; {known}.")
    if wrong := [name for name in columns if not _is_number(column_types[name], may_be_empty)]:
        raise InvalidInputError(
            f"{path} has {_format_types({name: column_types[name] for name in wrong})}, and features are numbers or "
            "booleans; leave such columns out (columns=, --columns; for fit in Python, give a data frame), or name ids "
            "(id_column=, --id-column); dkfm fit and dkfm compare also have --exclude-columns and --label-column."
        )
    return all(types.is_float32(column_types[name]) for name in columns)


def _format_types(column_types: "dict[str, pa.DataType]") -> str:
    """Return columns with their types for a message, at most three types."""
    names: dict[str, list[str]] = {}
    for name, dtype in column_types.items():
        names.setdefault(str(dtype), []).append(name)
    shown = [f"{format_names(same)} of type {dtype:.100}" for dtype, same in list(names.items())[:_MAX_TYPES]]
    return " and ".join([*shown, *["others"] * (len(names) > _MAX_TYPES)])


def _is_number(dtype: "pa.DataType", may_be_empty: bool) -> bool:
    kinds = types.is_integer, types.is_floating, types.is_boolean, types.is_decimal
    return any(is_kind(dtype) for is_kind in kinds) or (may_be_empty and types.is_null(dtype))


def require_ids(
    schema: "pa.Schema", first_schema: "pa.Schema", id_column: str | None, path: Location | str
) -> "pa.DataType | None":
    """Raise an InvalidInputError unless the id column exists, and all files have one plain type or text; return it."""
    if id_column is None:
        return None
    if id_column not in schema.names:
        known = describe_known_names([id_column], schema.names)
        if any(isinstance(index, dict) and index.get("name") == id_column for index in _read_index_metadata(schema)):
            known = "pandas keeps this index as a range without a column, so write it again after frame.reset_index()"
        raise InvalidInputError(f"{path} has no {format_names([id_column])} for ids or labels; {known}.")
    require_unique_names(schema.names, f"{path} has")
    dtype, expected = id_value_type(schema, id_column), id_value_type(first_schema, id_column)
    is_plain = not (types.is_nested(dtype) or types.is_dictionary(dtype) or isinstance(dtype, pa.BaseExtensionType))
    if not is_plain or dtype in (pa.time64("ns"), pa.month_day_nano_interval()):  # pandas has no such values
        raise InvalidInputError(
            f"The column {id_column!r} of {path} holds {dtype!s:.100}, and must hold plain numbers, text or times "
            "(times of day in microseconds at most)."
        )
    if dtype != expected and not (is_text(dtype) and is_text(expected)):
        raise InvalidInputError(
            f"The column {id_column!r} of {path} holds {dtype!s:.100}, and that of the first file {expected!s:.100}; "
            "ids and labels are of one type in all files: cast them, and write that file again."
        )
    return dtype


def is_text(dtype: "pa.DataType") -> bool:
    """Return whether a type is one of Arrow's types of text."""
    return any(is_kind(dtype) for is_kind in (types.is_string, types.is_large_string, types.is_string_view))


def id_value_type(schema: "pa.Schema", id_column: str) -> "pa.DataType":
    """Return the type of ids, of categories that of their values."""
    dtype = schema.field(id_column).type
    return dtype.value_type if types.is_dictionary(dtype) else dtype


def dictionary_decode_ids(ids: "pa.Array") -> "pa.Array":
    """Return ids as plain values: categories, which Arrow calls a dictionary, are decoded."""
    return ids.dictionary_decode() if types.is_dictionary(ids.type) else ids
