"""Faults by name, as the admin endpoint takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

DRAINING = "draining"  # what an engine pod answers while it shuts down
Count = Annotated[int, msgspec.Meta(ge=1)]


class Kill(msgspec.Struct, frozen=True, tag="kill", tag_field="fault", forbid_unknown_fields=True):
    """The process dies: port and streams are gone. down_seconds: then a new one starts; None: it stays down."""

    down_seconds: Annotated[float, msgspec.Meta(ge=0)] | None = None


class Restart(msgspec.Struct, frozen=True, tag="restart", tag_field="fault", forbid_unknown_fields=True):
    """A new process at the same addresses at once: caches empty, event sequence numbers from 0."""


class Hang(msgspec.Struct, frozen=True, tag="hang", tag_field="fault", forbid_unknown_fields=True):
    """Takes connections and never answers; streams stop. Until cleared."""


class Slow(msgspec.Struct, frozen=True, tag="slow", tag_field="fault", forbid_unknown_fields=True):
    """Every forward pass takes `factor` times as long. Until cleared."""

    factor: Annotated[float, msgspec.Meta(gt=0, le=1_000_000)]


class Refuse(msgspec.Struct, frozen=True, tag="refuse", tag_field="fault", forbid_unknown_fields=True):
    """Inference requests get this status. requests: how many; None: until cleared."""

    status: Annotated[int, msgspec.Meta(ge=400, le=599)] = 503
    requests: Count | None = None


class NotReady(msgspec.Struct, frozen=True, tag="not_ready", tag_field="fault", forbid_unknown_fields=True):
    """/ready answers 503 with this reason. Until cleared."""

    reason: str = DRAINING


class Drain(msgspec.Struct, frozen=True, tag="drain", tag_field="fault", forbid_unknown_fields=True):
    """The engine is not ready, and new requests get 503; running ones have this long. Then it ends with the engine
    service's error. Lasts until it is cleared."""

    timeout_seconds: Annotated[float, msgspec.Meta(ge=0)] = 60.0


class DropEvents(msgspec.Struct, frozen=True, tag="drop_events", tag_field="fault", forbid_unknown_fields=True):
    """The next event batches never arrive. replayable: a replay still has them."""

    batches: Count = 1
    replayable: bool = True


class DieInStream(msgspec.Struct, frozen=True, tag="die_in_stream", tag_field="fault", forbid_unknown_fields=True):
    """The next `requests` replies end after this number of tokens: by a broken connection, or by vLLM's error event."""

    after_tokens: Annotated[int, msgspec.Meta(ge=0)] = 1
    how: Literal["abort", "error_event"] = "abort"
    requests: Count = 1


class ResetPrefixCache(
    msgspec.Struct, frozen=True, tag="reset_prefix_cache", tag_field="fault", forbid_unknown_fields=True
):
    """The device's cache is cleared, lower tiers stay. Refused while requests run."""


class Clear(msgspec.Struct, frozen=True, tag="clear", tag_field="fault", forbid_unknown_fields=True):
    """The end of all faults; a killed engine starts again."""


Fault = Kill | Restart | Hang | Slow | Refuse | NotReady | Drain | DropEvents | DieInStream | ResetPrefixCache | Clear
decode_fault = msgspec.json.Decoder(Fault).decode


@dataclass(slots=True)
class FaultState:
    """The faults that last."""

    hanging: bool = False
    refuse: Refuse | None = None
    refusals_left: int | None = None
    not_ready: str | None = None
    die: DieInStream | None = None
    deaths_left: int = 0

    def refusal(self) -> int | None:
        """Status for the next inference request, counted."""
        if self.refuse is None:
            return None
        if self.refusals_left is not None:
            if self.refusals_left == 0:
                self.refuse = None
                return None
            self.refusals_left -= 1
        return self.refuse.status

    def death(self) -> DieInStream | None:
        """Return how the next reply ends early, and count it."""
        if self.die is None or self.deaths_left == 0:
            return None
        self.deaths_left -= 1
        return self.die
