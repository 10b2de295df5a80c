"""Check the metadata of a store before its data are opened or read.

Nothing is unpickled, and only known codecs run. In a store of dkfm's own format, no link is followed and no array is
larger than its files. An untrusted store is data, not code.
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
from dkfm.storage import array_metadata_checks, json_reading
from dkfm.storage.array_metadata_checks import CRC_BYTES, parse_axis_lengths

VERSIONS = {"factor": 1, "gram": 1, "model": 2, "root": 1, "rows": 1, "scores": 3}
"""Format version of each kind of store, the only one that this version of dkfm reads and writes."""

MARKER = "_COMPLETE"
"""Name of the marker file, which is written last: a store without it is not complete."""

MAX_MARKER_BYTES = 2**27
"""Largest size of a marker that is read, in bytes.

Four outputs and ids have five checksums of 10 digits a chunk, and two numbers of up to 19 digits. With all separators
these are 62 + 42 bytes a chunk: 109 MB for 2^20 chunks, the most that a job has.
"""

JOURNAL = "_journal"
"""Folder of the receipts of an unfinished output."""

TABLE_ATTRIBUTES = "_dkfm.json"
"""File of dkfm's attributes in a Parquet output; Parquet readers ignore names that begin with an underscore."""

_OWN_CODECS = [("bytes", {"endian": "little"}), ("crc32c", {})]
_TEXT_CODECS: list[tuple[str, dict[str, str]]] = [("vlen-utf8", {}), ("crc32c", {})]
"""Codecs of an array of text: the ids of an output."""

_ITEMSIZES = {"float64": 8, "float32": 4, "int64": 8}
FILL_VALUES: Mapping[str, str | int] = {"float64": "NaN", "float32": "NaN", "int64": -1, "string": ""}
"""Fill values in metadata by dtype. No score equals one, so lost chunks never read as scores; an id may be anything."""

_SOURCE_ITEMSIZES = {
    **_ITEMSIZES,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "uint32": 4,
    "uint64": 8,
    "bool": 1,
}
_METADATA_KEYS = {
    *("zarr_format", "node_type", "shape", "data_type", "chunk_grid", "chunk_key_encoding", "fill_value", "codecs"),
    *("attributes", "storage_transformers", "dimension_names"),
}
_SEGMENT_NAME = re.compile(r"[0-9a-f]{32}-[0-9]{6,}\.json")
_CHUNK_PATH = re.compile(r"c(/\d+)*")
_PART_NAME = re.compile(r"part-[0-9]{5,}\.parquet")
_CHUNK_GRID_FOLDER = re.compile(r"[^/]+/c/")
_ARRAY_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


@dataclass(frozen=True)
class ArrayInfo:
    """Shape, chunk shape and dtype in the metadata of an array."""

    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype_name: str
    checksum_bytes: int | None = CRC_BYTES
    """Bytes of the crc32c after the raw values in a chunk file, or 0; None if `raw_chunk_reader` cannot read them."""

    @property
    def chunk_file_bytes(self) -> int:
        """Bytes of each chunk file of an array that dkfm wrote: chunks are padded to full size and not compressed."""
        return prod(self.chunks) * _ITEMSIZES[self.dtype_name] + CRC_BYTES

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks along each axis."""
        return tuple(count_tiles(length, chunk) for length, chunk in zip(self.shape, self.chunks, strict=True))

    def chunk_names(self) -> Iterator[str]:
        """Yield the file name of every chunk, relative to the array."""
        return ("/".join(["c", *map(str, index)]) for index in product(*map(range, self.grid)))


def list_files(root: Path) -> Iterator[str]:
    """Yield the path of each file below `root`, relative to it; raise for a link or another file that is not plain."""
    folders = [""]
    while folders:
        folder = folders.pop()
        for entry in _scan_folder(root, folder):
            if entry.is_dir(follow_symlinks=False):
                folders.append(f"{folder}{entry.name}/")
            else:
                yield folder + entry.name


def list_file_sizes(root: Path) -> dict[str, int]:
    """Return the size in bytes of each file below `root`, by its path relative to it; raise as `list_files` does.

    A folder of one chunk, such as ``scores/c/7``, is not listed if it contains the chunk ``0``, because a listing takes
    longer than the rest. Other files beside such a chunk are left out.
    """
    sizes: dict[str, int] = {}
    folders = [""]
    while folders:
        folder = folders.pop()
        contains_chunk_folders = _CHUNK_GRID_FOLDER.fullmatch(folder) is not None
        for entry in _scan_folder(root, folder):
            is_folder = entry.is_dir(follow_symlinks=False)
            name = f"{folder}{entry.name}/0" if is_folder else folder + entry.name
            size = _plain_file_size(root, name) if contains_chunk_folders or not is_folder else None
            if size is not None:
                sizes[name] = size
            elif is_folder:
                folders.append(f"{folder}{entry.name}/")
    return sizes


def _scan_folder(root: Path, folder: str) -> Iterator[os.DirEntry[str]]:
    """Yield the folders and the plain files in a folder below `root`, without partial files; raise for other entries.

    A partial file belongs to a running or a killed writer, and is not part of the store.
    """
    try:
        with os.scandir(root / folder) as found:
            entries = list(found)
    except OSError as error:
        raise StoreError(f"{root / folder} cannot be read: {error.strerror}.") from None
    for entry in entries:
        if is_partial(entry.name):
            continue
        if not (entry.is_dir(follow_symlinks=False) or entry.is_file(follow_symlinks=False)):
            raise _make_not_plain_error(root, folder + entry.name)
        yield entry


def _plain_file_size(root: Path, name: str) -> int | None:
    """Return the size of a file below `root` in bytes; None if it does not exist; raise if it is not plain."""
    try:
        status = os.lstat(f"{root}/{name}")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"{root / name} cannot be read: {error.strerror}.") from None
    if not stat.S_ISREG(status.st_mode):
        raise _make_not_plain_error(root, name)
    return status.st_size


def _make_not_plain_error(root: Path, name: str) -> UnsupportedStoreError:
    return UnsupportedStoreError(f"{root} holds {name}, which is a link or not a plain file.")


def stat_regular_file_within(root: Path, file: Path) -> os.stat_result | None:
    """Return the status of a file of a user's input; None if it does not exist.

    Raises
    ------
    StoreError
        The file is a broken link, a link to a file outside the input, or not a plain file.
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


def is_journal_segment_name(name: str) -> bool:
    """Return whether a name is that of a segment of a journal."""
    return _SEGMENT_NAME.fullmatch(name) is not None


def is_chunk_name(name: str) -> bool:
    """Return whether a name is that of a chunk of an array or of a table."""
    return "/c/" in name or is_parquet_part_name(name)


def is_parquet_part_name(name: str) -> bool:
    """Return whether a name is that of a chunk of a table, a Parquet file."""
    return _PART_NAME.fullmatch(name) is not None


def read_own_attributes(root: Path, kind: str | None = None) -> dict[str, object]:
    """Return dkfm's own attributes of a store; raise an UnsupportedStoreError for another writer, kind or version.

    `kind` is the expected kind, a key of `VERSIONS`; any of them by default.
    """
    if not root.is_dir():
        found = f"{root} is a file, and no store of dkfm" if root.exists() else f"There is nothing at {root}"
        raise StoreError(f"{found}.")
    file = root / "zarr.json"
    if (root / TABLE_ATTRIBUTES).is_file() and not file.exists():
        file = root / TABLE_ATTRIBUTES
    if _is_link(file):
        raise UnsupportedStoreError(f"{root} is refused: its metadata are a link.")
    return parse_own_attributes(json_reading.read_json(file), root, kind)


def parse_own_attributes(metadata: Mapping[str, object], root: object, kind: str | None = None) -> dict[str, object]:
    """Return dkfm's own attributes in the metadata of a group, checked; `root` is for messages."""
    attributes = metadata.get("attributes")
    own = attributes.get("dkfm") if isinstance(attributes, Mapping) else None
    if (
        set(metadata) - {"attributes", "zarr_format", "node_type", "consolidated_metadata"}
        or metadata.get("zarr_format") != 3
        or metadata.get("node_type") != "group"
        or not isinstance(own, dict)
        or not isinstance(own.get("kind"), str)
        or own["kind"] not in VERSIONS
        or not _is_own_consolidation(metadata.get("consolidated_metadata"), own)
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


def make_consolidated_metadata(arrays: Mapping[str, object]) -> dict[str, object]:
    """Return the consolidated metadata of a group of arrays, from which other readers open it without a listing."""
    return {"kind": "inline", "must_understand": False, "metadata": dict(arrays)}


def _is_own_consolidation(consolidated: object, own: Mapping[str, object]) -> bool:
    """Whether consolidated metadata are absent, or those of the arrays of an output; dkfm itself does not use them."""
    arrays = consolidated.get("metadata") if isinstance(consolidated, Mapping) else None
    if own["kind"] != "scores" or not isinstance(arrays, Mapping):
        return consolidated is None
    known = consolidated == make_consolidated_metadata(arrays) and sorted(arrays) == own.get("arrays")
    return known and all(
        isinstance(array, dict) and parse_array_info(array, name, text=True) for name, array in arrays.items()
    )


def read_array_info(path: Path, *, text: bool = False) -> ArrayInfo:
    """Return shape, chunk shape and dtype of an array, after all of its metadata were checked.

    Parameters
    ----------
    path : Path
        Folder of the array.
    text : bool
        Whether an array of text is accepted.

    Raises
    ------
    UnsupportedStoreError
        A part of the metadata is not one that dkfm accepts.
    """
    if _is_link(path) or _is_link(path / "zarr.json"):
        raise UnsupportedStoreError(f"The array {path} is refused: it is a link.")
    return parse_array_info(json_reading.read_json(path / "zarr.json"), path, text=text)


def read_source_metadata_and_info(path: Path) -> tuple[dict[str, object], ArrayInfo]:
    """Return the metadata of an array of a user's input, and the result of `read_array_info` for it."""
    stat_regular_file_within(path, path / "zarr.json")
    metadata = json_reading.read_json(path / "zarr.json")
    return metadata, parse_array_info(metadata, path, source=True)


def parse_array_info(
    metadata: dict[str, object], path: object, *, source: bool = False, text: bool = False
) -> ArrayInfo:
    """Return shape, chunk shape and dtype in metadata, checked as in `read_array_info`; `path` is for messages.

    For a user's input (`source`), compressed chunks and more dtypes are accepted.
    """
    shape = parse_axis_lengths(metadata.get("shape"))
    chunks = parse_axis_lengths(_get_configuration_value(metadata, "chunk_grid", "chunk_shape"))
    known, dtype = _SOURCE_ITEMSIZES if source else _ITEMSIZES, metadata.get("data_type")
    is_text = text and dtype == "string"
    fault, codecs = None, array_metadata_checks.parse_codecs(metadata)
    own_codecs = _TEXT_CODECS if is_text else _OWN_CODECS
    kind = metadata.get("zarr_format"), metadata.get("node_type")
    if type(kind[0]) is not int or kind != (3, "array"):
        fault = "it is not a Zarr version 3 array"
    elif not is_text and (not isinstance(dtype, str) or dtype not in known):
        fault = f"its data type is {dtype!r:.100}"
    elif shape is None or chunks is None or len(shape) != len(chunks) or 0 in chunks:
        fault = "its shape and chunks are not those of a regular grid"
    elif metadata.get("storage_transformers") not in (None, []):
        fault = "it has storage transformers"
    elif not (
        array_metadata_checks.is_supported_codec_pipeline(metadata.get("codecs"), chunks)
        if source
        else codecs == own_codecs
    ):
        fault = f"its codecs are not ones that dkfm reads: {metadata.get('codecs')!r:.200}"
    elif source:
        fault = array_metadata_checks.find_size_fault(
            shape, chunks, known[str(dtype)]
        ) or array_metadata_checks.find_chunk_key_fault(metadata)
    elif not _is_own_layout(metadata, shape, chunks):
        fault = "its fill value, chunks or chunk keys are not those that dkfm writes"
    if fault is not None:
        raise UnsupportedStoreError(f"The array {path} is refused: {fault}.")
    assert shape is not None and chunks is not None  # noqa: S101, PT018  # checked above; this tells the type checker
    return ArrayInfo(shape, chunks, str(dtype), _trailer_bytes(metadata))


def _trailer_bytes(metadata: Mapping[str, object]) -> int | None:
    """Return the length of the checksum in a chunk file, 0 without one; None if `raw_chunk_reader` cannot read it."""
    fill = metadata.get("fill_value")
    number = isinstance(fill, int | float) or fill in ("NaN", "Infinity", "-Infinity")
    axes = metadata.get("shape")
    named = isinstance(axes, list) and array_metadata_checks.are_dimension_names(
        metadata.get("dimension_names"), len(axes)
    )
    standard = set(metadata) <= _METADATA_KEYS and number and named
    nested = standard and _get_configuration_value(metadata, "chunk_key_encoding", "separator") == "/"
    codecs = next(
        (n for n in (1, 2) if nested and array_metadata_checks.parse_codecs(metadata) == _OWN_CODECS[:n]), None
    )
    return None if codecs is None else CRC_BYTES * (codecs - 1)


def _is_own_layout(metadata: Mapping[str, object], shape: tuple[int, ...], chunks: tuple[int, ...]) -> bool:
    return (
        set(metadata) <= _METADATA_KEYS
        and metadata.get("fill_value") == FILL_VALUES[str(metadata["data_type"])]
        and metadata.get("chunk_grid") == {"name": "regular", "configuration": {"chunk_shape": list(chunks)}}
        and metadata.get("chunk_key_encoding") == {"name": "default", "configuration": {"separator": "/"}}
        and metadata.get("attributes") in (None, {})
        and array_metadata_checks.are_dimension_names(metadata.get("dimension_names"), len(shape))
        and all(chunk <= max(1, length) for chunk, length in zip(chunks, shape, strict=True))
    )


def _is_link(path: Path) -> bool:
    try:
        return path.is_symlink()
    except OSError:
        return False  # opening it fails too, with a message


def _get_configuration_value(metadata: Mapping[str, object], field: str, key: str) -> object:
    """Return a setting of a regular chunk grid or of default chunk keys; None for other grids and keys."""
    extension = metadata.get(field)
    expected = {"chunk_grid": "regular", "chunk_key_encoding": "default"}[field]
    known = isinstance(extension, Mapping) and extension.get("name") == expected
    return array_metadata_checks.codec_configuration([extension], 0).get(key) if known else None


def require_array_name(root: Path, name: object) -> str:
    """Return the name of an array in a store; raise if it could lead out of the store."""
    if not isinstance(name, str) or not _ARRAY_NAME.fullmatch(name):
        raise UnsupportedStoreError(f"{root} names an array {name!r:.100}.")
    return name


def require_chunks(path: Path, info: ArrayInfo) -> None:
    """Raise a StoreError unless an array that dkfm wrote has its chunks, of their exact sizes, and nothing else."""
    sizes = {name: size for name, size in list_file_sizes(path).items() if name != "zarr.json"}
    foreign = next((name for name in sizes if not _CHUNK_PATH.fullmatch(name)), None)
    if foreign is not None:
        raise UnsupportedStoreError(f"{path} holds {foreign}, which is no chunk of an array; move it elsewhere.")
    if len(sizes) != prod(info.grid):  # first: an untrusted shape may have too many chunks to loop over
        raise DamagedStoreError(f"{path} has {len(sizes)} chunks and must have {prod(info.grid)}.")
    if not sizes:
        return  # if an axis has length 0, another axis may claim any number of chunks
    for name in info.chunk_names():
        if name not in sizes:
            raise DamagedStoreError(f"{path} has lost its chunk {name}.")
        if sizes[name] != info.chunk_file_bytes:
            raise DamagedStoreError(
                f"The chunk {name} of {path} has {sizes[name]} bytes and must have {info.chunk_file_bytes}."
            )


def read_completion_marker(root: Path) -> dict[str, object]:
    """Return the content of the completion marker; raise an IncompleteStoreError if there is none."""
    if _is_link(root / MARKER) or not (root / MARKER).is_file():
        raise IncompleteStoreError(f"{root} has no {MARKER} marker: whatever wrote it did not finish.")
    return json_reading.read_json(root / MARKER, MAX_MARKER_BYTES)
