"""The events that an engine publishes about its caches, as plain values; wire/kv_event_encoding.py encodes them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import StrEnum

from spillway_settings.wire import NODE_STORE, store_medium


class Medium(StrEnum):
    """Names on the wire. A shared tier's names the one store from which all simulated engines load, as Spillway's
    connector does; blocks without keys there announce that an engine loads from it. BELOW: the tier behind SHARED.
    NODE: a CPU tier that all simulated engines share."""

    DEVICE = "GPU"
    CPU = "CPU"
    NODE = store_medium(NODE_STORE, b"simulate")
    SHARED = store_medium("redis", b"simulate")
    BELOW = store_medium("s3", b"simulate")


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """keys: consecutive blocks, in position order. parent: key before the first, None at the start of a prompt.
    tokens: of all listed blocks, for the device; empty for the lower tiers, as vLLM 0.23 announces them."""

    medium: Medium
    keys: tuple[int, ...]
    parent: int | None = None
    tokens: array[int] | None = None
    salt: str | None = None  # of a chain's first block


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    medium: Medium
    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DeviceCleared:
    """Every block of the device is dropped; lower tiers keep theirs."""


KvEvent = BlocksStored | BlocksRemoved | DeviceCleared
