"""Prompts of models with windows or states that come again, go on and part: what they find, and what lies in the CPU
tier."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from engine_lives.engine import BLOCK_TOKENS, Engine
from spillway_connector.metrics import KV_GROUP_BYTES, Metric

COMMON, OWN, ANSWER = 6, 5, 1  # blocks
ENDS = 2  # blocks of a window that are stored for the end of a prompt: its own, and one more
PARTING = 2  # for the end of what is common
STEP = 6  # blocks of a step of a prefill, as many as are common: a state is left there


def a_conversation(engine: Engine, number: int) -> None:
    """A prompt that comes again, or goes on behind its answer, is found whole."""
    engine.reset_prefix_cache()
    rng = random.Random(f"conversation {number}")
    prompt = _tokens(rng, COMMON + OWN - ANSWER) + [rng.randrange(500) for _ in range(number % BLOCK_TOKENS)]
    answer = _serve(engine, f"first {number}", prompt, ANSWER * BLOCK_TOKENS)
    assert _found(engine, f"again {number}", prompt) >= len(prompt) - BLOCK_TOKENS
    assert _found(engine, f"on {number}", [*answer, 1]) >= len(answer) - BLOCK_TOKENS


def a_conversation_of_states(engine: Engine, number: int) -> None:
    a_conversation(engine, 1 + number % (BLOCK_TOKENS - 1))  # a prompt that ends with a block leaves no state before it


def prompts_that_part(engine: Engine, number: int) -> None:
    """The second one with a common beginning finds nothing and stores the window that ends it; the third finds it."""
    _part(engine, number, behind=[], rows=COMMON + 3 * OWN + 3 * ENDS + PARTING)


def prompts_that_part_with_states(engine: Engine, number: int) -> None:
    """Prompts part as in prompts_that_part, and each leaves the last of its states."""
    assert COMMON == STEP
    _part(engine, number, behind=[1], rows=COMMON + 3 * OWN + 3 + 1)


def prompts_that_end_with_a_chunk(engine: Engine, number: int) -> None:
    """One window serves such a prompt when it comes again, which computes its last token, and when it goes on."""
    engine.reset_prefix_cache()
    manager = engine._scheduler_half.manager
    moved = counted_groups(manager)
    rng = random.Random(f"end {number}")
    prompt, found = _tokens(rng, COMMON), COMMON * BLOCK_TOKENS
    assert _found(engine, f"first {number}", prompt) == 0
    windows = [-(-window // engine.hash_tokens) for window in engine.shape.windows if window]
    taken = len(manager.primary_tier.resident)
    assert taken == COMMON + sum(windows), f"{taken} chunks"
    assert moved("store") == {"0-full": COMMON, "1-window": windows[0], "2-window": windows[1]}
    assert _found(engine, f"again {number}", prompt) == found - 1
    assert moved("load") == {"0-full": COMMON, "1-window": windows[0], "2-window": windows[1]}
    assert _found(engine, f"on {number}", prompt + _tokens(rng, OWN)) == found


def counted_groups(manager: Any) -> Callable[[str], dict[str, int]]:
    """Chunks that were moved in a direction since now, by KV group, as the metrics count them."""
    moved: Counter[tuple[str, ...]] = Counter()
    count = type(manager)._count

    def counting(metric: Metric, amount: int, *labels: str) -> None:
        count(manager, metric, amount, *labels)
        if metric is KV_GROUP_BYTES:
            moved[labels] += amount // manager._chunk_bytes

    manager._count = counting
    return lambda direction: {group: chunks for (group, way), chunks in moved.items() if way == direction}


def _part(engine: Engine, number: int, *, behind: list[int], rows: int) -> None:
    """behind: Tokens at the end of each prompt. rows: How many are taken in the end."""
    engine.reset_prefix_cache()
    rng = random.Random(f"parting {number}")
    common = _tokens(rng, COMMON)
    prompts = [common + _tokens(rng, OWN) + behind for _ in range(3)]
    found = [_found(engine, f"parting {number} {which}", prompt) for which, prompt in enumerate(prompts)]
    assert found == [0, 0, COMMON * BLOCK_TOKENS], found
    taken = len(engine._scheduler_half.manager.primary_tier.resident)
    assert taken == rows, f"{taken} chunks, amid prompts as well"


def prompts_that_part_on_the_device(engine: Engine, number: int) -> None:
    """The second prompt finds two chunks on the device, the first of which has lost a block of the window, so it cannot
    be stored. The third prompt has that chunk alone in common."""
    engine.reset_prefix_cache()
    rng = random.Random(f"device {number}")
    chunk_tokens = engine.shape.blocks_per_chunk * BLOCK_TOKENS
    common = _tokens(rng, 2 * engine.shape.blocks_per_chunk)
    _serve(engine, f"device {number} 0", common + _tokens(rng, COMMON), 1)
    _serve(engine, f"device {number} 1", common + _tokens(rng, OWN), 1)
    assert _found(engine, f"device {number} 2", common[:chunk_tokens] + _tokens(rng, OWN)) == 0


def _tokens(rng: random.Random, blocks: int) -> list[int]:
    return [rng.randrange(500) for _ in range(blocks * BLOCK_TOKENS)]


def _found(engine: Engine, name: str, prompt: list[int]) -> int:
    """Tokens of the prompt that are loaded."""
    engine.reset_device_cache()
    _serve(engine, name, prompt, 1)
    return engine.figures.cached_tokens[name]


def _serve(engine: Engine, name: str, prompt: list[int], answer_tokens: int) -> list[int]:
    """The prompt with its answer."""
    engine.submit(name, prompt, answer_tokens)
    (request,) = engine.unfinished()
    engine.drain()
    engine.require_nothing_left()
    return list(request.all_token_ids)


PARTINGS = {
    "windows-of-one-block": {"conversation": a_conversation, "prompts-that-part": prompts_that_part},
    "windows-within-chunks": {
        "conversation-with-short-windows": a_conversation,
        "prompts-that-end-with-a-chunk": prompts_that_end_with_a_chunk,
    },
    "windows-chunks": {"prompts-that-part-on-the-device": prompts_that_part_on_the_device},
    "states": {
        "conversation-of-states": a_conversation_of_states,
        "prompts-that-part-with-states": prompts_that_part_with_states,
    },
}
