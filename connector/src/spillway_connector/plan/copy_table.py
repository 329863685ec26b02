"""Choice of the path that copies pieces of one size between a CUDA device and the host: a measured table, not a rule.

    loop    one call for each piece
    batch   one call for thousands of pieces (cuMemcpyBatchAsync, from CUDA 12.8)
    staged  a kernel gathers the pieces into a buffer on the device, which crosses the link in long bursts; loads the
            reverse

`make bench-copy` measures all three for every size and prints the table that fits the machine.
"""

from __future__ import annotations

import itertools
from typing import Final, Literal

import msgspec

from spillway_settings.byte_sizes import ByteCount

Path = Literal["loop", "batch", "staged"]
LOOP: Final = "loop"
BATCH: Final = "batch"
STAGED: Final = "staged"
PATHS = (LOOP, BATCH, STAGED)
Rows = tuple[tuple[ByteCount, Path], ...]


class CopyTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Paths of copies, per direction: (pieces up to this many bytes, path), ascending; larger pieces than in the last
    row go in a batch.

    Read from {"store": [[65536, "staged"]], "load": []}, as bench-copy writes it.
    """

    store: Rows = ()
    load: Rows = ()

    def __post_init__(self) -> None:
        for name, rows in (("store", self.store), ("load", self.load)):
            limits = [limit for limit, _ in rows]
            if any(later <= limit for limit, later in itertools.pairwise(limits)):
                raise ValueError(f"{name} has the sizes {limits}; each needs to be larger than the one before it")

    def store_path(self, piece_bytes: float) -> str:
        """The path of copies from the device to the host."""
        return _path(self.store, piece_bytes)

    def load_path(self, piece_bytes: float) -> str:
        """The path of copies from the host to the device."""
        return _path(self.load, piece_bytes)

    @property
    def uses_staging(self) -> bool:
        return any(path == STAGED for _, path in self.store + self.load)


# One H200 (PCIe 5), medians of bench-copy; docs/cuda.md has the figures.
_STAGED_BELOW: Rows = ((ByteCount(524_288), STAGED),)
H200_TABLE = CopyTable(store=_STAGED_BELOW, load=_STAGED_BELOW)


def _path(rows: Rows, piece_bytes: float) -> str:
    return next((path for limit, path in rows if piece_bytes <= limit), BATCH)
