"""Outputs of scoring jobs: what they are of, which chunks they have, and the marker that completes them.

An output says which model, input and settings it is of, so that a job goes on with its own and never with another's.
"""

import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dkfm import formats, store
from dkfm.chunks import Chunk, Form, ZarrForm, checksum_of
from dkfm.errors import DamagedStoreError, StoreError, StoreExistsError
from dkfm.files import sync_folder, writing
from dkfm.formats import CRC_BYTES
from dkfm.journal import Receipt
from dkfm.tables import Columns, ParquetForm
from dkfm.tiling import count, row_slice

__all__ = [
    "PARQUET",
    "Output",
    "complete",
    "create",
    "find",
    "is_complete",
    "is_sound",
    "lacking",
    "open_complete",
    "read",
    "remove",
    "reopen",
    "require_run",
    "require_same",
    "told",
]

PARQUET = "parquet"

_NAME_LENGTH = 100


@dataclass(frozen=True)
class Output:
    """What an output is of, as its attributes state.

    Attributes
    ----------
    root : Path
    columns : tuple of Columns
        Of each head that is scored.
    rows, chunk_rows : int
    dtype : str
    model, input, settings : mapping of str to str or None
        Path and digest; name and stamp; what else makes the scores what they are.
    run : str
        The id that its creation gave it; a task of an earlier output at this path has another.
    """

    root: Path
    columns: tuple[Columns, ...]
    rows: int
    chunk_rows: int
    dtype: str
    model: Mapping[str, str]
    input: Mapping[str, str]
    settings: Mapping[str, str | None]
    run: str = ""

    @property
    def form(self) -> Form:
        """How its chunks lie on disk."""
        if self.is_table:
            return ParquetForm(self.root, self.columns, self.dtype, self.settings.get("id_column"))
        outputs = tuple((columns.output, columns.width) for columns in self.columns)
        return ZarrForm(self.root, outputs, self.chunk_rows, self.dtype)

    @property
    def is_table(self) -> bool:
        """Whether it is a folder of Parquet."""
        return self.settings.get("form") == PARQUET

    @property
    def chunks(self) -> int:
        """How many chunks it has."""
        return count(self.rows, self.chunk_rows)

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


def create(output: Output, overwrite: bool) -> Output:
    """Make an output without chunks; return it with the id of its creation."""
    about = _about(replace(output, run=uuid.uuid4().hex))
    names = [] if output.is_table else [columns.output for columns in output.columns]
    if output.is_table:
        with store.making_folder(output.root, "scores", overwrite=overwrite) as folder:
            folder.mkdir()
            own = {**about, "kind": "scores", "version": formats.VERSIONS["scores"], "arrays": names, "form": PARQUET}
            group = {"zarr_format": 3, "node_type": "group", "attributes": {"dkfm": own}}
            (folder / formats.TABLE).write_text(json.dumps(group))
    else:
        with store.making(output.root, "scores", about, names, overwrite=overwrite) as made:
            for columns in output.columns:
                width = columns.width
                store.add_array(made, columns.output, (output.rows, width), (output.chunk_rows, width), output.dtype)
    return read(output.root)


def _about(output: Output) -> dict[str, object]:
    """Return the attributes of an output, as JSON."""
    return {
        "outputs": [[columns.output, columns.width, columns.prefix] for columns in output.columns],
        "rows": output.rows,
        "chunk_rows": output.chunk_rows,
        "dtype": output.dtype,
        "run": output.run,
        "model": dict(output.model),
        "input": dict(output.input),
        "settings": dict(output.settings),
    }


def find(root: Path) -> Output | None:
    """Return the output at a path, finished or not; None where nothing is.

    Raises
    ------
    StoreExistsError
        Something else is there.
    """
    if not store.is_taken(root):
        return None
    kind = store.require_own(root)["kind"]
    if kind != "scores":
        raise StoreExistsError(f"{root} holds a dkfm {kind} store; choose another path.")
    return read(root)


def read(root: Path) -> Output:
    """Read what an output is of, finished or not.

    Raises
    ------
    StoreError
        Not an output, or one whose attributes and arrays do not fit each other.
    """
    own = formats.read_group(root, "scores")
    for _ in formats.files(root):
        pass  # it refuses links
    try:
        output = _of_attributes(root, own)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedStoreError(f"The attributes of {root} are not what dkfm writes ({error}).") from None
    for columns in [] if output.is_table else output.columns:
        info = formats.read_array(root / columns.output)
        shape, chunks = (output.rows, columns.width), (output.chunk_rows, columns.width)
        if (info.shape, info.chunks, info.dtype) != (shape, chunks, output.dtype):
            raise DamagedStoreError(f"The array {columns.output} of {root} is not what its attributes tell.")
    return output


def _of_attributes(root: Path, own: Mapping[str, Any]) -> Output:
    columns = tuple(Columns(_name(name), _count(width), _text(prefix)) for name, width, prefix in own["outputs"])
    settings = {_text(key): None if value is None else _text(value) for key, value in own["settings"].items()}
    model, given = ({key: _text(own[part][key]) for key in keys} for part, keys in _TEXTS.items())
    rows, chunk_rows = _count(own["rows"]), _count(own["chunk_rows"])
    if not columns or own["dtype"] not in ("float64", "float32") or chunk_rows > rows:
        raise ValueError("a size or a type")
    if (settings.get("form") == PARQUET) != (own.get("form") == PARQUET):
        raise ValueError("its form")
    return Output(root, columns, rows, chunk_rows, own["dtype"], model, given, settings, _text(own["run"]))


_TEXTS = {"model": ("path", "digest"), "input": ("name", "stamp")}


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("a text")
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


def require_same(found: Output, wanted: Output) -> None:
    """Raise, naming what changed, unless an output is of the job that is wanted."""
    what = found.difference(wanted)
    if what is not None:
        state = "a complete output" if is_complete(found.root) else "an unfinished output"
        raise StoreExistsError(
            f"{found.root} holds {state} of another job: {what}; choose another path, or replace it with "
            "overwrite=True (--overwrite)."
        )


def require_run(root: Path, run: str) -> None:
    """Raise unless an output is still the one that a task is of."""
    if formats.read_group(root, "scores").get("run") != run:
        raise StoreError(f"{root} was replaced by another run while this one worked.")


def is_complete(root: Path) -> bool:
    """Whether an output has its marker."""
    return (root / formats.MARKER).is_file()


def is_sound(output: Output, receipt: Receipt) -> bool:
    """Read the files of a chunk again: whether they are what a receipt of it says."""
    if not 0 <= receipt.chunk < output.chunks or receipt.rows != output.chunk(receipt.chunk).rows:
        return False
    trailer = 0 if output.is_table else CRC_BYTES
    files = output.form.files(receipt.chunk)
    try:
        size = sum(file.stat().st_size for file in files)
        for file, expected in zip(files, receipt.crc32c, strict=True):
            checksum, rest = checksum_of(file, trailer)
            if checksum != expected or (trailer and rest != expected.to_bytes(CRC_BYTES, "little")):
                return False
    except (OSError, ValueError):
        return False
    return size == receipt.bytes


def lacking(output: Output, receipts: Mapping[int, Receipt]) -> list[int]:
    """Return the chunks whose files are not as large as a receipt says; if none, those whose files do not end so."""
    form = output.form

    def has_size(receipt: Receipt) -> bool:
        try:
            return sum(file.stat().st_size for file in form.files(receipt.chunk)) == receipt.bytes
        except OSError:
            return False

    lost = [number for number in range(output.chunks) if not (number in receipts and has_size(receipts[number]))]
    return lost or [
        number
        for number, receipt in receipts.items()
        if not all(form.ends_as(number, file, crc) for file, crc in enumerate(receipt.crc32c))
    ]


def complete(output: Output, receipts: Mapping[int, Receipt]) -> None:
    """Complete an output: its marker has what every chunk must be."""
    require_run(output.root, output.run)
    ordered = [receipts[number] for number in range(output.chunks)]
    columns = [[getattr(receipt, name) for receipt in ordered] for name in _TOLD]
    with writing(output.root):
        store.complete(output.root, {"sum": _sum(output, columns), **dict(zip(_TOLD, columns, strict=True))})


_TOLD = ("crc32c", "invalid_rows", "bytes")


def _sum(output: Output, columns: Sequence[object]) -> str:
    """Return a digest of all that a finished output says of itself."""
    return hashlib.sha256(json.dumps([_about(output), *columns], sort_keys=True).encode()).hexdigest()


def reopen(output: Output) -> None:
    """Take the marker of an output away, before a chunk of it goes."""
    with writing(output.root):
        (output.root / formats.MARKER).unlink(missing_ok=True)
        sync_folder(output.root)


def remove(output: Output, numbers: Sequence[int]) -> None:
    """Remove the files of some chunks, as far as there are any."""
    with writing(output.root):
        for number in numbers:
            for file in output.form.files(number):
                file.unlink(missing_ok=True)


def told(output: Output) -> dict[int, Receipt]:
    """Return what the marker of a finished output says of each chunk.

    Raises
    ------
    StoreError
        Not finished, or with a marker that is not of this output.
    """
    marker = formats.read_marker(output.root)
    columns = [marker.get(name) for name in _TOLD]
    files = len(output.form.files(0))
    whole = all(isinstance(column, list) and len(column) == output.chunks for column in columns)
    if not whole or marker.get("sum") != _sum(output, columns):
        raise DamagedStoreError(f"The marker of {output.root} is not the one of its {output.chunks} chunks and rows.")
    try:
        return {
            number: _of_marker(output.chunk(number), files, *row)
            for number, row in enumerate(zip(*columns, strict=True))
        }
    except (TypeError, ValueError):
        raise DamagedStoreError(f"The marker of {output.root} has no receipts that dkfm writes.") from None


def _of_marker(chunk: Chunk, files: int, crc32c: Sequence[int], invalid: int, size: int) -> Receipt:
    numbers = [*crc32c, invalid, size]
    if len(crc32c) != files or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("A receipt has numbers.")
    return Receipt(chunk.number, chunk.rows, invalid, tuple(crc32c), size)


def open_complete(root: Path) -> tuple[Output, dict[int, Receipt]]:
    """Open a finished output, all chunks of which are there as far as a look at the ends of their files tells.

    Raises
    ------
    StoreError
        Not an output, not finished, or a chunk lost or cut short.
    """
    output = read(root)
    receipts = told(output)
    for columns in [] if output.is_table else output.columns:
        formats.require_chunks(root / columns.output, formats.read_array(root / columns.output))
    lost = lacking(output, receipts)
    if lost:
        raise DamagedStoreError(f"Chunk {lost[0]} of {root} is lost, or is not the one of its receipt.")
    return output, receipts
