"""Hints of prefixes whose requests wait in front of the engine: `EngineCore.spillway_promote(token_ids, cache_salt)`.

The engine service's middleware calls it like one of vLLM's own utilities, over the API server's line to EngineCore, so
it runs on the scheduler's thread and between two steps. The tokens are hashed as a request's are.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from spillway_connector.engine.patches.own_connector import own_connector

_numbers = itertools.count()


class HintOutcome(StrEnum):
    ACCEPTED = "accepted"
    BUSY = "busy"  # too many hints wait, too many were wrong, or hashing them takes too much time
    OFF = "off"  # nothing is promoted ahead here


@runtime_checkable
class HintListener(Protocol):
    """A connector that promotes prefixes ahead."""

    def hint_refused(self) -> HintOutcome | None:
        """Return why a hint would be refused now, or None if it would be accepted."""
        ...

    def prefix_expected(self, request: Request, hashing_seconds: float) -> None:
        """A request with this prefix may come. hashing_seconds: what its hashes have taken."""
        ...


def promote_utility(_: None) -> Callable[..., str]:
    """Make the function that is added to EngineCore, which has no such utility."""
    return _promote


def _promote(core: Any, token_ids: Sequence[int], cache_salt: str | None) -> str:
    """Take one hint. Returns the value of a HintOutcome."""
    connector = own_connector(core.scheduler, HintListener)  # type: ignore[type-abstract]
    if connector is None or core.request_block_hasher is None:
        return HintOutcome.OFF.value
    refused = connector.hint_refused()
    if refused is not None:
        return refused.value
    begun = time.monotonic()
    request = Request(
        request_id=f"spillway hint {next(_numbers)}",
        prompt_token_ids=list(token_ids),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        cache_salt=cache_salt,
        block_hasher=core.request_block_hasher,
    )
    connector.prefix_expected(request, time.monotonic() - begun)
    return HintOutcome.ACCEPTED.value
