"""What dkfm accepts from a store, decided from its metadata alone, before anything of it is opened or read.

Promises: nothing is unpickled, no codec outside the list runs; in a store of dkfm's own format no link is followed and
no array is larger than its files. A stranger's store is data, not code.
"""

import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path

from dkfm.core.chunking import count_tiles
from dkfm.errors import DamagedStoreError, IncompleteStoreError, StoreError, UnsupportedStoreError
from dkfm.files.local import is_partial
from dkfm.storage import json_documents, zarr_codecs
from dkfm.storage.zarr_codecs import CRC_BYTES, axis_lengths

VERSIONS = {"gram": 1, "model": 2, "rows": 1, "scores": 3}
"""The newest layout of each kind of store; this version reads these and writes these."""

MARKER = "_COMPLETE"
"""Written last: a store without it is not finished."""

_MAX_MARKER = 2**26
_MAX_BYTES, _MAX_CHUNK_BYTES, _MAX_ROW_CHUNKS = 2**50, 2**33, 2**14
"""Of a user's input: all of it, one chunk or one row of it, and chunks side by side."""

JOURNAL = "_journal"
"""The folder of an output's receipts while it is made."""

TABLE = "_dkfm.json"
"""What dkfm says of an output that is a folder of Parquet, whose readers pass over names like that."""

_OWN_CODECS = [("bytes", {"endian": "little"}), ("crc32c", {})]
_TYPES = {"float64": 8, "float32": 4, "int64": 8}
_FILLS: dict[str, object] = {"float64": "NaN", "float32": "NaN", "int64": -1}
"""What no value of dkfm's is: a lost chunk never reads as data."""

_SOURCE_TYPES = {
    **_TYPES,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "uint32": 4,
    "uint64": 8,
    "bool": 1,
}
_FIELDS = {
    *("zarr_format", "node_type", "shape", "data_type", "chunk_grid", "chunk_key_encoding", "fill_value", "codecs"),
    *("attributes", "storage_transformers", "dimension_names"),
}
_SEGMENT = re.compile(r"[0-9a-f]{32}-[0-9]{6,}\.json")
_PART = re.compile(r"part-[0-9]{5,}\.parquet")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


@dataclass(frozen=True)
class ArrayInfo:
    """Shape, chunk shape and dtype of an array, as its metadata states them."""

    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: str
    trailer: int | None = CRC_BYTES
    """Bytes of a checksum after the values of a chunk in its file, or 0; None where a file is not plain values."""

    @property
    def chunk_file_bytes(self) -> int:
        """Bytes of every chunk file of an array that dkfm wrote: chunks are whole and not compressed."""
        return prod(self.chunks) * _TYPES[self.dtype] + CRC_BYTES

    @property
    def grid(self) -> tuple[int, ...]:
        """Chunks along each axis."""
        return tuple(count_tiles(length, chunk) for length, chunk in zip(self.shape, self.chunks, strict=True))

    def chunk_names(self) -> Iterator[str]:
        """Yield the file name of every chunk, relative to the array."""
        return ("/".join(["c", *map(str, place)]) for place in product(*map(range, self.grid)))


def list_files(root: Path) -> Iterator[str]:
    """Yield the path of each file below `root`, relative to it; refuse links and whatever is not a plain file."""
    folders = [""]
    while folders:
        folder = folders.pop()
        for entry in _entries(root / folder):
            if is_partial(entry.name):
                continue  # what a writer is at, or a killed one left; no reader sees it
            relative = folder + entry.name
            if entry.is_dir(follow_symlinks=False):
                folders.append(f"{relative}/")
            elif not entry.is_file(follow_symlinks=False):
                raise UnsupportedStoreError(f"{root} holds {relative}, which is a link or not a plain file.")
            else:
                yield relative


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise StoreError(f"{folder} cannot be read: {error.strerror}.") from None


def status_within(root: Path, file: Path) -> os.stat_result | None:
    """Return what the file system says of a file of a user's input, None where there is nothing.

    Raises
    ------
    StoreError
        It is not a plain file, or links lead out of the input, or to nothing.
    """
    try:
        status = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        if os.path.lexists(file):
            raise DamagedStoreError(f"{file} is a link to nothing.") from None
        return None
    except OSError as error:
        raise StoreError(f"{file} cannot be read: {error.strerror}.") from None
    if not stat.S_ISREG(status.st_mode):
        raise UnsupportedStoreError(f"{file} is not a plain file.")
    if not Path(os.path.realpath(file)).is_relative_to(os.path.realpath(root)):
        raise UnsupportedStoreError(f"{file} is a link out of {root}; copy what it leads to into its place.")
    return status


def is_segment_name(name: str) -> bool:
    """Whether a file has the name of a segment of a journal."""
    return _SEGMENT.fullmatch(name) is not None


def is_chunk_name(name: str) -> bool:
    """Whether a file has the name of a chunk's, of an array or of a table."""
    return "/c/" in name or is_table_file_name(name)


def is_table_file_name(name: str) -> bool:
    """Whether a file has the name of a chunk of a table."""
    return _PART.fullmatch(name) is not None


def read_group(root: Path, kind: str | None = None) -> dict[str, object]:
    """Return dkfm's own attributes of a store, checked for kind and version.

    Parameters
    ----------
    root : Path
    kind : str, optional
        "gram", "model", "rows" or "scores"; any of them without it.

    Raises
    ------
    UnsupportedStoreError
        Not a store of dkfm's, of another kind, or newer than this version.
    """
    if not root.is_dir():
        raise StoreError(f"{root} is not a store: {'a file' if root.exists() else 'nothing'} is there.")
    described = root / TABLE if (root / TABLE).is_file() and not (root / "zarr.json").exists() else root / "zarr.json"
    if _is_link(described):
        raise UnsupportedStoreError(f"{root} is refused: its metadata are a link.")
    return group_attributes(json_documents.read_json(described), root, kind)


def group_attributes(metadata: Mapping[str, object], root: object, kind: str | None = None) -> dict[str, object]:
    """Return dkfm's own attributes in a group's metadata, checked as `read_group` does; `root` is for messages."""
    attributes = metadata.get("attributes")
    own = attributes.get("dkfm") if isinstance(attributes, Mapping) else None
    if (
        set(metadata) - {"attributes", "zarr_format", "node_type", "consolidated_metadata"}
        or metadata.get("zarr_format") != 3
        or metadata.get("node_type") != "group"
        or metadata.get("consolidated_metadata") is not None
        or not isinstance(own, dict)
        or not isinstance(own.get("kind"), str)
        or own["kind"] not in VERSIONS
    ):
        raise UnsupportedStoreError(f"{root} is not a store that dkfm wrote.")
    if kind is not None and own["kind"] != kind:
        raise UnsupportedStoreError(f"{root} is a dkfm {own['kind']} store, and a {kind} store is needed.")
    newest = VERSIONS[own["kind"]]
    if type(own.get("version")) is not int or own["version"] != newest:
        raise UnsupportedStoreError(
            f"{root} has format {own.get('version')!r:.20} of a dkfm {own['kind']} store and this version reads format "
            f"{newest}; install the dkfm that wrote it."
        )
    return own


def read_array(path: Path, *, source: bool = False) -> ArrayInfo:
    """Return what an array's metadata state, once every field of them is one that dkfm accepts.

    Parameters
    ----------
    path : Path
        The array's folder.
    source : bool
        Whether it is a user's input, for which compressed chunks and more dtypes are accepted.
    """
    if not source and (_is_link(path) or _is_link(path / "zarr.json")):
        raise UnsupportedStoreError(f"The array {path} is refused: it is a link.")
    return array_info(json_documents.read_json(path / "zarr.json"), path, source=source)


def read_source(path: Path) -> tuple[dict[str, object], ArrayInfo]:
    """Return the metadata of an array of a user's input, and what they state, as `read_array` does."""
    status_within(path, path / "zarr.json")
    metadata = json_documents.read_json(path / "zarr.json")
    return metadata, array_info(metadata, path, source=True)


def array_info(metadata: dict[str, object], path: object, *, source: bool = False) -> ArrayInfo:
    """Return what an array's metadata state, checked as `read_array` does; `path` is for messages."""
    shape, chunks = axis_lengths(metadata.get("shape")), axis_lengths(_inner(metadata, "chunk_grid", "chunk_shape"))
    known, dtype = _SOURCE_TYPES if source else _TYPES, metadata.get("data_type")
    refusal = None
    if type(metadata.get("zarr_format")) is not int or (metadata["zarr_format"], metadata.get("node_type")) != (
        3,
        "array",
    ):
        refusal = "it is not a Zarr version 3 array"
    elif not isinstance(dtype, str) or dtype not in known:
        refusal = f"its data type is {dtype!r:.100}"
    elif shape is None or chunks is None or len(shape) != len(chunks) or 0 in chunks:
        refusal = "its shape and chunks are not those of a regular grid"
    elif metadata.get("storage_transformers") not in (None, []):
        refusal = "it has storage transformers"
    elif not (zarr_codecs.is_supported(metadata.get("codecs"), chunks) if source else _named(metadata) == _OWN_CODECS):
        refusal = f"its codecs are not ones that dkfm reads: {metadata.get('codecs')!r:.200}"
    elif source:
        refusal = _too_large(shape, chunks, known[dtype]) or _unknown_keys(metadata)
    elif not _is_own_layout(metadata, shape, chunks):
        refusal = "its fill value, chunks or chunk keys are not those that dkfm writes"
    if refusal is not None:
        raise UnsupportedStoreError(f"The array {path} is refused: {refusal}.")
    assert shape is not None and chunks is not None  # noqa: S101, PT018  # checked above; this tells the type checker
    return ArrayInfo(shape, chunks, str(dtype), _trailer(metadata))


def _too_large(shape: tuple[int, ...], chunks: tuple[int, ...], item: int) -> str | None:
    """Say which part of a user's input is more than anybody has, with both numbers."""
    across = prod(count_tiles(length, chunk) for length, chunk in zip(shape[1:], chunks[1:], strict=True))
    for what, size, most in (
        ("it has", item * prod(shape), _MAX_BYTES),
        ("one chunk of it has", item * prod(chunks), _MAX_CHUNK_BYTES),
        ("one row of it has", 8 * prod(shape[1:]), _MAX_CHUNK_BYTES),
    ):
        if size > most:
            return f"{what} {size} bytes, and at most {most} are read"
    return (
        None
        if across <= _MAX_ROW_CHUNKS
        else f"one row of it lies in {across} chunks, and at most {_MAX_ROW_CHUNKS} are read"
    )


def _unknown_keys(metadata: Mapping[str, object]) -> str | None:
    encoding = metadata.get("chunk_key_encoding")
    known = isinstance(encoding, Mapping) and encoding.get("name") in ("default", "v2")
    separator = zarr_codecs.codec_configuration([encoding], 0).get("separator", "/")
    return None if known and separator in ("/", ".") else "its chunk keys are not those of Zarr"


def _trailer(metadata: Mapping[str, object]) -> int | None:
    fill = metadata.get("fill_value")
    number = isinstance(fill, int | float) or fill in ("NaN", "Infinity", "-Infinity")
    usual = set(metadata) <= _FIELDS and number and metadata.get("dimension_names") is None
    by_folders = usual and _inner(metadata, "chunk_key_encoding", "separator") == "/"
    plain = next((n for n in (1, 2) if by_folders and _named(metadata) == _OWN_CODECS[:n]), None)
    return None if plain is None else CRC_BYTES * (plain - 1)


def _is_own_layout(metadata: Mapping[str, object], shape: tuple[int, ...], chunks: tuple[int, ...]) -> bool:
    return (
        set(metadata) <= _FIELDS
        and metadata.get("fill_value") == _FILLS[str(metadata["data_type"])]
        and metadata.get("chunk_grid") == {"name": "regular", "configuration": {"chunk_shape": list(chunks)}}
        and metadata.get("chunk_key_encoding") == {"name": "default", "configuration": {"separator": "/"}}
        and metadata.get("attributes") in (None, {})
        and metadata.get("dimension_names") is None
        and all(chunk <= max(1, length) for chunk, length in zip(chunks, shape, strict=True))
    )


def _is_link(path: Path) -> bool:
    try:
        return path.is_symlink()
    except OSError:
        return False  # nothing that can be opened either, which is told then


def _inner(metadata: Mapping[str, object], key: str, inner: str) -> object:
    part = metadata.get(key)
    expected = {"chunk_grid": "regular", "chunk_key_encoding": "default"}[key]
    named = isinstance(part, Mapping) and part.get("name") == expected
    return zarr_codecs.codec_configuration([part], 0).get(inner) if named else None


def _named(metadata: Mapping[str, object]) -> list[tuple[str, Mapping[str, object]]]:
    chain = metadata.get("codecs")
    return [
        (name, zarr_codecs.codec_configuration(chain, at))
        for at, name in enumerate(zarr_codecs.codec_names(chain) or [])
    ]


def require_name(root: Path, name: object) -> str:
    """Return the name of an array within a store, or raise where it may lead elsewhere."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UnsupportedStoreError(f"{root} names an array {name!r:.100}.")
    return name


def require_chunks(path: Path, info: ArrayInfo) -> None:
    """Raise unless every chunk file of one of dkfm's own arrays is there with its exact size."""
    present = sum(1 for name in list_files(path) if name != "zarr.json")
    if present != prod(info.grid):  # told first: a stranger's shape may have more chunks than there are numbers
        raise DamagedStoreError(f"{path} has {present} chunks and must have {prod(info.grid)}.")
    for name in info.chunk_names():
        try:
            size = (path / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            raise DamagedStoreError(f"{path} has lost its chunk {name}.") from None
        if size != info.chunk_file_bytes:
            raise DamagedStoreError(
                f"The chunk {name} of {path} has {size} bytes and must have {info.chunk_file_bytes}."
            )


def read_marker(root: Path) -> dict[str, object]:
    """Return the content of the completion marker."""
    if _is_link(root / MARKER) or not (root / MARKER).is_file():
        raise IncompleteStoreError(f"{root} has no {MARKER} marker: whatever wrote it did not finish.")
    return json_documents.read_json(root / MARKER, _MAX_MARKER)
