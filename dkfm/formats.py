"""What dkfm accepts from a store, decided from its metadata alone, before anything of it is opened or read.

Promises: nothing is unpickled, no codec outside the list runs; in a store of dkfm's own format no link is followed and
no array is larger than its files. A stranger's store is data, not code.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path

from dkfm.errors import DamagedStoreError, IncompleteStoreError, StoreError, UnsupportedStoreError
from dkfm.tiling import count

__all__ = [
    "MARKER",
    "MAX_JSON",
    "ArrayInfo",
    "array_info",
    "files",
    "foreign_file",
    "foreign_name",
    "group_attributes",
    "parsed",
    "read_array",
    "read_group",
    "read_json",
    "read_marker",
    "require_chunks",
]

VERSIONS = {"gram": 1, "model": 2, "rows": 1, "scores": 1}
"""The newest layout of each kind of store; this version reads these and writes these."""

MARKER = "_COMPLETE"
"""Written last: a store without it is not finished."""

MAX_JSON = 2**26
"""Bytes of metadata, at most."""

_OWN_CODECS = [("bytes", {"endian": "little"}), ("crc32c", {})]
_SOURCE_CODECS = {"bytes", "crc32c", "zstd", "blosc", "gzip", "transpose", "sharding_indexed"}
_TYPES = {"float64": 8, "float32": 4, "int64": 8}
_FILLS: dict[str, object] = {"float64": "NaN", "float32": "NaN", "int64": -1}
"""What no value of dkfm's is: a lost chunk never reads as data."""

_SOURCE_TYPES = {
    **_TYPES,
    "float32": 4,
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
_PARTIAL = re.compile(r"\.[0-9a-f]{32}\.partial$")
_INNER = re.compile(r"zarr\.json|c(/[0-9]+)*")
CRC_BYTES = 4
"""The codec's checksum at the end of a chunk."""


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
        return tuple(count(length, chunk) for length, chunk in zip(self.shape, self.chunks, strict=True))

    def chunk_names(self) -> Iterator[str]:
        """Yield the file name of every chunk, relative to the array."""
        return ("/".join(["c", *map(str, place)]) for place in product(*map(range, self.grid)))


def files(root: Path) -> Iterator[str]:
    """Yield the path of each file below `root`, relative to it; refuse links and whatever is not a plain file."""
    folders = [root]
    while folders:
        folder = folders.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                if _PARTIAL.search(entry.name):
                    continue  # what a writer is at, or a killed one left; no reader sees it
                relative = Path(entry.path).relative_to(root).as_posix()
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
                elif not entry.is_file(follow_symlinks=False):
                    raise UnsupportedStoreError(f"{root} holds {relative}, which is a link or not a plain file.")
                else:
                    yield relative


def foreign_file(root: Path, own: Mapping[str, object]) -> str | None:
    """Return a file of a store that is not among those which its own attributes tell of, if any."""
    return foreign_name(files(root), own)


def foreign_name(names: Iterable[str], own: Mapping[str, object]) -> str | None:
    """Return the first name that is not of a file which a store's own attributes tell of, if any."""
    named = own.get("arrays")
    arrays = {str(name) for name in named} if isinstance(named, list) else set()
    for name in names:
        array, _, inner = name.partition("/")
        if name not in ("zarr.json", MARKER) and not (array in arrays and _INNER.fullmatch(inner)):
            return name
    return None


def read_json(path: Path) -> dict[str, object]:
    """Read a small JSON object."""
    try:
        size = path.lstat().st_size
        if size > MAX_JSON:
            raise UnsupportedStoreError(f"{path} has {size} bytes; metadata are below {MAX_JSON}.")
        return parsed(path.read_bytes(), path)
    except FileNotFoundError:
        raise UnsupportedStoreError(f"{path} is missing, so {path.parent} is not a store that dkfm reads.") from None
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}.") from None


def parsed(data: bytes, name: object) -> dict[str, object]:
    """Return the JSON object that some bytes are; `name` is what messages call them."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedStoreError(f"{name} is not valid JSON ({error}).") from None
    if not isinstance(value, dict):
        raise DamagedStoreError(f"{name} must hold a JSON object.")
    return value


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
    if (root / "zarr.json").is_symlink():
        raise UnsupportedStoreError(f"{root} is refused: its metadata are a link.")
    return group_attributes(read_json(root / "zarr.json"), root, kind)


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
        or str(own.get("kind")) not in VERSIONS
    ):
        raise UnsupportedStoreError(f"{root} is not a store that dkfm wrote.")
    own["kind"] = str(own["kind"])
    if kind is not None and own["kind"] != kind:
        raise UnsupportedStoreError(f"{root} is a dkfm {own['kind']} store, and a {kind} store is needed.")
    newest = VERSIONS[own["kind"]]
    if own.get("version") != newest:
        raise UnsupportedStoreError(
            f"{root} has format {own.get('version')} of a dkfm {own['kind']} store and this version reads format "
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
    if not source and (path.is_symlink() or (path / "zarr.json").is_symlink()):
        raise UnsupportedStoreError(f"The array {path} is refused: it is a link.")
    return array_info(read_json(path / "zarr.json"), path, source=source)


def array_info(metadata: Mapping[str, object], path: object, *, source: bool = False) -> ArrayInfo:
    """Return what an array's metadata state, checked as `read_array` does; `path` is for messages."""
    shape, chunks = _sizes(metadata.get("shape")), _sizes(_inner(metadata, "chunk_grid", "chunk_shape"))
    known = _SOURCE_TYPES if source else _TYPES
    refusal = None
    if metadata.get("zarr_format") != 3 or metadata.get("node_type") != "array":
        refusal = "it is not a Zarr version 3 array"
    elif str(metadata.get("data_type")) not in known:
        refusal = f"its data type is {metadata.get('data_type')!r}"
    elif shape is None or chunks is None or len(shape) != len(chunks) or 0 in chunks:
        refusal = "its shape and chunks are not those of a regular grid"
    elif metadata.get("storage_transformers"):
        refusal = "it has storage transformers"
    elif not _codecs_known(metadata.get("codecs"), source):
        refusal = f"its codecs are not ones that dkfm reads: {metadata.get('codecs')!r:.200}"
    elif not source and not _is_own_layout(metadata):
        refusal = "its fill value or chunk keys are not those that dkfm writes"
    if refusal is not None:
        raise UnsupportedStoreError(f"The array {path} is refused: {refusal}.")
    assert shape is not None and chunks is not None  # noqa: S101, PT018  # checked above; this tells the type checker
    return ArrayInfo(shape, chunks, str(metadata["data_type"]), _trailer(metadata))


def _trailer(metadata: Mapping[str, object]) -> int | None:
    fill = metadata.get("fill_value")
    number = isinstance(fill, int | float) or fill in ("NaN", "Infinity", "-Infinity")
    usual = set(metadata) <= _FIELDS and number and metadata.get("dimension_names") is None
    by_folders = usual and _inner(metadata, "chunk_key_encoding", "separator") == "/"
    codecs = metadata.get("codecs")
    plain = next((n for n in (1, 2) if by_folders and _named(codecs) == _OWN_CODECS[:n]), None)
    return None if plain is None else CRC_BYTES * (plain - 1)


def _is_own_layout(metadata: Mapping[str, object]) -> bool:
    return (
        metadata.get("fill_value") == _FILLS[str(metadata["data_type"])]
        and _inner(metadata, "chunk_key_encoding", "separator") == "/"
        and metadata.get("attributes") in (None, {})
    )


def _inner(metadata: Mapping[str, object], key: str, inner: str) -> object:
    part = metadata.get(key)
    configuration = part.get("configuration") if isinstance(part, Mapping) else None
    expected = {"chunk_grid": "regular", "chunk_key_encoding": "default"}[key]
    named = isinstance(part, Mapping) and part.get("name") == expected
    return configuration.get(inner) if named and isinstance(configuration, Mapping) else None


def _sizes(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list) or not 0 < len(value) <= 4:
        return None
    if any(isinstance(v, bool) or not isinstance(v, int) or not 0 <= v < 2**48 for v in value):
        return None
    return tuple(value)


def _codecs_known(codecs: object, source: bool) -> bool:
    if not isinstance(codecs, list) or not all(isinstance(codec, Mapping) for codec in codecs):
        return False
    if not source:
        return _named(codecs) == _OWN_CODECS
    for codec in codecs:
        inner = codec.get("configuration")
        nested = [inner[k] for k in ("codecs", "index_codecs") if k in inner] if isinstance(inner, Mapping) else []
        if codec.get("name") not in _SOURCE_CODECS or not all(_codecs_known(n, True) for n in nested):
            return False
    return True


def _named(codecs: object) -> list[tuple[object, object]]:
    assert isinstance(codecs, list)  # noqa: S101  # checked by _codecs_known; this tells the type checker
    return [(codec.get("name"), codec.get("configuration") or {}) for codec in codecs]


def require_chunks(path: Path, info: ArrayInfo) -> None:
    """Raise unless every chunk file of one of dkfm's own arrays is there with its exact size."""
    present = sum(1 for name in files(path) if name != "zarr.json")
    if present != prod(info.grid):  # told first: a stranger's shape may have more chunks than there are numbers
        raise DamagedStoreError(f"{path} has {present} chunks and must have {prod(info.grid)}.")
    for name in info.chunk_names():
        try:
            size = (path / name).stat().st_size
        except FileNotFoundError:
            raise DamagedStoreError(f"{path} has lost its chunk {name}.") from None
        if size != info.chunk_file_bytes:
            raise DamagedStoreError(
                f"The chunk {name} of {path} has {size} bytes and must have {info.chunk_file_bytes}."
            )


def read_marker(root: Path) -> dict[str, object]:
    """Return the content of the completion marker."""
    if (root / MARKER).is_symlink() or not (root / MARKER).is_file():
        raise IncompleteStoreError(f"{root} has no {MARKER} marker: whatever wrote it did not finish.")
    return read_json(root / MARKER)
