"""The places of header and payload of a frame on a disk. Pure.

Direct I/O moves whole pages between a file and memory that begins with a page, so a payload begins with a page. If its
last page has room for a header, the header ends that page; else it has a page of its own in front of the payload.
"""

from __future__ import annotations

from dataclasses import dataclass

from spillway_connector.tiers.frame import HEADER_BYTES, PAGE_BYTES, FrameHeader


@dataclass(frozen=True, slots=True)
class FramePlaces:
    """The offsets of a frame's parts, in bytes from its start.

    Args:
        payload_bytes: Bytes of the payload.
        header_is_last: Whether the header ends the frame's last page.
    """

    payload_bytes: int
    header_is_last: bool

    @classmethod
    def of(cls, payload_bytes: int) -> FramePlaces:
        """Return the places of a frame with this payload."""
        return cls(payload_bytes, 0 < payload_bytes % PAGE_BYTES <= PAGE_BYTES - HEADER_BYTES)

    @classmethod
    def announced(cls, header: FrameHeader) -> FramePlaces:
        """Return the places that the frame's header states: earlier versions gave each header a page."""
        return cls(header.payload_bytes, header.header_bytes < PAGE_BYTES)

    @property
    def header_bytes(self) -> int:
        return HEADER_BYTES if self.header_is_last else PAGE_BYTES

    @property
    def header_at(self) -> int:
        return self.frame_bytes - HEADER_BYTES if self.header_is_last else 0

    @property
    def payload_at(self) -> int:
        return 0 if self.header_is_last else PAGE_BYTES

    @property
    def tail_bytes(self) -> int:
        """Bytes of the payload in the last page, if the payload does not fill it."""
        return self.payload_bytes % PAGE_BYTES

    @property
    def frame_bytes(self) -> int:
        """The size of the frame: whole pages."""
        held_bytes = self.header_bytes + self.payload_bytes
        return -(-held_bytes // PAGE_BYTES) * PAGE_BYTES


def last_header_at(frame_bytes: int) -> int:
    """Return the offset of a header that ends a frame of this size."""
    return max(0, frame_bytes - HEADER_BYTES)
