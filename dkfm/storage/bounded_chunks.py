"""Read rows of an untrusted Zarr array; no chunk takes more memory than its metadata state.

Before a read, each chunk file is checked: it must be a plain file within the array, no larger than a chunk can be.
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
from dkfm.storage import array_metadata_checks, store_metadata
from dkfm.storage.array_metadata_checks import CRC_BYTES

_COMPRESSORS = ("zstd", "blosc", "gzip")
_OVERHEAD_BYTES = 2**8
"""Largest number of bytes, beyond twice the size of the values, that a compressor may produce."""

_ENTRY_BYTES = 16
"""Bytes of a shard's index for each inner chunk."""

_NO_CHUNK = 2**64 - 1
"""Offset in a shard's index of an inner chunk that is not stored."""


def read_bounded(path: Path, rows: slice) -> npt.NDArray[np.generic]:
    """Return rows of an array (n, d) of a user's input in their stored dtype.

    Raises
    ------
    StoreError
        The metadata are invalid, or a chunk file is not plain, outside the array, or too large.
    Exception
        A decoder rejects the content of a chunk.
    """
    document, info = store_metadata.read_source_metadata_and_info(path)
    codecs, metadata = document["codecs"], metadata_with_bounded_codecs(document)
    first, end = rows.start // info.chunks[0], count_tiles(min(rows.stop, info.shape[0]), info.chunks[0])
    for index in product(range(first, end), range(info.grid[1])):
        _require_bounded_file(path, path / metadata.encode_chunk_key(index), info, codecs)
    array = zarr.Array(zarr.AsyncArray(metadata, StorePath(LocalStore(path, read_only=True))))
    return np.asarray(array[rows])


def metadata_with_bounded_codecs(document: Mapping[str, object]) -> ArrayV3Metadata:
    """Return Zarr's metadata of an array, with codecs that raise if a chunk does not decode to its exact size."""
    bounded = {**document, "codecs": _bound_codecs(document["codecs"])}
    return ArrayV3Metadata.from_dict(bounded)  # type: ignore[arg-type]  # it accepts codec objects too


def _require_bounded_file(root: Path, file: Path, info: store_metadata.ArrayInfo, codecs: object) -> None:
    """Raise if a chunk file cannot be a chunk of the array; a chunk without a file consists of the fill value."""
    status = store_metadata.stat_regular_file_within(root, file)
    if status is None:
        return
    inner, itemsize = array_metadata_checks.inner_chunk_shape(codecs), np.dtype(info.dtype_name).itemsize
    count = prod(info.chunks) // prod(inner or info.chunks)
    max_length = 2 * prod(inner or info.chunks) * itemsize + _OVERHEAD_BYTES
    max_size = count * (max_length + _ENTRY_BYTES)
    if status.st_size > max_size:
        raise DamagedStoreError(f"{file} has {status.st_size} bytes, and a chunk of its array at most {max_size}.")
    if inner is None:
        return
    index = _read_shard_index(file, status.st_size, count, array_metadata_checks.codec_configuration(codecs, 0))
    offsets, lengths = index[index[:, 0] != _NO_CHUNK].T
    if (lengths > max_length).any() or (offsets > status.st_size).any() or (offsets + lengths > status.st_size).any():
        raise DamagedStoreError(f"The index of the shard {file} refers to bytes that it does not have.")


def _read_shard_index(file: Path, size: int, count: int, shard: Mapping[str, object]) -> npt.NDArray[np.uint64]:
    """Return the offset and the length of each inner chunk of a shard, (count, 2), in bytes."""
    index_bytes = _ENTRY_BYTES * count
    checksum = CRC_BYTES * (array_metadata_checks.codec_names(shard.get("index_codecs")) or []).count("crc32c")
    if size < index_bytes + checksum:
        raise DamagedStoreError(f"{file} has {size} bytes, and the index of its chunks alone has {index_bytes}.")
    with open_plain(file) as opened:
        opened.seek(0 if shard.get("index_location") == "start" else size - index_bytes - checksum)
        return np.frombuffer(opened.read(index_bytes), "<u8").reshape(-1, 2)


def _bound_codecs(codecs: object) -> list[object]:
    """Return codecs with each compressor replaced by a bounded one."""
    names = array_metadata_checks.codec_names(codecs) or []
    bounded: list[object] = list(codecs) if isinstance(codecs, list) else []
    for position, name in enumerate(names):
        if name in _COMPRESSORS:
            bounded[position] = _BoundedCodec(name, names[:position].count("crc32c"))
        elif name == "sharding_indexed":
            shard = array_metadata_checks.codec_configuration(codecs, position)
            bounded[position] = ShardingCodec(**{**shard, "codecs": _bound_codecs(shard["codecs"])})  # type: ignore[arg-type]  # its fields, as checked
    return bounded


@dataclass(frozen=True)
class _BoundedCodec(BytesBytesCodec):
    """Compressor that raises if a chunk does not decode to its exact size."""

    compressor_name: str
    preceding_crc32c_count: int
    """Number of checksums between the values and the compressor."""
    is_fixed_size = False

    def _decode_sync(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> Buffer:
        size = (
            prod(chunk_spec.shape) * chunk_spec.dtype.to_native_dtype().itemsize
            + CRC_BYTES * self.preceding_crc32c_count
        )
        data = np.ascontiguousarray(chunk_bytes.as_numpy_array())
        return chunk_spec.prototype.buffer.from_bytes(_decode(self.compressor_name, data, size))

    async def _decode_single(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> Buffer:
        return await asyncio.to_thread(self._decode_sync, chunk_bytes, chunk_spec)

    def compute_encoded_size(self, _input_byte_length: int, _chunk_spec: ArraySpec) -> int:
        """Raise: the size of a compressed chunk is not known beforehand."""
        raise AssertionError("Chunks of sources are not written.")


def _decode(compressor: str, data: npt.NDArray[np.generic], size: int) -> bytes | memoryview:
    """Decompress `size` bytes; raise if there are more or fewer, without decoding more than about `size` bytes."""
    if compressor == "gzip":
        with gzip.GzipFile(fileobj=io.BytesIO(data.tobytes())) as file:
            decoded = file.read(size + 1)
        _require_size(len(decoded), size)
        return decoded
    stated = _zstd_size(data[:18].tobytes()) if compressor == "zstd" else int.from_bytes(data[4:8].tobytes(), "little")
    if stated is not None:
        _require_size(stated, size)
    out, codec = np.empty(size, np.uint8), numcodecs.Zstd() if compressor == "zstd" else numcodecs.Blosc()
    codec.decode(data, out)  # raises for more bytes, and for fewer unless a size is stated, which is checked above
    return out.data


def _require_size(decoded: int, size: int) -> None:
    if decoded != size:
        raise ValueError(f"a chunk of {size} bytes decodes to {'more' if decoded > size else decoded}")


def _zstd_size(head: bytes) -> int | None:
    """Return the decoded size in the header of a frame (RFC 8878, 3.1.1.1), in bytes; None if it is not stated."""
    descriptor = head[4] if len(head) > 4 else 0
    single = descriptor >> 5 & 1
    width = (single, 2, 4, 8)[descriptor >> 6]
    start = 5 + (1 - single) + (0, 1, 2, 4)[descriptor & 3]
    stated = int.from_bytes(head[start : start + width], "little")
    return (stated + 256 if width == 2 else stated) if width else None
