"""A prompt that one engine computes, and another one loads from the shared tier and answers."""

from __future__ import annotations

import httpx
import pytest
from reference_answers.margins import ROUNDING_OF_EQUALS, difference, scored
from stack_driver.deadlines import eventually
from stack_driver.engine_client import ANSWER_TOKENS, EngineClient
from stack_driver.engine_metrics import Reading
from stack_driver.other_gateway import other_gateway, stack_models
from stack_driver.running_stack import RunningStack

# No wait of the test's rests on a speed: a hand-over that ends later than that fails it.
DISAGGREGATION = {"mode": "always", "uncachedTokensMin": 128, "handOverSecondsMax": 120, "prefillSecondsMax": 600}


@pytest.mark.tiers("nvme")
def test_the_second_engine_loads_what_the_first_computed_and_answers_as_one_engine(stack: RunningStack) -> None:
    models = stack_models(stack)
    for engine, role in zip(models[0]["engines"], ("prefill", "decode"), strict=True):
        engine["role"] = role
    stack.stored()
    with other_gateway(stack, "gateway-of-two-legs", {"models": models, "disaggregation": DISAGGREGATION}) as url:
        eventually("the gateway knows the store that both load from", lambda: _stores(url) == 2.0)
        prompt = stack.new_prompt()
        client = EngineClient(url, stack.model, stack.tier)
        answer = client.complete(prompt.tokens, ANSWER_TOKENS)
        legs = Reading.parse(httpx.get(f"{url}/metrics", timeout=120).text)
        client.close()

    assert legs.total("spillway_gateway_legs_total", decision="two", reason="always") == 1.0
    assert answer["usage"]["prompt_tokens"] == len(prompt.tokens)
    assert answer["usage"]["completion_tokens"] == ANSWER_TOKENS
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == prompt.reusable_tokens, "all that can be loaded"
    own = stack.a.ask(prompt.tokens)  # from the blocks that it computed, with as many tokens cached
    assert (own.source, own.cached_tokens) == ("device", prompt.reusable_tokens)
    wrong = difference(own.scored, scored(answer["choices"][0]), ROUNDING_OF_EQUALS)
    assert wrong is None, wrong


def _stores(url: str) -> float:
    """The engines whose shared tier the gateway knows of."""
    page = Reading.parse(httpx.get(f"{url}/metrics", timeout=120).text)
    return page.total("spillway_gateway_engine_shared_stores")
