"""`python -m engine_lives.hit_share [--turns 600] [--seed 0] [--storing eager auto]`: what two tiers hold together.

Agent sessions in a closed loop on vLLM's real scheduler: each begins with common tokens and some of its own, and every
turn extends the last one's prompt and answer until the session ends and another takes its place. Beside each run one
LRU cache of the size of both tiers sees the same requests in the order in which they were admitted. Deterministic:
steps and copies are counted, not timed, as are pauses; every copy ends a step after it began.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine_lives.engine import Engine

_ANSWER_TOKENS = 14
_COMMON_BLOCKS, _FIRST_BLOCKS, _MOST_BLOCKS = 1, 4, 11
_THINK_STEPS_MAX = 24
# By the CPU tier's clock: a run is over before a session counts as gone. From then on new blocks are stored at once
# while gone sessions make room, which copies less and finds two points less.
_STEP_SECONDS = 0.001
_SIZES = ((80, 136),)  # device blocks, rows of the CPU tier
_LOADS = (0.8, 1.0, 1.25)  # chunks of live sessions, of both tiers together


@dataclass
class Outcome:
    wanted: int = 0  # tokens of prompts
    found: int = 0
    found_by_one_cache: int = 0
    stored_blocks: int = 0
    steps: int = 0


class _OneCache:
    """Least recently used."""

    def __init__(self, chunks: int) -> None:
        self._chunks = chunks
        self._held: OrderedDict[bytes, None] = OrderedDict()

    def leading(self, keys: Sequence[bytes]) -> int:
        return next((at for at, key in enumerate(keys) if key not in self._held), len(keys))

    def use(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):  # the head of a prefix becomes the youngest
            self._held[key] = None
            self._held.move_to_end(key)
        while len(self._held) > self._chunks:
            self._held.popitem(last=False)


def measure(engine: Engine, sessions: int, turns: int, seed: int, counted_from: int) -> Outcome:
    """counted_from: the first turn that counts, when the tiers are full."""
    from engine_lives.engine import BLOCK_TOKENS

    rng = random.Random(seed)
    cache = _OneCache(engine.shape.device_blocks - 1 + engine.shape.cpu_rows)
    common = [rng.randrange(500) for _ in range(_COMMON_BLOCKS * BLOCK_TOKENS)]
    outcome = Outcome()
    contexts: dict[int, list[int]] = {}
    begins_at = {session: rng.randrange(_THINK_STEPS_MAX) for session in range(sessions)}
    running: dict[str, int] = {}
    admitted: set[str] = set()
    begun = 0
    engine.set_tier_clock(lambda: _STEP_SECONDS * outcome.steps)

    def after_schedule() -> None:
        for job in engine.scheduled[-1].kv_connector_metadata.store_jobs.values():
            if begun > counted_from:
                source: Any = job.src_spec if hasattr(job, "src_spec") else job.transfer_spec[0]
                outcome.stored_blocks += len(source.block_ids)

    while begun < turns or running:
        for session in sorted(begins_at):
            if begun >= turns or begins_at[session] > outcome.steps:
                continue
            del begins_at[session]
            context = contexts.get(session)
            if context is None or len(context) > (_MOST_BLOCKS - 1) * BLOCK_TOKENS:
                context = common + [rng.randrange(500) for _ in range((_FIRST_BLOCKS - 1) * BLOCK_TOKENS)]
            else:
                context = context + [rng.randrange(500) for _ in range(BLOCK_TOKENS - _ANSWER_TOKENS)]
            contexts[session] = context
            name = f"{begun}"
            begun += 1
            running[name] = session
            engine.submit(name, context, _ANSWER_TOKENS)
        requests = {name: engine._requests[name] for name in running}
        for copier in engine.copiers.values():
            copier.advance(1_000)
        engine.step(meanwhile=after_schedule)
        outcome.steps += 1
        for name, request in requests.items():
            keys = [bytes(key) for key in request.block_hashes]
            if name not in admitted and name in engine.figures.cached_tokens:
                admitted.add(name)
                if int(name) >= counted_from:
                    outcome.wanted += request.num_prompt_tokens
                    outcome.found += engine.figures.cached_tokens[name]
                    most = (request.num_prompt_tokens - 1) // BLOCK_TOKENS
                    outcome.found_by_one_cache += BLOCK_TOKENS * min(most, cache.leading(keys))
                cache.use(keys)
            if request.is_finished():
                cache.use(keys)
                session = running.pop(name)
                contexts[session] = list(request.all_token_ids)
                begins_at[session] = outcome.steps + 1 + rng.randrange(_THINK_STEPS_MAX)
    engine.drain()
    engine.require_nothing_left()
    return outcome


def main(arguments: Sequence[str] | None = None) -> int:
    os.environ.update(PYTHONHASHSEED="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")
    from engine_lives.engine import Engine, Shape

    parser = argparse.ArgumentParser(prog="engine_lives.hit_share", description=(__doc__ or "").split(":")[-1])
    parser.add_argument("--turns", type=int, default=600, help="requests of each run; the first third is not counted")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--storing", nargs="+", choices=("eager", "auto"), default=["eager", "auto"])
    parser.add_argument("--loads", nargs="+", type=float, default=_LOADS)
    given = parser.parse_args(arguments)
    print("device + CPU | live / both | storing | found | one LRU cache | stored blocks per turn")
    for device_blocks, cpu_rows in _SIZES:
        for load in given.loads:
            live = (_FIRST_BLOCKS + _MOST_BLOCKS) / 2 - _COMMON_BLOCKS
            sessions = max(2, round(load * (device_blocks + cpu_rows) / live))
            for storing in given.storing:
                with tempfile.TemporaryDirectory() as folder:
                    shape = Shape((None,), device_blocks=device_blocks, cpu_rows=cpu_rows, storing=storing)
                    engine = Engine(shape, Path(folder))
                    outcome = measure(engine, sessions, given.turns, given.seed, given.turns // 3)
                    engine.close()
                counted = given.turns - given.turns // 3
                print(
                    f"{device_blocks} + {cpu_rows} | {load} | {storing} | {outcome.found / outcome.wanted:.1%} | "
                    f"{outcome.found_by_one_cache / outcome.wanted:.1%} | {outcome.stored_blocks / counted:.2f} "
                    f"({outcome.steps} steps)",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
