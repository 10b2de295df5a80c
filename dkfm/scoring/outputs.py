"""Outputs of scoring jobs: what they are of, which chunks they have, and the marker that completes them.

An output says which model, input and settings it is of, so that a job goes on with its own and never with another's.
"""

import json
import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dkfm.core.chunking import count_tiles, row_slice
from dkfm.errors import DamagedStoreError, StoreError, StoreExistsError
from dkfm.files.location import Location
from dkfm.scoring.chunk_files import Chunk, OutputColumns, ZarrChunks
from dkfm.scoring.parquet_chunks import ParquetChunks
from dkfm.storage import zarr_schema, zarr_store
from dkfm.storage.output_location import OutputLocation, output_at

PARQUET = "parquet"

Label = str | int | float
"""Of a class."""

_NAME_LENGTH = 100
_MAX_LABEL = 2**64
"""No integer of 64 bits is as large."""


@dataclass(frozen=True)
class Output:
    """What an output is of, as its attributes state.

    Attributes
    ----------
    root : Path or Remote
    columns : tuple of Columns
        Of each head that is scored.
    rows, chunk_rows : int
    dtype : str
        Of what the model computes in.
    model, input, settings : mapping of str to str or None
        Path and digest; name and stamp; what else makes the scores what they are.
    classes : tuple of str, int, float or bool
        What the codes of classes stand for, in their order; of a classifier alone.
    run : str
        The id that its creation gave it; a task of an earlier output at this path has another.
    """

    root: Location
    columns: tuple[OutputColumns, ...]
    rows: int
    chunk_rows: int
    dtype: str
    model: Mapping[str, str]
    input: Mapping[str, str]
    settings: Mapping[str, str | None]
    classes: tuple[Label, ...] = ()
    run: str = ""

    @property
    def place(self) -> OutputLocation:
        """Where it lies."""
        return output_at(self.root)

    @property
    def form(self) -> ParquetChunks | ZarrChunks:
        """How its chunks lie on disk."""
        if self.is_table:
            return ParquetChunks(self.place, self.columns, self.settings.get("id_column"))
        return ZarrChunks(self.place, self.columns, self.chunk_rows)

    @property
    def is_table(self) -> bool:
        """Whether it is a folder of Parquet."""
        return self.settings.get("form") == PARQUET

    @property
    def chunks(self) -> int:
        """How many chunks it has."""
        return count_tiles(self.rows, self.chunk_rows)

    def chunk(self, number: int) -> Chunk:
        """Return one of its chunks."""
        rows = self.slice(number)
        return Chunk(number, rows.stop - rows.start)

    def slice(self, number: int) -> slice:
        """Return the rows of a chunk."""
        return row_slice(number, self.rows, self.chunk_rows)

    def difference(self, other: "Output") -> str | None:
        """Return how another job differs from the one this output is of, in words; None where it is the same."""
        if self.model["digest"] != other.model["digest"]:
            return f"the model is another one than that of {self.model['path']} then"
        if self.input["name"] != other.input["name"]:
            return f"the input is {other.input['name']} and was {self.input['name']}"
        if (self.input["stamp"], self.rows) != (other.input["stamp"], other.rows):
            return f"the input {other.input['name']} has changed since"
        if self.columns != other.columns:
            was, now = (", ".join(columns.output for columns in output.columns) for output in (self, other))
            return f"the output is {now} and was {was}"
        changed = [key for key in other.settings if other.settings[key] != self.settings.get(key)]
        if changed:
            return f"{changed[0]} is {other.settings[changed[0]]!r} and was {self.settings.get(changed[0])!r}"
        return None


def create_output(output: Output, overwrite: bool) -> Output:
    """Make an output without chunks; return it with the id of its creation."""
    output = replace(output, run=uuid.uuid4().hex)
    names = [] if output.is_table else [columns.output for columns in output.columns]
    own = {
        **describe_output(output),
        "kind": "scores",
        "version": zarr_schema.VERSIONS["scores"],
        "arrays": sorted(names),
    }
    if output.is_table:
        own["form"] = PARQUET
    group = json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {"dkfm": own}}).encode()
    described = zarr_schema.TABLE if output.is_table else "zarr.json"
    with output.place.create(described, group, overwrite) as place:
        write_array_metadata(output, place)
    return output


def write_array_metadata(output: Output, place: OutputLocation) -> None:
    """Write the metadata of arrays that have none: of those that other readers of Zarr look for."""
    for columns in [] if output.is_table else output.columns:
        name = f"{columns.output}/zarr.json"
        if name not in place.sizes([name]):
            shape, chunks = (output.rows, columns.width), (output.chunk_rows, columns.width)
            place.put(name, zarr_store.array_metadata(shape, chunks, columns.dtype))


def describe_output(output: Output) -> dict[str, object]:
    """Return the attributes of an output, as JSON."""
    return {
        "outputs": [[columns.output, columns.width, columns.prefix, columns.dtype] for columns in output.columns],
        "classes": list(output.classes),
        "rows": output.rows,
        "chunk_rows": output.chunk_rows,
        "dtype": output.dtype,
        "run": output.run,
        "model": dict(output.model),
        "input": dict(output.input),
        "settings": dict(output.settings),
    }


def find_output(root: Location, *, plain: bool = True) -> Output | None:
    """Return the output at a path or a URL, finished or not; None where nothing is.

    With ``plain=False`` the caller looks at all files itself, and refuses those that are not plain.

    Raises
    ------
    StoreExistsError
        Something else is there.
    """
    own = output_at(root).own_attributes()
    if own is None:
        return None
    if not own:
        raise StoreExistsError(f"{root} holds something that dkfm did not write there; it was left untouched.")
    if own["kind"] != "scores":
        raise StoreExistsError(f"{root} holds a dkfm {own['kind']} store; choose another path.")
    return read_output(root, plain=plain)


def read_output(root: Location, *, plain: bool = True) -> Output:
    """Read what an output is of, finished or not.

    Raises
    ------
    StoreError
        Not an output, or one whose attributes and arrays do not fit each other.
    """
    place = output_at(root)
    own = place.attributes()
    if plain:
        place.require_plain()
    try:
        output = _of_attributes(root, own)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedStoreError(f"The attributes of {root} are not what dkfm writes ({error}).") from None
    for columns in [] if output.is_table else output.columns:
        info = place.array(columns.output)
        if info is None:
            continue  # a claim at a URL that was not followed by it: `write_array_metadata` mends that
        expected = (output.rows, columns.width), (output.chunk_rows, columns.width), columns.dtype
        if (info.shape, info.chunks, info.dtype) != expected:
            raise DamagedStoreError(f"The array {columns.output} of {root} is not what its attributes tell.")
    return output


def _of_attributes(root: Location, own: Mapping[str, Any]) -> Output:
    columns = tuple(_columns(*some) for some in own["outputs"])
    settings = {_text(key): None if value is None else _text(value) for key, value in own["settings"].items()}
    _require_settings(settings)
    model, given = ({key: _text(own[part][key]) for key in keys} for part, keys in _TEXTS.items())
    rows, chunk_rows = _count(own["rows"]), _count(own["chunk_rows"])
    dtypes, precision = {some.dtype for some in columns}, _text(own["dtype"])
    if precision not in ("float64", "float32") or not dtypes <= {precision, "int64"} or not dtypes or chunk_rows > rows:
        raise ValueError("a size or a type")
    if len({some.output for some in columns}) != len(columns):
        raise ValueError("an output that stands twice")
    if (settings.get("form") == PARQUET) != (own.get("form") == PARQUET):
        raise ValueError("its form")
    classes = tuple(map(_label, own["classes"]))
    return Output(root, columns, rows, chunk_rows, precision, model, given, settings, classes, _text(own["run"]))


_TEXTS = {"model": ("path", "digest"), "input": ("name", "stamp")}


def _require_settings(settings: Mapping[str, str | None]) -> None:
    """Raise unless the settings that are used, and not only compared, are what they must be."""
    columns = json.loads(settings.get("columns") or "[]")
    if not isinstance(columns, list) or not all(isinstance(name, str) for name in columns):
        raise ValueError("the columns of its input")
    if settings.get("on_invalid") not in ("raise", "nan") or settings.get("form") not in (None, PARQUET):
        raise ValueError("a setting")


def _text(value: object) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise TypeError("a text")
    return value


def _columns(name: object, width: object, prefix: object, dtype: object) -> OutputColumns:
    return OutputColumns(_name(name), _count(width), _text(prefix), _text(dtype))


def _label(value: object) -> Label:
    if not isinstance(value, str | int | float):
        raise TypeError("a class")
    if not (isinstance(value, str) or (isinstance(value, float) and math.isfinite(value)) or abs(value) < _MAX_LABEL):
        raise ValueError("a class")
    return value


def _name(value: object) -> str:
    name = _text(value)
    if not name.isidentifier() or len(name) > _NAME_LENGTH:
        raise ValueError("the name of an output")
    return name


def _count(value: object) -> int:
    if type(value) is not int or not 0 < value < 2**48:
        raise ValueError("a number")
    return value


def require_same_job(found: Output, wanted: Output) -> None:
    """Raise, naming what changed, unless an output is of the job that is wanted."""
    what = found.difference(wanted)
    if what is not None:
        state = "a complete output" if found.place.sizes([zarr_schema.MARKER]) else "an unfinished output"
        raise StoreExistsError(
            f"{found.root} holds {state} of another job: {what}; choose another path, or replace it with "
            "overwrite=True (--overwrite)."
        )


def require_run(root: Location, run: str) -> None:
    """Raise unless an output is still the one that a task is of."""
    if output_at(root).attributes().get("run") != run:
        raise StoreError(f"{root} was replaced by another run while this one worked.")
