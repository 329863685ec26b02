"""kill -9 of an engine core under twenty streams: requests without a byte are answered, the others end with an error
event. `make test-real-engines` also kills the server with it."""

from __future__ import annotations

import signal

import pytest
from stack_driver.deadlines import eventually
from stack_driver.engine_processes import engine_core, shared_memory_of, vllm_group
from stack_driver.running_stack import RunningStack
from stack_driver.streams import Stream, StreamCrowd

STREAMS = 20
ANSWER_TOKENS = 120
VICTIM = "engine-0"


@pytest.mark.tiers("nvme")
def test_engine_core_alone_killed(stack: RunningStack) -> None:
    """The HTTP server survives the engine core for some seconds and still answers."""
    known = stack.compute_and_store(stack.a)
    before = stack.process(VICTIM)
    restarts = stack.component(VICTIM).restarts
    group = vllm_group(before)
    shared_memory = shared_memory_of(group)

    # Prompts longer than what one engine step takes: some streams have begun while others still wait.
    prompts = [stack.new_prompt(stack.blocks) for _ in range(STREAMS)]
    crowd = StreamCrowd(stack.local.gateway_url, stack.model, prompts, ANSWER_TOKENS)
    begun = eventually("some streams of the victim have begun, others wait", lambda: _begun(stack, crowd), 120.0)
    engine_core(group).signal(signal.SIGKILL)

    streams = crowd.join()
    interrupted = [stream for stream in streams if not stream.complete]
    for stream in interrupted:
        assert stream in begun or stream.tokens > 0, f"had no byte and failed: {stream}"
        # None: the stream waited so long that a comment began it, before an engine had answered.
        assert stream.engine in (VICTIM, None), f"was not on the killed engine: {stream}"
        assert stream.error_is_clear, f"ended without a clear error: {stream}"
    assert interrupted, "the kill came too late to interrupt anything"
    survivors = [stream for stream in streams if stream.complete]
    assert all(stream.tokens == ANSWER_TOKENS for stream in survivors)
    assert any(stream not in begun for stream in survivors)

    stack.local.wait_engine_ready(0, not_process=before)
    status = stack.component(VICTIM)
    assert status.restarts == restarts + 1
    assert status.exits[-1]["code"] != 0, "a killed engine is a failure"
    answer = stack.a.ask(known.prompt.tokens)
    assert answer.source == "shared"
    assert answer.cached_tokens == known.prompt.reusable_tokens
    known.check(answer)
    left = [file for file in shared_memory if file.exists()]
    assert left == [], "shared memory of the killed engine"


def _begun(stack: RunningStack, crowd: StreamCrowd) -> list[Stream] | None:
    """Streams with a first byte, once the victim has some of them and waiting requests as well."""
    begun = [stream for stream in crowd.streams if stream.tokens]
    on_victim = sum(stream.engine == VICTIM and not stream.ended.is_set() for stream in begun)
    if on_victim == 0 or stack.a.running() <= on_victim + 1:
        return None
    return begun
