"""Which path copies pieces of which size between a CUDA device and the host: a measured table, not a rule.

    loop    one call for each piece
    batch   one call for thousands of pieces (cuMemcpyBatchAsync, from CUDA 12.8)
    staged  a kernel gathers the pieces into a buffer on the device, which crosses the link in long bursts; loads the
            reverse

`make bench-copy` measures all three for every size and prints the table that fits the machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spillway_connector.errors import ConfigError

LOOP, BATCH, STAGED = "loop", "batch", "staged"
PATHS = (LOOP, BATCH, STAGED)


@dataclass(frozen=True, slots=True)
class CopyTable:
    """Per direction: (pieces up to this many bytes, path), ascending; beyond the last row, batch."""

    store: tuple[tuple[int, str], ...]
    load: tuple[tuple[int, str], ...]

    def store_path(self, piece_bytes: float) -> str:
        """From device to host."""
        return _path(self.store, piece_bytes)

    def load_path(self, piece_bytes: float) -> str:
        """From host to device."""
        return _path(self.load, piece_bytes)

    @property
    def uses_staging(self) -> bool:
        return any(path == STAGED for _, path in self.store + self.load)

    @classmethod
    def parse(cls, given: Mapping[str, Sequence[Sequence[object]]]) -> CopyTable:
        """{"store": [[65536, "staged"]], "load": []}, as bench-copy writes it. Raises ConfigError."""
        unknown = set(given) - {"store", "load"}
        if unknown:
            raise ConfigError(f"copy_table: unknown key {sorted(unknown)[0]!r}; known keys: store, load")
        sides: dict[str, tuple[tuple[int, str], ...]] = {}
        for side in ("store", "load"):
            rows: list[tuple[int, str]] = []
            for row in given.get(side, ()):
                limit, path = row if len(row) == 2 else (None, None)
                if not isinstance(limit, int) or path not in PATHS or (rows and limit <= rows[-1][0]):
                    raise ConfigError(
                        f"copy_table: {side}: {row!r} is not [bytes, {' | '.join(PATHS)}] with bytes in ascending order"
                    )
                rows.append((limit, str(path)))
            sides[side] = tuple(rows)
        return cls(**sides)


# One H200 (PCIe 5), medians of bench-copy; docs/cuda.md has the figures.
H200_TABLE = CopyTable(store=((524_288, STAGED),), load=((524_288, STAGED),))


def _path(rows: tuple[tuple[int, str], ...], piece_bytes: float) -> str:
    return next((path for limit, path in rows if piece_bytes <= limit), BATCH)
