"""Rows of a stranger's Zarr array, none of whose chunks takes more memory than its metadata say.

Every file that a read touches is looked at first: a plain one, within the array, no larger than such a chunk can be.
"""

import asyncio
import gzip
import io
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path

import numcodecs
import numpy as np
import numpy.typing as npt
import zarr
from zarr.abc.codec import BytesBytesCodec
from zarr.codecs import ShardingCodec
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer
from zarr.core.metadata import ArrayV3Metadata
from zarr.storage import LocalStore, StorePath

from dkfm.core.chunking import count_tiles
from dkfm.errors import DamagedStoreError
from dkfm.files.local import open_plain
from dkfm.storage import zarr_codecs, zarr_schema
from dkfm.storage.zarr_codecs import CRC_BYTES

_COMPRESSORS = ("zstd", "blosc", "gzip")
_SLACK = 2**8
"""What a compressor may add to values that it cannot make smaller, beside as many bytes again."""

_INDEX_BYTES, _EMPTY = 16, 2**64 - 1
"""Of the index of a shard for each of its chunks; and where it has none."""


def read_bounded(path: Path, rows: slice) -> npt.NDArray[np.generic]:
    """Return some rows of an array (n, d) of a user's input, as they are stored.

    Raises
    ------
    StoreError
        What its metadata, or its files before they are read, say.
    Exception
        Whatever a decoder makes of a stranger's bytes.
    """
    document, info = zarr_schema.read_source(path)
    chain, metadata = document["codecs"], bounded_metadata(document)
    first, end = rows.start // info.chunks[0], count_tiles(min(rows.stop, info.shape[0]), info.chunks[0])
    for place in product(range(first, end), range(info.grid[1])):
        _require_sound(path, path / metadata.encode_chunk_key(place), info, chain)
    array = zarr.Array(zarr.AsyncArray(metadata, StorePath(LocalStore(path, read_only=True))))
    return np.asarray(array[rows])


def bounded_metadata(document: Mapping[str, object]) -> ArrayV3Metadata:
    """Return an array's metadata for Zarr, with codecs that decode a chunk to its own bytes, or not at all."""
    made = {**document, "codecs": _bounded(document["codecs"])}
    return ArrayV3Metadata.from_dict(made)  # type: ignore[arg-type]  # a codec may be there already


def _require_sound(root: Path, file: Path, info: zarr_schema.ArrayInfo, chain: object) -> None:
    """Raise where a chunk's file is what no chunk's is; without one, the chunk is of the fill value."""
    status = zarr_schema.status_within(root, file)
    if status is None:
        return
    inner, item = zarr_codecs.inner_chunks(chain), np.dtype(info.dtype).itemsize
    chunks = prod(info.chunks) // prod(inner or info.chunks)
    each = 2 * prod(inner or info.chunks) * item + _SLACK
    most = chunks * (each + _INDEX_BYTES)
    if status.st_size > most:
        raise DamagedStoreError(f"{file} has {status.st_size} bytes, and a chunk of its array at most {most}.")
    if inner is None:
        return
    index = _index(file, status.st_size, chunks, zarr_codecs.codec_configuration(chain, 0))
    starts, lengths = index[index[:, 0] != _EMPTY].T
    if (lengths > each).any() or (starts > status.st_size).any() or (starts + lengths > status.st_size).any():
        raise DamagedStoreError(f"The index of the shard {file} tells of bytes that it does not have.")


def _index(file: Path, size: int, chunks: int, shard: Mapping[str, object]) -> npt.NDArray[np.uint64]:
    """Return where the chunks of a shard lie: start and length of each."""
    index_bytes = _INDEX_BYTES * chunks
    checksum = CRC_BYTES * (zarr_codecs.codec_names(shard.get("index_codecs")) or []).count("crc32c")
    if size < index_bytes + checksum:
        raise DamagedStoreError(f"{file} has {size} bytes, and the index of its chunks alone has {index_bytes}.")
    with open_plain(file) as opened:
        opened.seek(0 if shard.get("index_location") == "start" else size - index_bytes - checksum)
        return np.frombuffer(opened.read(index_bytes), "<u8").reshape(-1, 2)


def _bounded(chain: object) -> list[object]:
    """Return codecs in which those that decompress are bounded."""
    names = zarr_codecs.codec_names(chain) or []
    made: list[object] = list(chain) if isinstance(chain, list) else []
    for at, name in enumerate(names):
        if name in _COMPRESSORS:
            made[at] = _Bounded(name, names[:at].count("crc32c"))
        elif name == "sharding_indexed":
            shard = zarr_codecs.codec_configuration(chain, at)
            made[at] = ShardingCodec(**{**shard, "codecs": _bounded(shard["codecs"])})  # type: ignore[arg-type]  # its fields, as seen
    return made


@dataclass(frozen=True)
class _Bounded(BytesBytesCodec):
    """A compressor that decodes to the bytes of a chunk, or not at all."""

    compressor: str
    checksums: int
    """How many lie between the values and the compressor."""
    is_fixed_size = False

    def _decode_sync(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> Buffer:
        size = prod(chunk_spec.shape) * chunk_spec.dtype.to_native_dtype().itemsize + CRC_BYTES * self.checksums
        data = np.ascontiguousarray(chunk_bytes.as_numpy_array())
        return chunk_spec.prototype.buffer.from_bytes(_decoded(self.compressor, data, size))

    async def _decode_single(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> Buffer:
        return await asyncio.to_thread(self._decode_sync, chunk_bytes, chunk_spec)

    def compute_encoded_size(self, _input_byte_length: int, _chunk_spec: ArraySpec) -> int:
        """Raise: nobody knows it before."""
        raise AssertionError("Chunks of sources are not written.")


def _decoded(compressor: str, data: npt.NDArray[np.generic], size: int) -> bytes | memoryview:
    """Return what was compressed, `size` bytes; what has another size is not decoded, or no further than that."""
    if compressor == "gzip":
        with gzip.GzipFile(fileobj=io.BytesIO(data.tobytes())) as file:
            found = file.read(size + 1)
        _require_size(len(found), size)
        return found
    stated = _zstd_size(data[:18].tobytes()) if compressor == "zstd" else int.from_bytes(data[4:8].tobytes(), "little")
    if stated is not None:
        _require_size(stated, size)
    out, codec = np.empty(size, np.uint8), numcodecs.Zstd() if compressor == "zstd" else numcodecs.Blosc()
    codec.decode(data, out)  # raises where it is more; and where it is less, but for a size that was stated
    return out.data


def _require_size(found: int, size: int) -> None:
    if found != size:
        raise ValueError(f"a chunk of {size} bytes decodes to {'more' if found > size else found}")


def _zstd_size(head: bytes) -> int | None:
    """Return the bytes that a frame says it decodes to (RFC 8878, 3.1.1.1), None where it does not say."""
    descriptor = head[4] if len(head) > 4 else 0
    single = descriptor >> 5 & 1
    width = (single, 2, 4, 8)[descriptor >> 6]
    start = 5 + (1 - single) + (0, 1, 2, 4)[descriptor & 3]
    stated = int.from_bytes(head[start : start + width], "little")
    return (stated + 256 if width == 2 else stated) if width else None
