"""Create, describe and find the outputs of scoring jobs.

The attributes of an output name its model, input and settings, so that a job resumes only an output of its own.
"""

import json
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dkfm.core.chunking import count_tiles, row_slice
from dkfm.errors import DamagedStoreError, StoreError, StoreExistsError
from dkfm.files.location import Location
from dkfm.numerics.links import name_class_columns
from dkfm.scoring.formats.chunk_files import Chunk, OutputColumns
from dkfm.scoring.formats.id_array import DTYPES, MAX_TEXT_ROWS, IdArray
from dkfm.scoring.formats.label_column import Label, is_parquet_text
from dkfm.scoring.formats.parquet_chunks import ParquetChunks
from dkfm.scoring.formats.zarr_chunks import ZarrChunks
from dkfm.sources.parquet_files.journal import FileStat, write_file_stats
from dkfm.storage import own_files, store_metadata, zarr_store
from dkfm.storage.model_store import Record, are_labels
from dkfm.storage.output_files import OutputLocation, output_at

PARQUET = "parquet"
"""Value of the setting `form` for a folder of Parquet files."""

LABELS = "labels"
"""Value of the setting `predictions` if Parquet files have labels in place of the codes of classes."""

ArrayLayout = tuple[tuple[int, ...], tuple[int, ...], str]
"""Shape, shape of chunks and dtype of an array."""

_OTHER_CLASSES = "its classes are not those of the model"
_WITHOUT_LABELS = "it has no labels of classes, as in earlier versions"
"""Differences from a requested output that no setting removes."""

_MAX_NAME_LENGTH = 100
"""Longest name of an array, in bytes."""

_MAX_TABLE_COLUMNS = 2**20
"""Largest number of columns of a table; a Zarr store has metadata with which the width of an output is compared."""

_MAX_LABEL = 2**64
"""Integer labels are smaller than this."""


@dataclass(frozen=True)
class Output:
    """Description of an output, as in its attributes."""

    root: Location
    """Folder or prefix of the output."""
    columns: tuple[OutputColumns, ...]
    """Columns of each head that is scored."""
    rows: int
    """Number of rows."""
    chunk_rows: int
    """Rows of a chunk."""
    compute_dtype: str
    """Dtype in which the model computes."""
    model: Mapping[str, str]
    """Path and digest of the model."""
    input: Mapping[str, str]
    """Name and stamp of the input."""
    settings: Mapping[str, str | None]
    """All other settings on which the scores depend."""
    classes: tuple[Label, ...] = ()
    """Labels of the classes, in the order of their codes; empty unless the model is a classifier."""
    creation_id: str = ""
    """Unique id of the output; an output that replaces this one has another id."""

    @property
    def output_location(self) -> OutputLocation:
        """Location of the files."""
        return output_at(self.root)

    @property
    def format(self) -> ParquetChunks | ZarrChunks:
        """Format of the chunks on disk."""
        if self.is_table:
            classes = self.classes if self.settings.get("predictions") == LABELS else ()
            return ParquetChunks(self.output_location, self.columns, self.settings.get("id_column"), classes)
        return ZarrChunks(self.output_location, self.columns, self.chunk_rows, self.ids)

    @property
    def ids(self) -> IdArray | None:
        """The array of ids of a Zarr output; None if it has none."""
        name, dtype = self.settings.get("id_column"), self.settings.get("id_dtype")
        return None if name is None or dtype is None else IdArray(name, dtype, self.chunk_rows)

    @property
    def array_layouts(self) -> dict[str, ArrayLayout]:
        """Layout of each array of a Zarr output by its name; empty for a table."""
        if self.is_table:
            return {}
        layouts: dict[str, ArrayLayout] = {
            entry.output: ((self.rows, entry.width), (self.chunk_rows, entry.width), entry.dtype)
            for entry in self.columns
        }
        if self.ids is not None:
            layouts[self.ids.name] = (self.rows,), (self.chunk_rows,), self.ids.dtype
        return layouts

    @property
    def is_table(self) -> bool:
        """Whether the output is a folder of Parquet files."""
        return self.settings.get("form") == PARQUET

    @property
    def n_chunks(self) -> int:
        """Number of chunks."""
        return count_tiles(self.rows, self.chunk_rows)

    def chunk(self, number: int) -> Chunk:
        """Return one chunk."""
        rows = self.chunk_slice(number)
        return Chunk(number, rows.stop - rows.start)

    def chunk_slice(self, number: int) -> slice:
        """Return the rows of one chunk."""
        return row_slice(number, self.rows, self.chunk_rows)

    @property
    def has_marker(self) -> bool:
        """Whether the output is finished: it has its marker."""
        return bool(self.output_location.find_file_sizes([store_metadata.MARKER]))

    def describe_difference(self, other: "Output") -> str | None:
        """Return, in words, how the job of another output differs from that of this one; None if it is the same."""
        if self.model["digest"] != other.model["digest"]:
            return f"it was written with another model, that of {self.model['path']}"
        if self.input["name"] != other.input["name"]:
            return f"the input is {other.input['name']} and was {self.input['name']}"
        if (self.input["stamp"], self.rows) != (other.input["stamp"], other.rows):
            return f"the input {other.input['name']} has changed since"
        if self.classes != other.classes:
            return _OTHER_CLASSES
        if self.columns != other.columns:
            was, now = (", ".join(columns.output for columns in output.columns) for output in (self, other))
            return _WITHOUT_LABELS if was == now else f"the output is {now} and was {was}"
        return self._describe_other_setting(other.settings)

    def _describe_other_setting(self, others: Mapping[str, str | None]) -> str | None:
        """Return, in words, the first setting that differs from those of another output; None if none does."""
        changed = [key for key in others if others[key] != self.settings.get(key)]
        if "id_column" in changed:
            was, now = self.settings.get("id_column"), others["id_column"]
            given = "no id_column (--id-column) is given" if now is None else f"id_column (--id-column) is {now!r}"
            return f"{given}, and {'none' if was is None else repr(was)} was given when it was written"
        if "predictions" in changed:
            return _WITHOUT_LABELS
        if changed:
            return f"{changed[0]} is {others[changed[0]]} and was {self.settings.get(changed[0])}"
        return None


def name_columns(record: Record, output: str, is_table: bool) -> tuple[str, ...]:
    """Return the names of the targets, or in a table of the classes, that the columns of an output stand for."""
    if output == "predict" and len(record.target_names) > 1:
        return record.target_names
    return name_class_columns(output, record.model.heads[output].width, record.classes) if is_table else ()


def create_output(output: Output, overwrite: bool, files: Sequence[FileStat] = ()) -> Output:
    """Create an output without chunks, and note the files of its input if there are any; return it with its new id."""
    output = replace(output, creation_id=uuid.uuid4().hex)
    with output.output_location.create_output(*_encode_description(output), overwrite) as location:
        ensure_arrays(output, location)
        write_file_stats(location, output.creation_id, files)
    return output


def replace_description(output: Output) -> None:
    """Replace the attributes of an unfinished output in one step, and then the metadata of its arrays.

    If the process is killed between the two, `ensure_arrays` completes the metadata.
    """
    output.output_location.write_file(*_encode_description(output))
    ensure_arrays(output, output.output_location)


def _encode_description(output: Output) -> tuple[str, bytes]:
    """Return the name and the content of the file that describes an output."""
    names, version = sorted(output.array_layouts), store_metadata.VERSIONS["scores"]
    own = {**describe_output(output), "kind": "scores", "version": version, "arrays": names}
    if output.is_table:
        own["form"] = PARQUET
    attributes = {"dkfm": own} if output.ids is None else {"dkfm": own, "coordinates": output.ids.name}
    metadata: dict[str, object] = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
    if not output.is_table:
        arrays = {name: json.loads(_encode_array(name, layout)) for name, layout in output.array_layouts.items()}
        metadata["consolidated_metadata"] = store_metadata.make_consolidated_metadata(arrays)
    return store_metadata.TABLE_ATTRIBUTES if output.is_table else "zarr.json", json.dumps(metadata).encode()


def ensure_arrays(output: Output, location: OutputLocation) -> None:
    """Write missing or outdated metadata of arrays, as after a kill, and create the folders of their chunks.

    Other readers of Zarr need the metadata. The folders are made durable here once, so that no chunk has to.
    """
    for array, layout in output.array_layouts.items():
        name = f"{array}/zarr.json"
        exists = name in location.find_file_sizes([name])
        if not exists or _read_layout(location, array) != layout:
            location.write_file(name, _encode_array(array, layout))
    for name in output.format.folder_names:
        location.make_folder(name)


def _encode_array(name: str, layout: ArrayLayout) -> bytes:
    """Return the metadata of an array, whose dimensions are ``row`` and, for a head h, ``h_column``."""
    shape, chunks, dtype = layout
    return zarr_store.encode_array_metadata(shape, chunks, dtype, ("row", f"{name}_column")[: len(shape)])


def _read_layout(location: OutputLocation, name: str) -> ArrayLayout | None:
    """Return the layout in the metadata of an array; in an unfinished output it may be an older one."""
    info = location.read_array_info(name)
    return None if info is None else (info.shape, info.chunks, info.dtype_name)


def describe_output(output: Output) -> dict[str, object]:
    """Return the attributes of an output, ready for JSON."""
    return {
        "outputs": [_describe_columns(columns) for columns in output.columns],
        "classes": list(output.classes),
        "rows": output.rows,
        "chunk_rows": output.chunk_rows,
        "dtype": output.compute_dtype,
        "run": output.creation_id,
        "model": dict(output.model),
        "input": dict(output.input),
        "settings": dict(output.settings),
    }


def _describe_columns(columns: OutputColumns) -> list[object]:
    labels = [list(columns.labels)] if columns.labels else []
    return [columns.output, columns.width, columns.prefix, columns.dtype, *labels]


def find_output(root: Location, *, check_plain: bool = True) -> Output | None:
    """Return the output at a path or a URL, finished or not; None if nothing is there.

    ``check_plain=False`` leaves it to the caller to check that no file is a link or a special file.

    Raises
    ------
    StoreExistsError
        The path holds something that is not an output of dkfm.
    """
    own = output_at(root).find_own_attributes()
    if own is None:
        return None
    if not own:
        raise own_files.make_foreign_store_error(root)
    if own["kind"] != "scores":
        raise StoreExistsError(f"{root} holds a dkfm {own['kind']} store; choose another path.")
    return read_output(root, check_plain=check_plain)


def read_output(root: Location, *, check_plain: bool = True) -> Output:
    """Read the description of an output, finished or not.

    Raises
    ------
    StoreError
        There is no output, or its attributes and arrays do not match.
    """
    location = output_at(root)
    own = location.read_attributes()
    if check_plain:
        location.require_plain_files()
    try:
        output = _parse_attributes(root, own)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedStoreError(f"The attributes of {root} are not what dkfm writes ({error}).") from None
    for name, layout in output.array_layouts.items():
        found = _read_layout(location, name)
        if found is None:
            continue  # creation at a URL was interrupted after the path was claimed; `ensure_arrays` completes it
        if found != layout and output.has_marker:
            raise DamagedStoreError(f"The array {name} of {root} is not what its attributes tell.")
    return output


def _parse_attributes(root: Location, own: Mapping[str, Any]) -> Output:
    """Return the output that dkfm's own attributes describe; raise an error of Python's if one is not valid."""
    columns = tuple(_parse_columns(*entry) for entry in own["outputs"])
    stored = own["settings"].items()
    settings = {_require_text(key): None if value is None else _require_text(value) for key, value in stored}
    _require_settings(settings)
    model, source = ({key: _require_text(own[part][key]) for key in keys} for part, keys in _TEXTS.items())
    rows, chunk_rows = _require_count(own["rows"]), _require_count(own["chunk_rows"])
    dtypes, precision = {entry.dtype for entry in columns}, _require_text(own["dtype"])
    if precision not in ("float64", "float32") or not dtypes <= {precision, "int64"} or not dtypes or chunk_rows > rows:
        raise ValueError("a size or a type")
    if settings.get("id_dtype") == "string" and chunk_rows > MAX_TEXT_ROWS:
        raise ValueError("a size")
    if own.get("form") == PARQUET and sum(entry.width for entry in columns) > _MAX_TABLE_COLUMNS:
        raise ValueError("a number of columns")
    names = [entry.output for entry in columns]
    if len(set(names)) != len(names) or settings.get("id_column") in names:
        raise ValueError("an output that stands twice")
    if (settings.get("form") == PARQUET) != (own.get("form") == PARQUET):
        raise ValueError("its form")
    classes = tuple(map(_require_label, own["classes"]))
    if settings.get("predictions") == LABELS and not (are_labels(classes) and all(map(is_parquet_text, classes))):
        raise ValueError("a class")
    creation_id = _require_text(own["run"])
    return Output(root, columns, rows, chunk_rows, precision, model, source, settings, classes, creation_id)


_TEXTS = {"model": ("path", "digest"), "input": ("name", "stamp")}
"""Keys of the attributes `model` and `input`, whose values are texts."""


def _require_settings(settings: Mapping[str, str | None]) -> None:
    """Raise a ValueError unless the settings that readers use are valid; the others are only compared."""
    columns = json.loads(settings.get("columns") or "[]")
    if not isinstance(columns, list) or not all(isinstance(name, str) for name in columns):
        raise ValueError("the columns of its input")
    if settings.get("on_invalid") not in ("raise", "nan") or settings.get("form") not in (None, PARQUET):
        raise ValueError("a setting")
    if settings.get("predictions") not in (None, LABELS):
        raise ValueError("a setting")
    if settings.get("form") is None and settings.get("id_column") is not None:
        _require_name(settings["id_column"])
        if settings.get("id_dtype") not in DTYPES:
            raise ValueError("the type of its ids")


def _require_text(value: object) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise TypeError("a text")
    return value


def _parse_columns(
    name: object, width: object, prefix: object, dtype: object, labels: Sequence[object] = ()
) -> OutputColumns:
    names = tuple(map(_require_text, labels))
    if names and not len(set(names)) == len(names) == width:
        raise ValueError("the names of columns")
    return OutputColumns(_require_name(name), _require_count(width), _require_text(prefix), _require_text(dtype), names)


def _require_label(value: object) -> Label:
    if not isinstance(value, str | int | float):
        raise TypeError("a class")
    if not (isinstance(value, str) or (isinstance(value, float) and math.isfinite(value)) or abs(value) < _MAX_LABEL):
        raise ValueError("a class")
    return value


def _require_name(value: object) -> str:
    name = _require_text(value)
    if not is_array_name(name):
        raise ValueError("the name of an output")
    return name


def is_array_name(name: str) -> bool:
    """Return whether a name is valid for an array of an output."""
    return name.isidentifier() and len(name.encode()) <= _MAX_NAME_LENGTH and not name.startswith("_")


def _require_count(value: object) -> int:
    if type(value) is not int or not 0 < value < 2**48:
        raise ValueError("a number")
    return value


def require_same_job(existing: Output, requested: Output, hint: str = "") -> None:
    """Raise a StoreExistsError that names the difference, unless an existing output is of the requested job."""
    difference = existing.describe_difference(requested)
    if difference is not None:
        is_complete = existing.has_marker
        has_same_data = (existing.model["digest"], existing.input) == (requested.model["digest"], requested.input)
        can_go_on = has_same_data and not is_complete and difference not in (_OTHER_CLASSES, _WITHOUT_LABELS)
        state = "a complete" if is_complete else "an unfinished"
        go_on = "give the same settings as before to go on, " if can_go_on else ""
        raise StoreExistsError(
            f"{existing.root} holds {state} output of another job: {difference}{hint}; {go_on}choose another path, or "
            "replace it with overwrite=True (--overwrite)."
        )


def require_not_replaced(root: Location, creation_id: str) -> None:
    """Raise a StoreError if the output was replaced by another, which has another `creation_id`."""
    if output_at(root).read_attributes().get("run") != creation_id:
        raise StoreError(f"{root} was replaced by another run while this one worked.")
