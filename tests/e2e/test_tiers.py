"""Every source of a prefix, shown by the engines' counters, with the same answer every time."""

from __future__ import annotations

from reference_answers.margins import difference
from stack_driver.engine_metrics import device_loads_bytes
from stack_driver.known_answers import compute_references
from stack_driver.running_stack import DEVICE_BLOCKS, RunningStack


def test_shared_tier_hit_on_the_other_engine(stack: RunningStack) -> None:
    known = stack.compute_and_store(stack.a)
    answer = stack.b.ask(known.prompt.tokens)
    assert answer.source == "shared"
    assert answer.cached_tokens == known.prompt.reusable_tokens
    assert answer.tier_read_bytes == known.prompt.blocks * stack.block_bytes
    known.check(answer)
    again = stack.b.ask(known.prompt.tokens)
    assert again.source == "device"
    known.check(again)


def test_cpu_tier_hit_after_eviction_from_the_device(stack: RunningStack) -> None:
    """Evicted by other prompts: the device holds too few blocks for all of them."""
    known = stack.compute_and_store(stack.a)
    for _ in range(-(-DEVICE_BLOCKS // stack.blocks)):
        stack.a.complete(stack.new_prompt().tokens, 1)
    answer = stack.a.ask(known.prompt.tokens)
    assert answer.source == "cpu"
    assert answer.cached_tokens == known.prompt.reusable_tokens
    assert answer.device_load_bytes == known.prompt.blocks * stack.block_bytes
    known.check(answer)


def test_prompt_logprobs_are_whole_where_the_prefix_could_be_loaded(stack: RunningStack) -> None:
    """vLLM returns them for tokens that it computes, so nothing may be loaded for such a request. Where nothing was
    computed, the log-probability is uninitialised memory; a true one is negative."""
    known = stack.compute_and_store(stack.a)
    stack.a.reset_prefix_cache(cpu_tier=False)
    reads = device_loads_bytes(stack.a.metrics())
    logprobs = stack.a.prompt_logprobs(known.prompt.tokens)
    assert device_loads_bytes(stack.a.metrics()) == reads
    assert len(logprobs) == len(known.prompt.tokens)
    for token, position in zip(known.prompt.tokens[1:], logprobs[1:], strict=True):
        assert position[str(token)]["logprob"] < 0.0
        assert position[str(token)]["rank"] >= 1


def test_part_of_a_prefix_on_the_device_and_the_rest_in_a_tier(stack: RunningStack) -> None:
    known = stack.compute_and_store(stack.a)
    prompt = known.prompt
    stack.b.complete(prompt.tokens[: 128 + 1], 1)
    answer = stack.b.ask(prompt.tokens)
    assert answer.source in ("shared", "cpu")
    assert answer.cached_tokens == prompt.reusable_tokens
    known.check(answer)


def test_prompt_of_whole_blocks_is_hit_whole(stack: RunningStack) -> None:
    """The device never reuses a prompt's last token, so not its last block; a tier may provide all of it. There is no
    device hit of that length to compare with, so tiers and engines are compared with each other."""
    prompt = stack.new_prompt()
    whole = prompt.tokens[: prompt.blocks * 128]
    stored = stack.stored()
    stack.a.complete(whole, 1)
    stack.wait_stored(stored + prompt.blocks, stack.a)
    shared = stack.b.ask(whole)
    assert (shared.source, shared.cached_tokens) == ("shared", len(whole))
    for engine in stack.engines:
        engine.reset_prefix_cache(cpu_tier=False)
        answer = engine.ask(whole)
        assert answer.source in {"cpu", "shared"}  # a full CPU tier gives up first what the device holds
        assert answer.cached_tokens == len(whole)
        assert difference(shared.scored, answer.scored) is None


def test_answers_do_not_depend_on_what_else_runs_on_the_shared_tier(stack: RunningStack) -> None:
    """Each engine reads what the other wrote, in both directions."""
    from_a, from_b = stack.compute_and_store(stack.a), stack.compute_and_store(stack.b)
    for engine, known in ((stack.b, from_a), (stack.a, from_b)):
        answer = engine.ask(known.prompt.tokens)
        assert answer.source == "shared"
        known.check(answer)


def test_a_longer_prompt_reuses_the_blocks_of_a_shorter_one(stack: RunningStack) -> None:
    known = stack.compute_and_store(stack.a)
    longer = known.prompt.tokens[: known.prompt.reusable_tokens] + stack.new_prompt(1).tokens
    answer = stack.b.ask(longer)
    assert answer.source == "shared"
    assert answer.cached_tokens == known.prompt.reusable_tokens


def test_first_answer_is_cold(stack: RunningStack) -> None:
    """The counters distinguish hits from computed tokens: an unseen prompt is no hit."""
    known = compute_references(stack.a, stack.new_prompt(2))
    assert set(known.by_cached_tokens) == {0, known.prompt.reusable_tokens}
