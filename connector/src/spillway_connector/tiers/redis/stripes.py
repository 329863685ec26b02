"""Division of a block into one or several Redis values: names and ranges, without I/O.

While a single-threaded server transfers a value of 20 MB, its other clients wait, and no eviction can free less than
all of it. So a block above STRIPE_BYTES_MAX is cut into stripes of nearly equal size, each a frame. The last has the
block's plain name and is written last: it is the commit record that lookups ask for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spillway_connector.errors import CorruptReason, TierCorrupt
from spillway_connector.tiers.frame import FrameHeader, digest_of_parts

STRIPE_BYTES_MAX = 4 * 1024 * 1024
_STRIPE_STEP_BYTES = 4096


@dataclass(frozen=True, slots=True)
class StripePlan:
    """Start and end of each stripe within the payload, in bytes; the last is the commit record."""

    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, payload_bytes: int, stripe_bytes_max: int = STRIPE_BYTES_MAX) -> StripePlan:
        """Cut ``payload_bytes`` into the fewest stripes of at most ``stripe_bytes_max`` (a multiple of 4096)."""
        if payload_bytes <= stripe_bytes_max:
            return cls(((0, payload_bytes),))
        count = -(-payload_bytes // stripe_bytes_max)
        step = -(-payload_bytes // (count * _STRIPE_STEP_BYTES)) * _STRIPE_STEP_BYTES
        return cls(tuple((at, min(at + step, payload_bytes)) for at in range(0, payload_bytes, step)))

    @property
    def count(self) -> int:
        return len(self.ranges)

    @property
    def commit_index(self) -> int:
        return len(self.ranges) - 1

    def names(self, block_name: bytes) -> list[bytes]:
        """The Redis key of every stripe: ``<block>:<index>``, and ``<block>`` itself for the commit record."""
        return [b"%b:%d" % (block_name, index) for index in range(self.commit_index)] + [block_name]


def check_together(headers: Sequence[FrameHeader]) -> None:
    """Verify that stripes, each valid by itself and all of them there, belong to one block. Raises TierCorrupt.

    Two engines may compute the same block to different bits and write it at the same time. The server can then hold
    stripes of both, which the set digests show.
    """
    if len(headers) == 1:
        return
    whole = digest_of_parts([header.payload_digest for header in headers])
    if any(header.part.set_digest != whole for header in headers):
        raise TierCorrupt(CorruptReason.PAYLOAD, "valid stripes of different blocks: two engines wrote at once")
