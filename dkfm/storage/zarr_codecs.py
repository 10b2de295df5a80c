"""Which codecs the chunks of a source may have, as its metadata state them."""

import re
from collections.abc import Mapping
from math import prod

_KNOWN = {"bytes", "crc32c", "zstd", "blosc", "gzip", "transpose", "sharding_indexed"}
_CHAIN = re.compile(r"(transpose )*bytes (crc32c )*((zstd|blosc|gzip) )?(crc32c )*")
_LONGEST = 8
"""A chain of more codecs than this is nobody's."""

_INNER_CHUNKS = 2**18
"""Of a shard: its index, 16 bytes for each, is read whole."""

CRC_BYTES = 4
"""The codec's checksum at the end of a chunk."""


def axis_lengths(value: object) -> tuple[int, ...] | None:
    """Return lengths of axes, None where they are not whole numbers that an array can have."""
    if not isinstance(value, list) or not 0 < len(value) <= 4:
        return None
    return tuple(value) if all(type(v) is int and 0 <= v < 2**48 for v in value) else None


def is_supported(codecs: object, chunks: tuple[int, ...]) -> bool:
    """Whether the chunks of a source may have these codecs: no two compressors, no shards within shards."""
    found = codec_names(codecs)
    if found == ["sharding_indexed"]:
        return _is_shard_read(codec_configuration(codecs, 0), chunks)
    return found is not None and _CHAIN.fullmatch("".join(f"{name} " for name in found)) is not None


def _is_shard_read(shard: Mapping[str, object], chunks: tuple[int, ...]) -> bool:
    inner, index, codecs = axis_lengths(shard.get("chunk_shape")), shard.get("index_codecs"), shard.get("codecs")
    if inner is None or 0 in inner or len(inner) != len(chunks):
        return False
    return (
        set(shard) <= {"chunk_shape", "codecs", "index_codecs", "index_location"}
        and shard.get("index_location", "end") in ("start", "end")
        and all(chunk % length == 0 for chunk, length in zip(chunks, inner, strict=True))
        and prod(chunks) // prod(inner) <= _INNER_CHUNKS
        and codec_names(codecs) != ["sharding_indexed"]
        and is_supported(codecs, inner)
        and codec_names(index) in (["bytes"], ["bytes", "crc32c"])
        and codec_configuration(index, 0) == {"endian": "little"}
    )


def inner_chunks(codecs: object) -> tuple[int, ...] | None:
    """Return the shape of the chunks within a shard, None where a chunk is none; of codecs that are read."""
    return (
        axis_lengths(codec_configuration(codecs, 0).get("chunk_shape"))
        if codec_names(codecs) == ["sharding_indexed"]
        else None
    )


def codec_names(codecs: object) -> list[str] | None:
    """Return the names of codecs, None where these are not a short list of known ones."""
    if not isinstance(codecs, list) or len(codecs) > _LONGEST:
        return None
    found = [codec.get("name") if isinstance(codec, Mapping) else None for codec in codecs]
    return [str(name) for name in found] if all(isinstance(n, str) and n in _KNOWN for n in found) else None


def codec_configuration(codecs: object, at: int) -> Mapping[str, object]:
    """Return what one codec of a list of `codec_names` is configured with."""
    codec = codecs[at] if isinstance(codecs, list) else None
    found = codec.get("configuration") if isinstance(codec, Mapping) else None
    return found if isinstance(found, Mapping) else {}
