"""Decodes a batch of KV events that is too long to be decoded at once. Pure.

An engine may announce hundreds of thousands of blocks in one event, and the event loop serves every stream. A long
event is decoded as several: of consecutive blocks, each with the one before as its parent. So whatever is done for an
event is bounded as well.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from itertools import islice

from spillway_gateway.fleet.event_decoder import (
    REMOVED_FIELDS,
    STORED_FIELDS,
    EventBatch,
    KvEvent,
    Undecodable,
    batch_of,
    decode_batch,
    event_of,
    event_of_fields,
)
from spillway_gateway.fleet.msgpack_walk import Container, NotMsgpack, decoded

SHORT_BYTES_MAX = 64 * 1024  # of what is decoded at once
EVENTS_STEP = 250  # short events between two yields
STEP_BYTES = 8 * 1024  # of short events between two yields
PIECE_BLOCKS = 1000  # of a long event
PIECE_TOKENS = 8192
MEMBERS_MAX = 64  # of a batch or of one event, read in one step; vLLM's have up to 3 and 13

_LISTS = ("block_hashes", "token_ids", "extra_keys")


def decode_in_steps(payload: bytes) -> Generator[None, None, EventBatch]:
    """decode_batch(), and each step is short. Raises Undecodable."""
    if len(payload) <= SHORT_BYTES_MAX:
        return decode_batch(payload)
    try:
        batch = _record(payload, 0)
        members: dict[object, tuple[int, int]] = {}
        for position in range(batch.left // 2 if batch.is_map else batch.left):
            name: object = position
            if batch.is_map:
                start, end = yield from batch.skip()
                name = decoded(payload[start : min(end, start + SHORT_BYTES_MAX)])
                if not isinstance(name, str):
                    raise NotMsgpack("a name that is no text")
            members[name] = yield from batch.skip()
        seconds, events = (members.get("ts"), members.get("events")) if batch.is_map else _first_two(members)
        if seconds is None or events is None or seconds[1] - seconds[0] > SHORT_BYTES_MAX:
            raise NotMsgpack("no timestamp or no events")
        return (yield from _events(payload, decoded(payload[slice(*seconds)]), Container(payload, events[0])))
    except NotMsgpack as error:
        raise Undecodable(f"payload of {len(payload)} bytes is no batch of events: {error}") from error


def _first_two(members: Mapping[object, tuple[int, int]]) -> list[tuple[int, int] | None]:
    return [members.get(0), members.get(1)]


def _events(payload: bytes, seconds: object, items: Container) -> Generator[None, None, EventBatch]:
    if items.is_map:
        raise NotMsgpack("events are no list")
    events: list[KvEvent] = []
    undecodable = 0
    step_start = items.at
    for number in range(1, items.left + 1):
        start, end = yield from items.skip()
        if end - start <= SHORT_BYTES_MAX:
            event = event_of(decoded(payload[start:end]))
            if event is not None:
                events.append(event)
            else:
                undecodable += 1
            if number % EVENTS_STEP == 0 or end - step_start > STEP_BYTES:
                step_start = end
                yield
            continue
        try:
            if not (yield from _long_event(payload, start, events)):
                undecodable += 1
        except NotMsgpack:
            undecodable += 1
    return batch_of(seconds, events, undecodable)


def _long_event(payload: bytes, start: int, events: list[KvEvent]) -> Generator[None, None, bool]:
    """Append its pieces. False if it, or the rest of it, is not known."""
    tag, fields, lists = yield from _fields(payload, start)
    if "block_hashes" not in lists or tag not in ("BlockStored", "BlockRemoved"):
        return False
    hashes = lists["block_hashes"]
    tokens, extras = (lists.get("token_ids"), lists.get("extra_keys")) if tag == "BlockStored" else (None, None)
    block_tokens = fields.get("block_size")
    blocks = PIECE_BLOCKS
    if tokens is not None and tokens.left:
        if type(block_tokens) is not int or block_tokens <= 0 or tokens.left != block_tokens * hashes.left:
            return False
        blocks = min(PIECE_BLOCKS, max(1, PIECE_TOKENS // block_tokens))
    while hashes.left:
        piece = dict(fields)
        piece["block_hashes"] = taken = yield from hashes.take(blocks)
        if tokens is not None and tokens.left:
            assert type(block_tokens) is int
            piece["token_ids"] = yield from tokens.take(blocks * block_tokens)
        if extras is not None:
            piece["extra_keys"] = yield from extras.take(blocks)
        event = event_of_fields(tag, piece)
        if event is None:
            return False
        events.append(event)
        fields["parent_block_hash"] = taken[-1]
        yield
    return True


def _fields(
    payload: bytes, start: int
) -> Generator[None, None, tuple[object, dict[str, object], dict[str, Container]]]:
    """An event's tag, its short fields, and its lists by name."""
    event = _record(payload, start)
    spans: dict[str, tuple[int, int]] = {}
    if event.is_map:
        for _ in range(event.left // 2):
            (name,) = yield from event.take(1)
            spans[str(name)] = yield from event.skip()
        tag = decoded(payload[slice(*spans["type"])]) if _is_short(spans.get("type")) else None
    else:
        (tag,) = yield from event.take(1)
        names = {"BlockStored": STORED_FIELDS, "BlockRemoved": REMOVED_FIELDS}.get(str(tag), ())
        for name in islice(names, event.left):
            spans[name] = yield from event.skip()
    lists = {name: Container(payload, spans[name][0]) for name in _LISTS if _is_list(payload, spans.get(name))}
    short = {name: span for name, span in spans.items() if name not in lists}
    if not all(map(_is_short, short.values())):
        raise NotMsgpack("a long field")
    return tag, {name: decoded(payload[slice(*span)]) for name, span in short.items()}, lists


def _record(payload: bytes, start: int) -> Container:
    """A batch or an event, whose members are read one after another. Raises NotMsgpack if they are too many."""
    record = Container(payload, start)
    if record.left > MEMBERS_MAX * (2 if record.is_map else 1):
        raise NotMsgpack(f"{record.left} members")
    return record


def _is_short(span: tuple[int, int] | None) -> bool:
    return span is not None and span[1] - span[0] <= SHORT_BYTES_MAX


def _is_list(payload: bytes, span: tuple[int, int] | None) -> bool:
    return span is not None and (0x90 <= payload[span[0]] < 0xA0 or payload[span[0]] in (0xDC, 0xDD))
