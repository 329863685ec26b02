"""How many bytes a chunk takes, and how many chunks a budget holds.

A chunk is the unit of offload: `blocks_per_chunk` device blocks of every rank of the replica. In the CPU tier it
is one row, |rank 0|rank 1|...|padding|, padded to a page so that direct I/O can read and write it in place.
"""

from __future__ import annotations

from dataclasses import dataclass

from spillway_connector.errors import ConfigError

ROW_ALIGNMENT_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ChunkGeometry:
    """Byte layout of one CPU-tier row."""

    rank_block_bytes: int  # KV bytes of one device block on one rank, all layers
    blocks_per_chunk: int
    num_ranks: int

    @property
    def rank_cell_bytes(self) -> int:
        """Bytes of one rank's part of a row; rank r starts at r times this."""
        return self.rank_block_bytes * self.blocks_per_chunk

    @property
    def payload_bytes(self) -> int:
        """Bytes of a row that carry KV: what a shared tier stores."""
        return self.rank_cell_bytes * self.num_ranks

    @property
    def row_bytes(self) -> int:
        """Distance between rows: the payload rounded up to a page."""
        return -(-self.payload_bytes // ROW_ALIGNMENT_BYTES) * ROW_ALIGNMENT_BYTES

    def rows_in(self, cpu_bytes: int) -> int:
        """Rows that fit into a byte budget of the whole replica. Raises ConfigError when none does."""
        rows = cpu_bytes // self.row_bytes
        if rows < 1:
            raise ConfigError(
                f"cpu_bytes_to_use: {cpu_bytes} bytes hold no chunk of {self.row_bytes} bytes; "
                f"set cpu_bytes_to_use >= {self.row_bytes} or lower blocks_per_chunk ({self.blocks_per_chunk})"
            )
        return rows
