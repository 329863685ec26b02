"""A fleet in the middle of an upgrade: an engine of each vLLM behind one gateway, on one Redis."""

from __future__ import annotations

import itertools

import httpx
import pytest
from stack_driver.engine_metrics import tier_reads_bytes
from stack_driver.known_answers import compute_references
from stack_driver.running_stack import RunningStack
from stack_driver.shared_stores import ValkeyStore
from stack_driver.streams import StreamCrowd

pytestmark = pytest.mark.tiers("upgrade")

STREAMS, ANSWER_TOKENS = 12, 16


def test_no_engine_loads_what_the_other_vllm_has_stored(stack: RunningStack) -> None:
    """Keys of a block are equal on both sides, so only the namespace keeps them apart. Each loads its own."""
    for writer, reader in itertools.permutations(stack.engines):
        known = stack.compute_and_store(writer)
        stored = stack.stored()
        before = tier_reads_bytes(reader.metrics(), stack.tier)
        own = compute_references(reader, known.prompt)  # cold, or it raises
        assert tier_reads_bytes(reader.metrics(), stack.tier) == before
        stack.wait_stored(stored + known.prompt.blocks, reader)
        for engine, answers in ((reader, own), (writer, known)):
            answer = stack.ask_shared(engine, answers)
            assert (answer.source, answer.cached_tokens) == ("shared", known.prompt.reusable_tokens)


def test_both_namespaces_lie_side_by_side_and_name_their_vllm(stack: RunningStack) -> None:
    for engine in stack.engines:
        stack.compute_and_store(engine)
    store = stack.store
    assert isinstance(store, ValkeyStore)
    versions = [document["versions"]["vllm"] for document in store.documents()]
    assert sorted(".".join(version.split(".")[:2]) for version in versions) == sorted(stack.local.settings.vllm)


@pytest.mark.parametrize("index", [0, 1])
def test_a_prefix_is_routed_to_the_engine_that_has_it(stack: RunningStack, index: int) -> None:
    """Known to the gateway by the engine's own KV events alone, in the format of its vLLM."""
    name, prompt = f"engine-{index}", stack.compute_and_announce(index)
    body = {"model": stack.model, "prompt": list(prompt.tokens), "max_tokens": 1}
    reply = httpx.post(f"{stack.local.gateway_url}/v1/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    assert (reply.headers["x-spillway-engine"], reply.headers["x-spillway-route"]) == (name, "prefix")
    assert int(reply.headers["x-spillway-prefix-tokens"]) == prompt.reusable_tokens
    assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == prompt.reusable_tokens


def test_every_request_is_answered_and_both_versions_serve(stack: RunningStack) -> None:
    prompts = [stack.new_prompt(2) for _ in range(STREAMS)]
    streams = StreamCrowd(stack.local.gateway_url, stack.model, prompts, ANSWER_TOKENS).join()
    assert [str(stream) for stream in streams if not stream.complete] == []
    # A stream that waits for long begins with a comment, before its engine is known: on a busy machine.
    assert {stream.engine for stream in streams} - {None} == {"engine-0", "engine-1"}
