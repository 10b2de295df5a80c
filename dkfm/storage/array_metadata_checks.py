"""Check parts of the metadata of an array: lengths, sizes and names of its axes, chunk keys, and codecs.

Only some codecs may be used to decode the chunks of a source.
"""

import re
from collections.abc import Mapping
from math import prod

from dkfm.core.chunking import count_tiles

_CODECS = {"bytes", "crc32c", "zstd", "blosc", "gzip", "transpose", "sharding_indexed", "vlen-utf8"}
_CODEC_ORDER = re.compile(r"(transpose )*bytes (crc32c )*((zstd|blosc|gzip) )?(crc32c )*")
_MAX_CODECS = 8
"""Longest chain of codecs; no real array has more."""

_MAX_INNER_CHUNKS = 2**18
"""Largest number of inner chunks of a shard; its index, 16 bytes for each, is read as a whole."""

_MAX_SOURCE_BYTES = 2**50
"""Largest array of a user's input, in bytes."""

_MAX_CHUNK_BYTES = 2**33
"""Largest chunk, and largest row, of a user's input, in bytes."""

_MAX_ROW_CHUNKS = 2**14
"""Largest number of chunks that contain a part of one row of a user's input."""

CRC_BYTES = 4
"""Bytes of the checksum that the crc32c codec appends to a chunk."""


def parse_axis_lengths(value: object) -> tuple[int, ...] | None:
    """Return the lengths of 1 to 4 axes; None unless they are nonnegative integers that an array can have."""
    if not isinstance(value, list) or not 0 < len(value) <= 4:
        return None
    return tuple(value) if all(type(v) is int and 0 <= v < 2**48 for v in value) else None


def find_size_fault(shape: tuple[int, ...], chunks: tuple[int, ...], itemsize: int) -> str | None:
    """Return which part of a user's input exceeds a limit, with both numbers; None if none does."""
    row_chunks = prod(count_tiles(length, chunk) for length, chunk in zip(shape[1:], chunks[1:], strict=True))
    for what, size, limit in (
        ("it has", itemsize * prod(shape), _MAX_SOURCE_BYTES),
        ("one chunk of it has", itemsize * prod(chunks), _MAX_CHUNK_BYTES),
        ("one row of it has", 8 * prod(shape[1:]), _MAX_CHUNK_BYTES),
    ):
        if size > limit:
            return f"{what} {size} bytes, and at most {limit} are read"
    if row_chunks > _MAX_ROW_CHUNKS:
        return f"one row of it lies in {row_chunks} chunks, and at most {_MAX_ROW_CHUNKS} are read"
    return None


def is_supported_codec_pipeline(codecs: object, chunks: tuple[int, ...]) -> bool:
    """Return whether codecs are supported in a source: known, in order, at most one compressor, no nested shards."""
    names = codec_names(codecs)
    if names == ["sharding_indexed"]:
        return _is_supported_shard(codec_configuration(codecs, 0), chunks)
    return names is not None and _CODEC_ORDER.fullmatch("".join(f"{name} " for name in names)) is not None


def _is_supported_shard(shard: Mapping[str, object], chunks: tuple[int, ...]) -> bool:
    inner, index, codecs = parse_axis_lengths(shard.get("chunk_shape")), shard.get("index_codecs"), shard.get("codecs")
    if inner is None or 0 in inner or len(inner) != len(chunks):
        return False
    return (
        set(shard) <= {"chunk_shape", "codecs", "index_codecs", "index_location"}
        and shard.get("index_location", "end") in ("start", "end")
        and all(chunk % length == 0 for chunk, length in zip(chunks, inner, strict=True))
        and prod(chunks) // prod(inner) <= _MAX_INNER_CHUNKS
        and codec_names(codecs) != ["sharding_indexed"]
        and is_supported_codec_pipeline(codecs, inner)
        and codec_names(index) in (["bytes"], ["bytes", "crc32c"])
        and codec_configuration(index, 0) == {"endian": "little"}
    )


def inner_chunk_shape(codecs: object) -> tuple[int, ...] | None:
    """Return the shape of the inner chunks of a shard; None without sharding. The codecs must be supported."""
    if codec_names(codecs) != ["sharding_indexed"]:
        return None
    return parse_axis_lengths(codec_configuration(codecs, 0).get("chunk_shape"))


def codec_names(codecs: object) -> list[str] | None:
    """Return the names of codecs; None unless they are a short list of known codecs."""
    if not isinstance(codecs, list) or len(codecs) > _MAX_CODECS:
        return None
    names = [codec.get("name") if isinstance(codec, Mapping) else None for codec in codecs]
    return [str(name) for name in names] if all(isinstance(n, str) and n in _CODECS for n in names) else None


def codec_configuration(codecs: object, position: int) -> Mapping[str, object]:
    """Return the configuration of one codec of a list; empty if it has none."""
    codec = codecs[position] if isinstance(codecs, list) else None
    configuration = codec.get("configuration") if isinstance(codec, Mapping) else None
    return configuration if isinstance(configuration, Mapping) else {}


def are_dimension_names(names: object, dimensions: int) -> bool:
    """Whether the names of the dimensions in the metadata of an array are absent, or a text for each dimension."""
    if names is None:
        return True
    return isinstance(names, list) and len(names) == dimensions and all(isinstance(name, str) for name in names)


def parse_codecs(metadata: Mapping[str, object]) -> list[tuple[str, Mapping[str, object]]]:
    """Return the name and the configuration of each codec in metadata; empty unless all of them are known."""
    codecs = metadata.get("codecs")
    return [(name, codec_configuration(codecs, position)) for position, name in enumerate(codec_names(codecs) or [])]


def find_chunk_key_fault(metadata: Mapping[str, object]) -> str | None:
    """Return a clause about chunk keys that are not the default of Zarr; None if they are the default."""
    encoding = metadata.get("chunk_key_encoding")
    known = isinstance(encoding, Mapping) and encoding.get("name") in ("default", "v2")
    separator = codec_configuration([encoding], 0).get("separator", "/")
    return None if known and separator in ("/", ".") else "its chunk keys are not those of Zarr"
