"""Processor time of the gateway's event loop in its prefix index for one turn of a conversation.

    python bench/prefix_index.py [--tokens 8000,50000,131072] [--block-tokens 16,128] [--conversations 20]
                                 [--output build/bench/prefix_index.json]

Each conversation lies on one of four engines, which announced its blocks, and asks again: its blocks are hashed (its
tokens were seen before), matched, expected at its engine and accepted there. Each figure is the median over the
conversations. "one by one" is the same index with runs longer than any prompt, so that it remembers nothing of who
holds which blocks: the limit that remembering has to beat in the same run. "first" is the first turn after the events,
which has nothing to remember.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

from bench_report import write_report

from spillway_gateway.fleet import block_runs
from spillway_gateway.fleet.block_runs import SHORT_RUN_BLOCKS
from spillway_gateway.fleet.event_decoder import BlockStored, Tier
from spillway_gateway.fleet.prefix_index import PrefixIndex
from spillway_gateway.routing.prefix import KEYS_MAX, RUN_BLOCKS, TOKEN_BYTES, KeyChains, token_bytes

ENGINES = 4
EXPECTED_SECONDS = 30.0
VOCABULARY = 50_000


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=_numbers, default=[8_000, 50_000, 131_072])
    parser.add_argument("--block-tokens", type=_numbers, default=[16, 128])
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path("build/bench/prefix_index.json"))
    given = parser.parse_args(arguments)
    figures: dict[str, float] = {}
    print("| tokens | tokens per block | runs | hash | match | expect | accept | all, ms | first match, ms |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for tokens in given.tokens:
        for block_tokens in given.block_tokens:
            none = KEYS_MAX + 1, KEYS_MAX + 1
            for name, run_blocks in (("one_by_one", none), ("remembered", (RUN_BLOCKS, SHORT_RUN_BLOCKS))):
                block_runs.RUN_BLOCKS, block_runs.SHORT_RUN_BLOCKS = run_blocks  # type: ignore[attr-defined]
                costs = _turn(tokens, block_tokens, given.conversations)
                first = costs.pop("first_match")
                costs["all"] = sum(costs.values())
                row = " | ".join(f"{cost:.2f}" for cost in (*costs.values(), first))
                print(f"| {tokens:,} | {block_tokens} | {name.replace('_', ' ')} | {row} |")
                for step, cost in (*costs.items(), ("first_match", first)):
                    figures[f"{name}_{tokens}_tokens_blocks_of_{block_tokens}_{step}_milliseconds"] = cost
    write_report(figures, given.output)
    return 0


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _turn(tokens: int, block_tokens: int, conversations: int) -> dict[str, float]:
    """Milliseconds of processor time of each step, and of the first match."""
    index = PrefixIndex("m", bytes_max=1 << 32, orphans_max=1, default_block_tokens=block_tokens, clock=time.monotonic)
    for engine in range(ENGINES):
        index.add_engine(str(engine))
    numbers = random.Random(1)
    chains = KeyChains(conversations * (tokens // block_tokens // RUN_BLOCKS + 1))
    prompts: list[bytes] = []
    for conversation in range(conversations):
        ids = array("I", numbers.choices(range(VOCABULARY), k=tokens))
        prompts.append(token_bytes(ids))
        blocks = tokens // block_tokens
        hashes = list(range(conversation * blocks, (conversation + 1) * blocks))
        stored = BlockStored(
            hashes, None, ids[: blocks * block_tokens].tolist(), block_tokens, Tier.DEVICE, None, [], 0, None
        )
        index.apply(str(conversation % ENGINES), stored)
    found: dict[str, list[float]] = {}

    def timed(step: str, work: Callable[..., object], *arguments: object) -> None:
        before = time.process_time_ns()
        work(*arguments)
        found.setdefault(step, []).append((time.process_time_ns() - before) / 1e6)

    for turn in range(3):
        for conversation, prompt in enumerate(prompts):
            engine = str(conversation % ENGINES)
            whole = index.namespace(), prompt, block_tokens * TOKEN_BYTES
            keys = chains.keys(*whole)
            if turn == 0:
                timed("first_match", index.match, keys, block_tokens)
            if turn < 2:
                _accept(index, engine, keys)
                continue
            timed("hash", chains.keys, *whole)
            timed("match", index.match, keys, block_tokens)
            timed("expect", index.expect, engine, keys, time.monotonic() + EXPECTED_SECONDS)
            timed("accept", _accept, index, engine, keys)
    return {step: statistics.median(costs) for step, costs in found.items()}


def _accept(index: PrefixIndex, engine: str, keys: Sequence[int]) -> None:
    for _ in index.accepted(engine, keys, None):
        pass


if __name__ == "__main__":
    raise SystemExit(main())
