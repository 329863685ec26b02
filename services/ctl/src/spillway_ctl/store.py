"""The interface of a shared tier for the commands, whatever it is kept in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from spillway_connector.tiers.inspection import CheckPayload, Damage, Removal, StoredFrame, StoredNamespace


@dataclass(frozen=True, slots=True)
class Extent:
    """used_bytes: the bytes that count against limit_bytes, as the store counts it; None: it cannot tell, or there is
    no limit.

    limit_means: where the limit comes from, in words.
    """

    used_bytes: int | None
    limit_bytes: int | None
    limit_means: str


class Store(Protocol):
    """A tier under inspection while engines use it. Every method may raise TierError: it refused or gave no answer."""

    @property
    def kind(self) -> str:
        """ "nvme", "redis" or "s3"."""
        ...

    @property
    def layout(self) -> str:
        """ "files", "slab", "files and slab", "server", "sentinel", "cluster", "bucket"; "" while there is nothing."""
        ...

    @property
    def location(self) -> str:
        """The directory, or the URL without a login."""
        ...

    def now_s(self) -> float:
        """Seconds since 1970 by the clock of frames' ages."""
        ...

    def check(self) -> None:
        """Raises TierError if this is no store of Spillway's and will not become one by itself."""
        ...

    def notes(self) -> list[str]:
        """Sentences on what is not as it should be, beyond single frames."""
        ...

    def extent(self) -> Extent: ...

    def namespaces(self) -> Iterator[StoredNamespace]:
        """The namespaces whose document or folder is there; blocks may lie in others."""
        ...

    def frames(self, *, headers: bool, namespace_prefix: str = "") -> Iterator[StoredFrame]:
        """Walk the frames of the namespaces whose hex digits begin with ``namespace_prefix``.

        headers: read and check each frame's header, which is what tells key and creation, and the tenant for sure.
        """
        ...

    def share_walked(self) -> float | None:
        """Share of the latest walk that is done, 0 to 1; None: unknown."""
        ...

    def verify(self, frame: StoredFrame, check_payload: CheckPayload | None = None) -> Damage | None:
        """Read all of a frame and prove it whole. Raises Gone."""
        ...

    def remove(self, frames: Sequence[StoredFrame], *, only_unused: bool) -> Removal:
        """Remove frames. only_unused: keep those that were used since the walk saw them."""
        ...

    def sweep(self, namespace: bytes) -> None:
        """Remove what remains of a namespace whose frames have all been removed. Documents of NVMe tiers stay."""
        ...

    def close(self) -> None: ...
