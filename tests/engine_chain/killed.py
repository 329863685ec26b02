"""An engine and the bucket's server that are killed with SIGKILL while the engine works over both of its tiers."""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from engine_matrix.asked_engine import Answer, AskedEngine, EngineEnded, asked_engine
from reference_answers.margins import ROUNDING_OF_EQUALS, difference
from s3_servers import S3Server, s3_server

from engine_chain.chains import IDLE_SECONDS, PROMPT_BLOCKS, blocks_below, chained, prompt
from spillway_connector.transfer.demotions import WAIT_SECONDS

PROMPTS = 12
BLOCKS = PROMPTS * PROMPT_BLOCKS  # almost five times the NVMe tier
ALL_BELOW_SECONDS = 600.0
_LIMITS = {
    "lookup_timeout_seconds": 2.0,
    "load_timeout_seconds": 5.0,
    "store_timeout_seconds": 10.0,
    "store_queue_seconds_max": 30.0,
}


class WrongAnswer(Exception):
    """An answer differs from what was computed."""


def run(folder: Path, kills: int, seed: int = 0) -> Counter[str]:
    """Kill the engine or the server so often. Returns what was seen.

    What an engine was killed with, or a full NVMe tier evicted before it was idle, is computed at its next use and goes
    below then. So once each prompt was asked again and left alone for a while, the bucket has all of it, and gives all
    of it to an engine with an empty NVMe tier and a row of the CPU tier for each block.

    Raises WrongAnswer, and AssertionError if the bucket lacks a block in the end, or gives less than it has.
    """
    chosen = random.Random(seed)
    seen: Counter[str] = Counter()
    with asked_engine(folder, {"num_cpu_blocks": 8}) as alone:
        tokens = alone.block_tokens
        prompts = [prompt(number, tokens) for number in range(PROMPTS)]
        references = [alone.ask(asked) for asked in prompts]
    with ExitStack() as last, s3_server(folder / "s3") as server:
        server.make_bucket()
        nvme = folder / "nvme"
        engine = last.enter_context(asked_engine(folder, chained(nvme, server, _LIMITS)))

        def ask(number: int) -> Answer:
            answer = engine.ask(prompts[number])
            found = difference(references[number].scored, answer.scored, ROUNDING_OF_EQUALS)
            if found is not None:
                raise WrongAnswer(f"prompt {number}, {answer.cached} tokens from a cache: {found}")
            seen["answers"] += 1
            seen["answers with tokens from a cache"] += answer.cached > 0
            return answer

        for _ in range(kills):
            victim = chosen.choice(["engine", "server"])
            killer = threading.Timer(chosen.uniform(0.2, 6.0), _kill, (victim, engine, server))
            killer.start()
            try:
                while killer.is_alive():
                    ask(chosen.randrange(PROMPTS))
            except EngineEnded:
                assert victim == "engine"
            killer.join()
            seen[f"{victim} killed"] += 1
            if victim == "engine":
                if chosen.random() < 0.5:
                    shutil.rmtree(nvme)
                    seen["with its disk"] += 1
                engine = last.enter_context(asked_engine(folder, chained(nvme, server, _LIMITS)))
            else:
                for _ in range(3):
                    ask(chosen.randrange(PROMPTS))
                server.restart()
        _ask_until_all_lie_below(server, ask)
        engine.kill()
        shutil.rmtree(nvme)
        engine = last.enter_context(asked_engine(folder, chained(nvme, server, cpu_blocks=2 * BLOCKS)))
        for number in range(PROMPTS):
            seen["tokens from below at the end"] += ask(number).cached
    assert seen["tokens from below at the end"] == BLOCKS * tokens, seen
    return seen


def _kill(victim: str, engine: AskedEngine, server: S3Server) -> None:
    if victim == "engine":
        engine.kill()
    else:
        server.kill()


def _ask_until_all_lie_below(server: S3Server, ask: Callable[[int], Answer]) -> None:
    """One prompt after the other, each left alone until no more of it goes below."""
    deadline = time.monotonic() + ALL_BELOW_SECONDS
    while (lying := blocks_below(server)) < BLOCKS:
        assert time.monotonic() < deadline, f"{lying} of {BLOCKS} blocks lie in the bucket"
        for number in range(PROMPTS):
            ask(number)
            _wait_while_it_grows(server)


def _wait_while_it_grows(server: S3Server) -> None:
    lying = -1
    while (now := blocks_below(server)) > lying and now < BLOCKS:
        lying = now
        time.sleep(IDLE_SECONDS + 2 * WAIT_SECONDS)
