"""Time for which clients ask for their prompt's KV to be kept, as OpenAI's and Anthropic's APIs write it.

- OpenAI, Chat Completions and Responses: `prompt_cache_retention` (`24h`; `in_memory` asks for nothing) and
  `prompt_cache_options.ttl` (`30m`), for the whole prompt.
- Anthropic: `cache_control: {"type": "ephemeral", "ttl": "5m" | "1h"}` of a block or a tool, for the prompt up to it,
  and at the top level, for the whole prompt.

The granted retention is within the tenant's ceiling and goes to the engine in the body's `kv_transfer_params`, as
`spillway_retention` (engine_fields.py), with the share of each tier that the tenant may retain.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from spillway_gateway.access.keys import Tenant
from spillway_gateway.config.settings import RetentionConfig
from spillway_gateway.errors import ClientBadRequest
from spillway_gateway.tokens.estimates import value_tokens
from spillway_settings.wire import RETENTION_MARKS, RETENTION_SHARE

_OPENAI_RETENTIONS: Mapping[object, float | None] = {None: None, "in_memory": None, "in-memory": None, "24h": 86_400.0}
_ANTHROPIC_SECONDS: Mapping[object, float] = {"5m": 300.0, "1h": 3_600.0}
_TTL = re.compile(r"([1-9][0-9]{0,4})([smhd])")
_UNIT_SECONDS = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}


class RetentionMark(NamedTuple):
    """part: the share of the prompt's tokens, from the first on; 1: all of them."""

    part: float
    seconds: float


Marks = tuple[RetentionMark, ...]
"""The retention that a body asks for: one mark for each length of time, the furthest."""


class Retention(NamedTuple):
    """The retention that a request is granted. member: for the engine."""

    member: dict[str, Any]
    token_hours: float
    shortened: bool


def openai_marks(retention: object, options: object) -> Marks:
    """Return the marks of `prompt_cache_retention` and `prompt_cache_options`. Raises ClientBadRequest."""
    if retention is None and options is None:
        return ()
    if not isinstance(retention, str | None) or retention not in _OPENAI_RETENTIONS:
        raise _bad("prompt_cache_retention", retention, 'send "in_memory" or "24h"')
    asked = [_OPENAI_RETENTIONS[retention]]
    if options is not None:
        if not isinstance(options, dict):
            raise _bad("prompt_cache_options", options, 'send an object, such as {"ttl": "30m"}')
        ttl = options.get("ttl")
        found = _TTL.fullmatch(ttl) if isinstance(ttl, str) else None
        if ttl is not None and found is None:
            raise _bad("prompt_cache_options.ttl", ttl, 'send a number with s, m, h or d, such as "30m"')
        asked.append(None if found is None else int(found[1]) * _UNIT_SECONDS[found[2]])
    seconds = max((each for each in asked if each is not None), default=None)
    return () if seconds is None else (RetentionMark(1.0, seconds),)


def anthropic_marks(top: object, tools: object, system: object, messages: Sequence[Mapping[str, Any]]) -> Marks:
    """Return the marks of `cache_control` at the top level, in tools, system and messages. Raises ClientBadRequest."""
    furthest: dict[float, float] = {}  # by seconds: tokens up to the mark, estimated
    tokens = 0
    for name, item in _items(tools, system, messages):
        tokens += value_tokens(item)
        if isinstance(item, dict) and item.get("cache_control") is not None:
            furthest[_seconds(f"{name}.cache_control", item["cache_control"])] = tokens
    marks = {seconds: min(1.0, found / max(1, tokens)) for seconds, found in furthest.items()}
    if top is not None:
        marks[_seconds("cache_control", top)] = 1.0
    return tuple(RetentionMark(part, seconds) for seconds, part in marks.items())


def _items(tools: object, system: object, messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, object]]:
    """Yield the items that a mark can stand on, in the order of the prompt; texts by themselves too, for the length."""
    for name, items in (("tools", tools), ("system", system)):
        for at, item in enumerate(items if isinstance(items, list) else [items]):
            yield f"{name}[{at}]", item
    for at, message in enumerate(messages):
        content = message.get("content")
        for number, block in enumerate(content if isinstance(content, list) else [content]):
            yield f"messages[{at}].content[{number}]", block


def _seconds(name: str, control: object) -> float:
    if not isinstance(control, dict) or control.get("type") != "ephemeral":
        raise _bad(name, control, 'send {"type": "ephemeral"}')
    ttl = control.get("ttl")
    if ttl is None:
        ttl = "5m"
    if not isinstance(ttl, str) or ttl not in _ANTHROPIC_SECONDS:
        raise _bad(f"{name}.ttl", ttl, 'send "5m" or "1h"')
    return _ANTHROPIC_SECONDS[ttl]


def _bad(name: str, given: object, remedy: str) -> ClientBadRequest:
    shown = repr(given)
    return ClientBadRequest(f"{name}: {shown if len(shown) <= 80 else shown[:80] + '...'} given; {remedy}", name)


def granted(marks: Marks, prompt_tokens: int, tenant: Tenant, config: RetentionConfig) -> Retention | None:
    """Return the retention that a body asks for, within the tenant's ceiling; None: the tenant gets no retention."""
    seconds_max = config.seconds_max if tenant.retention_seconds_max is None else tenant.retention_seconds_max
    share = config.tier_share if tenant.retention_tier_share is None else tenant.retention_tier_share
    if not seconds_max or not share:
        return None
    longest: dict[float, float] = {}  # by part
    for part, seconds in marks:
        longest[part] = max(longest.get(part, 0.0), min(seconds, seconds_max))
    pairs = [[None if part >= 1 else math.ceil(part * prompt_tokens), seconds] for part, seconds in longest.items()]
    return Retention(
        {RETENTION_MARKS: pairs, RETENTION_SHARE: share},
        _token_hours(longest, prompt_tokens),
        any(seconds > seconds_max for _, seconds in marks),
    )


def _token_hours(longest: Mapping[float, float], prompt_tokens: int) -> float:
    """Return the token-hours. Each token counts for the longest time that it is kept."""
    hours, before = 0.0, 0.0
    for part in sorted(longest):
        seconds = max(each for further, each in longest.items() if further >= part)
        hours += (part - before) * prompt_tokens * seconds / 3600
        before = part
    return hours
