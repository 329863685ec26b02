"""An engine that gets SIGTERM finishes its streams; its successor finds all blocks in the shared tier."""

from __future__ import annotations

from itertools import chain

import pytest
from stack_driver.deadlines import eventually
from stack_driver.running_stack import RunningStack
from stack_driver.streams import StreamCrowd

STREAMS = 6
ANSWER_TOKENS = 128


@pytest.mark.tiers("nvme")
def test_sigterm_lets_streams_finish_and_the_successor_hits_the_shared_tier(stack: RunningStack) -> None:
    known = stack.compute_and_store(stack.b)
    restarts = stack.component("engine-1").restarts
    crowd = StreamCrowd(
        stack.local.gateway_url, stack.model, [stack.new_prompt(1) for _ in range(STREAMS)], ANSWER_TOKENS
    )
    # The gateway chooses engines for its streams; these are certainly on engine-1.
    direct = [_direct(stack)]

    def in_the_middle() -> bool:
        """A request that comes after SIGTERM is refused, so the engine must have accepted both. One of them may still
        wait in its queue: it gets its answer too. A fast engine may have ended them before this is asked."""
        streams = direct[-1].streams
        if all(stream.ended.is_set() for stream in streams):
            direct.append(_direct(stack))
        return all(stream.status is not None for stream in streams) and any(
            stream.tokens and not stream.ended.is_set() for stream in streams
        )

    eventually("engine-1 has accepted both streams and is in the middle of one", in_the_middle)
    stack.local.restart_engine(1)
    for stream in chain.from_iterable(each.join() for each in [crowd, *direct]):
        assert stream.complete and stream.tokens == ANSWER_TOKENS, str(stream)
    status = stack.component("engine-1")
    assert status.restarts == restarts + 1
    assert status.exits[-1]["code"] == 0, "a requested stop is no failure"
    answer = stack.b.ask(known.prompt.tokens)
    assert answer.source == "shared"
    assert answer.cached_tokens == known.prompt.reusable_tokens
    known.check(answer)


def _direct(stack: RunningStack) -> StreamCrowd:
    return StreamCrowd(stack.b.url, stack.model, [stack.new_prompt(1) for _ in range(2)], ANSWER_TOKENS)
