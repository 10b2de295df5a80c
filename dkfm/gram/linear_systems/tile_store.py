"""Store the lower tiles of a Cholesky factor in a Zarr array, one chunk each, durably and with checksums."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dkfm.core import chunking
from dkfm.core.rows import Array
from dkfm.core.scratch_buffers import ThreadBuffer
from dkfm.errors import DamagedStoreError, StoreExistsError
from dkfm.files import local
from dkfm.gram import build
from dkfm.storage import own_files, raw_chunk_reader, store_metadata, zarr_store

_NAME = "factor"

Pair = tuple[int, int]
"""Block numbers of the rows and of the columns of a tile."""


@dataclass(frozen=True)
class TileStore:
    """Lower tiles of a matrix (N, N) in a store; tiles above the diagonal do not exist."""

    root: Path
    """Folder of the store."""
    n: int
    """Rows of the matrix."""
    tile_rows: int
    """Rows and columns of a tile."""
    factor_id: str = ""
    """Unique id of this factor; another factor of the same matrix may differ in the last bits."""

    @property
    def blocks(self) -> int:
        """Number of blocks of rows."""
        return chunking.count_tiles(self.n, self.tile_rows)

    def rows(self, block: int) -> slice:
        """Return the rows of a block."""
        return chunking.row_slice(block, self.n, self.tile_rows)

    @contextmanager
    def read_tile_to_buffer(self, pair: Pair, *, beside_another: bool = False) -> Iterator[Array]:
        """Yield a tile in a buffer of this thread, which the next tile overwrites; `beside_another` uses a second one.

        Raises
        ------
        DamagedStoreError
            The tile is missing or damaged.
        """
        with _tile_buffers[beside_another].borrow(self.tile_rows, self.tile_rows, np.dtype(np.float64)) as buffer:
            try:
                raw_chunk_reader.read_chunk_into_array(buffer, self._file(pair), checked=True)
            except (ValueError, OSError) as error:
                raise DamagedStoreError(
                    f"Tile {pair} of {self.root} cannot be read; delete {self.root} and fit again: {error}"
                ) from error
            rows, columns = (self.rows(block) for block in pair)
            yield buffer[: rows.stop - rows.start, : columns.stop - columns.start]

    def count_tiles(self) -> int:
        """Return the number of tiles that exist, whether intact or damaged."""
        return sum(self._file((i, j)).exists() for i in range(self.blocks) for j in range(i + 1))

    def has_intact_tile(self, pair: Pair) -> bool:
        """Return whether a tile exists and its checksum is right."""
        return raw_chunk_reader.has_intact_chunk(self.root / _NAME, pair, (self.tile_rows, self.tile_rows))

    def write_tile(self, pair: Pair, values: Array) -> None:
        """Write a tile durably."""
        zarr_store.write_chunk(self.root / _NAME, pair, values)

    def sync_tile(self, pair: Pair) -> None:
        """Flush an existing tile to disk, because the process that wrote it may have been killed before it did so."""
        with local.translate_write_errors(self.root):
            zarr_store.sync_chunk(self.root / _NAME, pair)

    def mark_complete(self) -> None:
        """Record that all tiles have been written."""
        with local.translate_write_errors(self.root):
            zarr_store.write_completion_marker(self.root, {"tiles": count_lower_tiles(self.blocks)})

    def _file(self, pair: Pair) -> Path:
        return self.root / _NAME / "c" / str(pair[0]) / str(pair[1])


_tile_buffers = ThreadBuffer(), ThreadBuffer()


def open_tile_store(root: Path, identity: dict[str, object], n: int, tile_rows: int) -> TileStore:
    """Open the store of a factor, or create it; an existing store keeps its tile rows.

    Raises
    ------
    StoreExistsError
        Something else is at the path.
    """
    begun = build.check_and_get_tile_rows(root, _NAME, identity, None)
    if begun is None:
        attributes = {"identity": identity, "tile_rows": tile_rows, "run": uuid.uuid4().hex}
        try:
            with zarr_store.new_store(root, _NAME, attributes, [_NAME]) as group:
                zarr_store.add_array(group, _NAME, (n, n), (tile_rows, tile_rows))
        except StoreExistsError:  # another process has just created it
            begun = build.check_and_get_tile_rows(root, _NAME, identity, None)
            if begun is None:
                raise
    else:
        own_files.remove_partial_files(root, store_metadata.read_own_attributes(root, _NAME), local.ABANDONED_SECONDS)
    return TileStore(root, n, begun or tile_rows, str(store_metadata.read_own_attributes(root, _NAME).get("run", "")))


def count_lower_tiles(blocks: int) -> int:
    """Return the number of tiles on and below the diagonal.

    >>> count_lower_tiles(3)
    6
    """
    return blocks * (blocks + 1) // 2


def disk_bytes(n: int, tile_rows: int) -> int:
    """Return the bytes on disk of the lower tiles of a factor, in whole tiles.

    >>> disk_bytes(40_000, 2000)
    6720000000
    """
    return 8 * tile_rows * tile_rows * count_lower_tiles(chunking.count_tiles(n, tile_rows))
