"""A prefix is loaded from the shared tier while its request waits in the engine's queue."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest
from stack_driver.deadlines import eventually
from stack_driver.engine_client import Answer, EngineClient
from stack_driver.prompts import Prompt
from stack_driver.running_stack import DEVICE_BLOCKS, MAX_LENGTH, RunningStack
from stack_driver.streams import StreamCrowd

BLOCKS = 8
HEAD_BLOCKS = 30  # of the prompt at the queue's head
HELD_BLOCKS = DEVICE_BLOCKS - HEAD_BLOCKS - 1  # of the prompt that runs: with its first token it leaves too few


@contextmanager
def held_queue(stack: RunningStack) -> Iterator[None]:
    """Hold the queue within the block: engine b computes a long answer, and a prompt that needs more blocks than are
    free waits."""
    prompt = stack.new_prompt(HELD_BLOCKS)
    running = StreamCrowd(stack.b.url, stack.model, [prompt], MAX_LENGTH - len(prompt.tokens))
    try:
        eventually("a request holds the device's blocks", lambda: running.streams[0].tokens)
        head = StreamCrowd(stack.b.url, stack.model, [stack.new_prompt(HEAD_BLOCKS)], 1)
        eventually("the queue has a head", lambda: stack.b.running() == 2)
        yield
    finally:
        running.let_go()
    for stream in head.join():
        assert stream.complete, str(stream)


def ask(stack: RunningStack, prompt: Prompt) -> Answer:
    with closing(EngineClient(stack.b.url, stack.model, stack.tier)) as engine:
        return engine.ask(prompt.tokens)


@pytest.mark.tiers("nvme")
def test_the_prefix_of_a_queued_request_is_in_the_cpu_tier_when_its_turn_comes(stack: RunningStack) -> None:
    """The head of the queue waits for device blocks. vLLM asks the connector about no request behind it, so whatever
    is loaded for one there was loaded ahead of its turn."""
    known = stack.compute_and_store(stack.a, BLOCKS)

    def ahead() -> dict[str, float]:
        return stack.b.metrics().by_label("spillway_promoted_ahead_blocks_total", "outcome")

    before = ahead()

    def counted() -> dict[str, float]:
        return {outcome: count - before.get(outcome, 0.0) for outcome, count in ahead().items()}

    with ThreadPoolExecutor(1) as threads:
        with held_queue(stack):
            asked = threads.submit(ask, stack, known.prompt)
            eventually("the prefix is promoted", lambda: counted().get("promoted") == BLOCKS)
        answer = asked.result()
    stack.b.nudge()

    assert counted() == {"promoted": BLOCKS, "used": BLOCKS}
    assert answer.cached_tokens == known.prompt.reusable_tokens
    known.check(stack.b.ask(known.prompt.tokens))  # the same KV, in a batch of its own like the reference's
