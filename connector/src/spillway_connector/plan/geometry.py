"""Sizes: the bytes that a chunk takes, and the chunks that a budget holds.

A chunk is the unit of offload: `blocks_per_chunk` device blocks of every rank of the replica. In the CPU tier it
is one row, |rank 0|rank 1|...|padding|, padded to a page so that direct I/O can read and write it in place. Where all
ranks of a pipeline stage hold the same KV (MLA's latents), a row has one cell for each stage: each of its ranks fills
its share of it, and loads all of it. Cells are of one size, that of the stage with the most KV.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

from spillway_connector.errors import ConfigError

# A page of the kernel, which mlock, madvise and registration with a device work in (64 KiB on some of Arm), and at
# least what direct I/O needs.
ROW_ALIGNMENT_BYTES = max(4096, mmap.PAGESIZE)


@dataclass(frozen=True, slots=True)
class ChunkGeometry:
    """Byte layout of one CPU-tier row."""

    rank_block_bytes: int  # KV bytes of one device block on the rank that holds most, all its layers
    blocks_per_chunk: int
    num_ranks: int
    one_cell: bool = False  # all ranks of a stage hold the same KV, and a row holds it once
    page_bytes: int = ROW_ALIGNMENT_BYTES
    stages: int = 1  # of the pipeline; equally many ranks each, those of the first stage first

    @property
    def rank_cell_bytes(self) -> int:
        """Bytes of one rank's KV of a chunk."""
        return self.rank_block_bytes * self.blocks_per_chunk

    @property
    def num_cells(self) -> int:
        return self.stages if self.one_cell else self.num_ranks

    @property
    def stage_ranks(self) -> int:
        return self.num_ranks // self.stages

    def cell_of(self, rank: int) -> int:
        """Offset of a rank's KV in a row, in bytes."""
        return (rank // self.stage_ranks if self.one_cell else rank) * self.rank_cell_bytes

    def store_share(self, rank: int) -> tuple[int, int]:
        """(n, count): a store copies part n of `count` equal parts of the cell on this rank. A load copies all of it on
        every rank."""
        return (rank % self.stage_ranks, self.stage_ranks) if self.one_cell else (0, 1)

    @property
    def payload_bytes(self) -> int:
        """Bytes of a row that carry KV: what a shared tier stores."""
        return self.rank_cell_bytes * self.num_cells

    @property
    def layout_bytes(self) -> int:
        """The part of row 0 where each rank tells the scheduler of its caches before a row is in use (kv_layout.py)."""
        return self.payload_bytes // self.num_ranks

    @property
    def row_bytes(self) -> int:
        """Distance between rows: the payload rounded up to a page."""
        return -(-self.payload_bytes // self.page_bytes) * self.page_bytes

    def own_pages(self, rank: int) -> tuple[int, int]:
        """The whole pages of each row that lie on this rank's memory node: (offset, length) in bytes.

        Those of all ranks are the row. A page that holds the end of one cell and the start of the next belongs to the
        next.
        """
        return self._first_page(rank), self._first_page(rank + 1) - self._first_page(rank)

    def _first_page(self, rank: int) -> int:
        if rank == self.num_ranks:
            return self.row_bytes
        start = rank * self.row_bytes // self.num_ranks if self.one_cell else self.cell_of(rank)
        return start // self.page_bytes * self.page_bytes

    def rows_in(self, cpu_bytes: int) -> int:
        """Rows that fit into a byte budget of the whole replica. Raises ConfigError when none does."""
        rows = cpu_bytes // self.row_bytes
        if rows < 1:
            raise ConfigError(
                f"cpu_bytes_to_use: {cpu_bytes} bytes hold no chunk of {self.row_bytes} bytes; "
                f"set cpu_bytes_to_use >= {self.row_bytes} or lower blocks_per_chunk ({self.blocks_per_chunk})"
            )
        return rows
