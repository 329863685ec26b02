"""The keeper of a node: makes the regions that engines ask for, and releases what killed engines had claimed.

What it makes belongs to no engine, so its memory counts as the keeper's. No copy goes through it: engines that have a
region need it no more, and one that starts again finds everything in the files.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from spillway_connector.errors import HostMemoryError, TierTimeout
from spillway_connector.node.region import REFUSED, WANTED, NodeRegion
from spillway_connector.own_files import clear_the_place, unlink_own, write_new
from spillway_connector.plan.node_index import FREE, READY, RESERVED, WRITING
from spillway_connector.tiers.disk.slab.writers import new_number

logger = logging.getLogger(__name__)

_FOLDER = "rows-"
_DEPTH = 2
# Beside the rows: the kernel's list of their pages, and the page tables of the process that takes them.
_OVERHEAD_SHARE = 128


@dataclass(frozen=True, slots=True)
class RegionState:
    """The contents of a region a moment ago."""

    row_bytes: int
    num_rows: int
    rows: dict[int, int]  # by FREE, WRITING, READY, RESERVED
    engines: int
    namespaces: dict[bytes, int]  # -> rows with a chunk


@dataclass(slots=True)
class NodeKeeper:
    """One thread.

    Attributes:
        path: Where the engines of this node look for their rows.
        region_bytes: Size of one region, which holds all rows of one size.
        sizes_max: How many sizes of rows there may be; unused ones make room for others.
        room: Bytes of memory that this process may take, and who bounds them.
        clock: The engines' clock; they date each use of a row by it.
        released_rows: How many rows of killed engines were freed since the start.
        refusals: For each row size without a region, the reason in one sentence.
    """

    path: Path
    region_bytes: int
    sizes_max: int
    room: Callable[[], tuple[int, str]]
    clock: Callable[[], float] = time.monotonic
    released_rows: int = 0
    refusals: dict[int, str] = field(default_factory=dict)
    _regions: dict[int, NodeRegion] = field(default_factory=dict)

    def tick(self) -> None:
        """Answer who asks, and look for engines that have ended. A failure in one folder does not stop the work on
        another. Raises OSError if the path cannot be read."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for row_bytes in self._sizes():
            try:
                if row_bytes not in self._regions:
                    self._find(row_bytes)
                if (self._folder(row_bytes) / WANTED).exists():
                    self._answer(row_bytes)
            except OSError as error:
                logger.warning("%s cannot be used: %s", self._folder(row_bytes), error)
        for row_bytes, region in list(self._regions.items()):
            try:
                self._look_after(row_bytes, region)
            except TierTimeout as error:
                logger.warning("%s", error)
            except OSError as error:
                logger.warning("%s is another one now: %s", region.path, error)
                self._forget(row_bytes)

    def states(self) -> list[RegionState]:
        return [
            RegionState(
                row_bytes,
                region.num_rows,
                region.index.count(),
                region.index.engines(),
                region.index.count_namespaces(),
            )
            for row_bytes, region in sorted(self._regions.items())
        ]

    def close(self) -> None:
        """Close this process's files. The regions stay."""
        for row_bytes in list(self._regions):
            self._forget(row_bytes)

    def remove(self) -> list[int]:
        """Give back the memory of all regions that no engine uses. Returns the row sizes of the regions that are still
        used."""
        self.tick()
        return [row_bytes for row_bytes in list(self._regions) if not self._remove(row_bytes)]

    def _sizes(self) -> Iterator[int]:
        for folder in sorted(self.path.glob(f"{_FOLDER}*")):
            with suppress(ValueError):
                yield int(folder.name.removeprefix(_FOLDER))

    def _folder(self, row_bytes: int) -> Path:
        return self.path / f"{_FOLDER}{row_bytes}"

    def _find(self, row_bytes: int) -> None:
        """Take over a region that is there."""
        if (self._folder(row_bytes) / "index").exists():
            self._open(row_bytes, kept_seconds=0.0)

    def _open(self, row_bytes: int, kept_seconds: float | None) -> str | None:
        """Open or make the region. Returns why there is none; None if there is one."""
        try:
            region = NodeRegion(
                self.path, self.region_bytes // row_bytes, row_bytes, new_number(), kept_seconds=kept_seconds
            )
        except HostMemoryError as error:
            return str(error)
        region.look_after()
        self._regions[row_bytes] = region
        return None

    def _answer(self, row_bytes: int) -> None:
        folder = self._folder(row_bytes)
        why = None
        if row_bytes not in self._regions:
            why = self._why_not(row_bytes)
            if why is None:
                begun = self.clock()
                logger.info("making %s: %d bytes", folder, self.region_bytes // row_bytes * row_bytes)
                why = self._open(row_bytes, kept_seconds=None)
                if why is None:
                    logger.info("made %s in %.1f s", folder, self.clock() - begun)
        if why is None:
            self.refusals.pop(row_bytes, None)
        else:
            logger.error("%s is refused: %s", folder, why)
            self.refusals[row_bytes] = why
            clear_the_place(folder / REFUSED, _DEPTH)
            unlink_own(folder / REFUSED, _DEPTH, missing_ok=True)
            write_new(folder / REFUSED, _DEPTH, why.encode())
        clear_the_place(folder / WANTED, _DEPTH)
        unlink_own(folder / WANTED, _DEPTH, missing_ok=True)

    def _why_not(self, row_bytes: int) -> str | None:
        if row_bytes < 1 or self.region_bytes < row_bytes:
            return f"{self.region_bytes} bytes for each size hold no chunk of {row_bytes} bytes; raise the tier's bytes"
        for other in list(self._regions):
            if len(self._regions) >= self.sizes_max:
                self._remove(other)
        if len(self._regions) >= self.sizes_max:
            others = ", ".join(str(each) for each in sorted(self._regions))
            return (
                f"{self.path} has rows of {others} bytes in use and room for {self.sizes_max} size(s); an engine asks "
                f"for {row_bytes} bytes: give it another path, or the same model shape, dtype and blocksPerChunk"
            )
        needed = self.region_bytes + self.region_bytes // _OVERHEAD_SHARE
        available, source = self.room()
        with suppress(FileNotFoundError):  # what is replaced
            available += (self._folder(row_bytes) / "rows").stat().st_blocks * 512
        if needed > available:
            return (
                f"the rows and what the kernel keeps of them take {needed} bytes, and {available} are available "
                f"({source}); lower the tier's bytes"
            )
        return None

    def _look_after(self, row_bytes: int, region: NodeRegion) -> None:
        region.require_files()
        with region.changing():
            self.released_rows += region.sweep(None, int(self.clock() * 1000))
        if region.num_rows != self.region_bytes // row_bytes and not region.index.engines():
            self._remove(row_bytes)

    def _remove(self, row_bytes: int) -> bool:
        region = self._regions[row_bytes]
        if not region.remove_if_unused():
            return False
        logger.info("%s is removed: no engine uses it", region.path)
        self._forget(row_bytes)
        return True

    def _forget(self, row_bytes: int) -> None:
        self._regions.pop(row_bytes).close()


def state_names() -> dict[int, str]:
    """The words for the states of a row."""
    return {FREE: "free", WRITING: "writing", READY: "ready", RESERVED: "reserved"}
