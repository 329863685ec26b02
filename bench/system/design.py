"""The design of an engine: the tiers and the queue in which the compared systems differ."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Storing(StrEnum):
    """Times at which a device block is copied to the CPU tier."""

    NEVER = "never"
    EAGER = "eager"  # when it is computed: Spillway's default and vLLM's OffloadingConnector
    LAZY = "lazy"  # when it nears the end of the device's free queue: vLLM's SimpleCPUOffloadConnector
    EXCLUSIVE = "exclusive"  # before the device gives it up; what the device holds leaves the CPU tier first


class Answers(StrEnum):
    """Whether the KV of answers is copied to the CPU tier (offload.generatedTokens)."""

    OFF = "off"
    ON = "on"
    AUTO = "auto"  # as long as enough answers are sent back, by the connector's own count


@dataclass(frozen=True, slots=True)
class Design:
    """One engine's tiers and queue.

    Args:
        storing: when blocks are copied to the CPU tier.
        protect_share: share of the CPU tier's rows that requests in the engine's queue may keep; 0: they keep none.
        overtake_seconds: how long others may be admitted before a request that waits, those with the most tokens at
            hand first; 0: first come, first served.
        endless: the CPU tier never evicts.
        node: the engines share one CPU tier with the rows of all of them, which outlives each.
        shared: an NVMe tier that all engines share is below it.
        bucket_ms: round trip, in milliseconds, to an object store below the NVMe tier; None: there is none.
        recognised: the CPU tier follows conversations, by their prompts alone.
        named: the CPU tier follows the sessions that requests name.
        hold_share: share of the CPU tier's rows for prompts that requests ask to retain; 0: nothing is held.
        answers: whether answers are kept; None: an eager tier keeps none, the others keep all that the device frees.
        fair_steps: a step that has other prompts computes none of a flood's, as with offload.fairSteps.
    """

    storing: Storing = Storing.EAGER
    protect_share: float = 0.0
    overtake_seconds: float = 0.0
    endless: bool = False
    node: bool = False
    shared: bool = False
    bucket_ms: float | None = None
    recognised: bool = False
    named: bool = False
    hold_share: float = 0.0
    answers: Answers | None = None
    fair_steps: bool = False
