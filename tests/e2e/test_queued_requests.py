"""A prefix is loaded from the shared tier while its request waits in the engine's queue."""

from __future__ import annotations

import pytest
from stack_driver.deadlines import eventually
from stack_driver.running_stack import DEVICE_BLOCKS, RunningStack
from stack_driver.streams import StreamCrowd

BLOCKS = 8
BEFORE = 3  # requests; all but the last fit the device together
ANSWER_TOKENS = 96


@pytest.mark.tiers("nvme")
def test_the_prefix_of_a_queued_request_is_in_the_cpu_tier_when_its_turn_comes(stack: RunningStack) -> None:
    """The head of the queue waits for device blocks. vLLM asks the connector about no request behind it, so whatever
    is loaded for one there was loaded ahead of its turn."""
    known = stack.compute_and_store(stack.a, BLOCKS)
    long_prompts = [stack.new_prompt(DEVICE_BLOCKS // BEFORE - 1) for _ in range(BEFORE)]  # and a block for their ends
    before = stack.b.metrics().by_label("spillway_promoted_ahead_blocks_total", "outcome")
    crowd = StreamCrowd(stack.b.url, stack.model, long_prompts, ANSWER_TOKENS)
    eventually("the queue has a head", lambda: stack.b.running() == BEFORE)
    answer = stack.b.ask(known.prompt.tokens)
    for stream in crowd.join():
        assert stream.complete, str(stream)
    stack.b.nudge()
    after = stack.b.metrics().by_label("spillway_promoted_ahead_blocks_total", "outcome")

    counted = {outcome: count - before.get(outcome, 0.0) for outcome, count in after.items()}
    assert counted == {"promoted": BLOCKS, "used": BLOCKS}
    assert answer.cached_tokens == known.prompt.reusable_tokens
    known.check(stack.b.ask(known.prompt.tokens))  # the same KV, in a batch of its own like the reference's
