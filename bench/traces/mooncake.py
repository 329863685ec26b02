"""The Mooncake trace format: parser, writer, and generator of seeded traces.

One JSON object per line: {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}; every id stands
for one block of 512 tokens (the last may be partial), and equal starts of id lists mean equal starts of prompts.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from traces.session import Segment, Session, Trace, Turn

BLOCK_TOKENS = 512
BLOCKS_MAX = 120  # of a generated conversation


class BadTraceLine(ValueError):
    """A line that is not of the format; the message names the line and what is wrong."""


@dataclass(frozen=True, slots=True)
class MooncakeRequest:
    timestamp_ms: int
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]


def read_mooncake(lines: Iterable[str], block_tokens: int = BLOCK_TOKENS) -> Iterator[MooncakeRequest]:
    """Parse lines; empty ones are skipped. Raises BadTraceLine. block_tokens: 16 for the Bailian traces."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)
            request = MooncakeRequest(
                int(document["timestamp"]),
                int(document["input_length"]),
                int(document["output_length"]),
                tuple(int(item) for item in document["hash_ids"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise BadTraceLine(f"line {number}: {error!r}; an object with four numeric fields is needed") from error
        needed = math.ceil(request.input_tokens / block_tokens)
        if request.input_tokens < 1 or len(request.hash_ids) != needed:
            raise BadTraceLine(
                f"line {number}: {len(request.hash_ids)} hash_ids for {request.input_tokens} tokens; "
                f"{needed} are needed with blocks of {block_tokens} tokens"
            )
        yield request


def mooncake_trace(
    requests: Iterable[MooncakeRequest], *, speed: float = 1.0, block_tokens: int = BLOCK_TOKENS
) -> Trace:
    """Open loop: every request is sent at its timestamp divided by `speed`, independent of the others."""
    sessions = []
    for number, request in enumerate(requests):
        rest = request.input_tokens
        segments = []
        for hash_id in request.hash_ids:
            segments.append(Segment(f"mooncake-{hash_id}", min(block_tokens, rest)))
            rest -= block_tokens
        answer = Segment(f"mooncake-answer-{number}", max(1, request.output_tokens))
        turn = Turn(tuple(segments), answer)
        sessions.append(Session(f"mooncake-{number}", request.timestamp_ms / 1000.0 / speed, (turn,)))
    return Trace("mooncake", f"{len(sessions)} requests in Mooncake's format, speed {speed:g}", tuple(sessions))


def generate_mooncake(
    *, seed: int = 5, requests: int = 2_400, requests_per_second: float = 44.0, conversations_open: int = 400
) -> list[MooncakeRequest]:
    """Conversations over popular and private beginnings: inputs of about ten thousand tokens with a long tail, outputs
    of about two hundred, a little more than half of all blocks seen before. conversations_open: how many run at
    once."""
    rng = random.Random(seed)
    next_id = 0

    def fresh(count: int) -> list[int]:
        nonlocal next_id
        next_id += count
        return list(range(next_id - count, next_id))

    popular = [fresh(rng.randint(1, 12)) for _ in range(40)]
    weights = [1 / (rank + 1) for rank in range(len(popular))]
    history: list[list[int]] = []
    made = []
    at = 0.0
    for _ in range(requests):
        at += rng.expovariate(requests_per_second)
        blocks = rng.choice(history) if history and rng.random() < 0.45 else None
        if blocks is None or len(blocks) >= BLOCKS_MAX:
            opening = rng.choices(popular, weights)[0] if rng.random() < 0.7 else []
            blocks = [*opening, *fresh(min(BLOCKS_MAX - 12, 1 + int(rng.lognormvariate(2.0, 1.0))))]
            history = [*history[1 - conversations_open :], blocks]
        else:
            blocks.extend(fresh(rng.randint(1, 4)))
        ids = (*blocks, *fresh(1))  # the last block is partial and the request's own
        tokens = len(blocks) * BLOCK_TOKENS + rng.randint(1, BLOCK_TOKENS)
        output = max(1, min(2_000, int(rng.lognormvariate(5, 0.8))))
        made.append(MooncakeRequest(int(at * 1000), tokens, output, ids))
    return made
