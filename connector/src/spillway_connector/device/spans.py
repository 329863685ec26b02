"""The addresses and lengths that one call of a runtime copies, in one direction."""

from __future__ import annotations

from dataclasses import dataclass

from spillway_connector.device.copier import Direction
from spillway_connector.plan.copies import Addresses, CopyPlan


@dataclass(frozen=True, slots=True)
class Spans:
    """Sources, targets and lengths of copies: shape (n,) int64 each, contiguous."""

    targets: Addresses
    sources: Addresses
    sizes_bytes: Addresses

    @classmethod
    def of(cls, direction: Direction, plan: CopyPlan) -> Spans:
        targets, sources = plan.host_addresses, plan.device_addresses
        if direction is Direction.LOAD:
            targets, sources = sources, targets
        return cls(targets, sources, plan.sizes_bytes)

    def describe(self, index: int) -> str:
        target, source = int(self.targets[index]), int(self.sources[index])
        return (
            f"descriptor {index} of {len(self.sizes_bytes)}: 0x{source:x} -> 0x{target:x}, "
            f"{int(self.sizes_bytes[index])} bytes"
        )
