"""The gateway as an OpenAI client sees it, against real engines."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest
from reference_answers.questions import CAPITAL
from stack_driver.deadlines import eventually
from stack_driver.engine_client import EngineClient
from stack_driver.running_stack import MAX_LENGTH, RunningStack

pytestmark = pytest.mark.tiers("bundled")

QUESTION = [{"role": "user", "content": CAPITAL}]


@pytest.fixture
def client(stack: RunningStack) -> Iterator[openai.OpenAI]:
    # Without the client's retries, which would hide a failure.
    with openai.OpenAI(base_url=f"{stack.local.gateway_url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_models(stack: RunningStack, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [stack.model]


def test_chat(stack: RunningStack, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=stack.model, messages=QUESTION, temperature=0, max_completion_tokens=16
    )
    assert answer.model == stack.model
    (choice,) = answer.choices
    assert (choice.message.role, choice.finish_reason) == ("assistant", "stop")
    assert choice.message.content.strip()
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_streaming_chat_equals_plain_chat(stack: RunningStack, client: openai.OpenAI) -> None:
    asked = {"model": stack.model, "messages": QUESTION, "temperature": 0, "max_completion_tokens": 16}
    plain = client.chat.completions.create(**asked)
    events = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for event in events for choice in event.choices)
    assert text == plain.choices[0].message.content
    assert len(events) > 3, "a stream comes in pieces"
    assert events[-1].usage is not None and events[-1].usage.completion_tokens == plain.usage.completion_tokens


def test_responses_equal_chat_and_stream(stack: RunningStack, client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model=stack.model, messages=QUESTION, temperature=0, max_completion_tokens=16)
    asked = {"model": stack.model, "input": QUESTION, "temperature": 0, "max_output_tokens": 16}
    assert client.responses.create(**asked).output_text == chat.choices[0].message.content
    events = list(client.responses.create(**asked, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == (
        chat.choices[0].message.content
    )
    assert events[-1].type in ("response.completed", "response.incomplete")


def test_messages_equal_chat(stack: RunningStack, client: openai.OpenAI) -> None:
    """Anthropic's API, as vLLM serves it."""
    chat = client.chat.completions.create(model=stack.model, messages=QUESTION, temperature=0, max_completion_tokens=16)
    body = {"model": stack.model, "messages": QUESTION, "temperature": 0, "max_tokens": 16}
    reply = httpx.post(f"{stack.local.gateway_url}/v1/messages", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    assert reply.json()["content"][0]["text"] == chat.choices[0].message.content
    refused = httpx.post(f"{stack.local.gateway_url}/v1/messages", json={**body, "model": "no-such-model"}, timeout=120)
    assert (refused.status_code, refused.json()["type"]) == (404, "error")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_an_engine_learns_that_a_session_ends(stack: RunningStack, path: str) -> None:
    text = {"/v1/completions": {"prompt": CAPITAL}, "/v1/responses": {"input": QUESTION}}
    bound = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {"model": stack.model, bound: 4, **text.get(path, {"messages": QUESTION})}
    headers = {"x-session-id": f"session of {path}", "x-session-end": "true", "x-session-return-seconds": "5"}

    def ended() -> float:
        return sum(engine.metrics().total("spillway_cpu_tier_sessions_ended_total") for engine in stack.engines)

    before = ended()
    reply = httpx.post(f"{stack.local.gateway_url}{path}", json=body, headers=headers, timeout=120)
    assert reply.status_code == 200, reply.text
    for engine in stack.engines:
        engine.nudge()  # statistics leave with a step
    eventually("the end of the session is counted", lambda: ended() == before + 1)


def test_tokenize_and_back(stack: RunningStack) -> None:
    text = "Detokenizing tokens of any text returns the text."
    url = stack.local.gateway_url
    tokens = httpx.post(f"{url}/tokenize", json={"model": stack.model, "prompt": text}, timeout=120).json()["tokens"]
    back = httpx.post(f"{url}/detokenize", json={"model": stack.model, "tokens": tokens}, timeout=120).json()
    assert back["prompt"] == text


def test_max_completion_tokens_bounds_the_answer(stack: RunningStack, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=stack.model,
        messages=[{"role": "user", "content": "Tell a long story about the sea."}],
        max_completion_tokens=5,
        temperature=0,
    )
    assert answer.usage.completion_tokens == 5
    assert answer.choices[0].finish_reason == "length"


def test_completions_with_text_and_with_token_ids(stack: RunningStack, client: openai.OpenAI) -> None:
    text = client.completions.create(model=stack.model, prompt="The capital of France is", max_tokens=4, temperature=0)
    assert text.choices[0].text.strip() and text.usage.completion_tokens == 4
    tokens = client.completions.create(model=stack.model, prompt=[504, 3575, 282], max_tokens=4, temperature=0)
    assert tokens.usage.prompt_tokens == 3 and tokens.usage.completion_tokens == 4


def test_fields_unknown_to_the_gateway_reach_the_engine(stack: RunningStack, client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=stack.model,
        prompt="One two three",
        max_tokens=3,
        logprobs=2,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    assert len(answer.choices[0].logprobs.tokens) == 3
    assert len(answer.choices[0].model_extra["token_ids"]) == 3


def test_unknown_model_is_not_found_in_openai_shape(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="no-such-model", messages=QUESTION)
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    assert "no-such-model" in caught.value.body["message"]


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"model": 7}', b'{"messages": "hello"', b"\xff\xfe"])
def test_malformed_body_is_bad_request(stack: RunningStack, body: bytes) -> None:
    response = httpx.post(
        f"{stack.local.gateway_url}/v1/chat/completions",
        content=body,
        headers={"content-type": "application/json"},
        timeout=120,
    )
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] and error["message"]


def test_wrong_field_is_refused_by_the_engine_and_passed_on(stack: RunningStack, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=stack.model, messages=QUESTION, max_completion_tokens=-3)
    assert caught.value.response.headers["x-spillway-engine"].startswith("engine-")


def test_prompt_longer_than_the_context_is_bad_request(stack: RunningStack, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=stack.model, prompt=[1000] * (MAX_LENGTH + 1), max_tokens=1)
    assert str(MAX_LENGTH) in caught.value.body["message"]


def test_disconnect_ends_the_work_on_the_engine(stack: RunningStack, client: openai.OpenAI) -> None:
    def running() -> int:
        return sum(engine.running() for engine in stack.engines)

    before = _disconnects(stack)
    stream = client.completions.create(
        model=stack.model, prompt="Once", max_tokens=MAX_LENGTH - 10, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    eventually("the engine reports a running request", lambda: running() == 1)
    stream.close()
    eventually("no request runs any more", lambda: running() == 0)
    eventually("the gateway has counted it", lambda: _disconnects(stack) == before + 1)


def test_headers_name_the_engine_and_the_overhead(stack: RunningStack, client: openai.OpenAI) -> None:
    raw = client.with_raw_response.completions.create(
        model=stack.model, prompt="Hello", max_tokens=1, extra_headers={"x-request-id": "asked-by-me"}
    )
    assert raw.headers["x-spillway-engine"] in ("engine-0", "engine-1")
    assert 0 <= float(raw.headers["x-spillway-overhead-ms"]) < 60_000
    assert raw.headers["x-spillway-route"] in ("only", "prefix", "load", "rendezvous")
    assert raw.headers["x-request-id"] == "asked-by-me"


def test_health_ready_and_metrics(stack: RunningStack) -> None:
    for path in ("/health", "/ready", "/metrics"):
        assert httpx.get(f"{stack.local.gateway_url}{path}", timeout=120).status_code == 200
    assert stack.gateway_metrics().total("spillway_gateway_requests_total") > 0 or _ask_once(stack)


def _ask_once(stack: RunningStack) -> bool:
    httpx.post(f"{stack.local.gateway_url}/v1/completions", json={"prompt": "x", "max_tokens": 1}, timeout=60)
    return stack.gateway_metrics().total("spillway_gateway_requests_total") == 1


def _disconnects(stack: RunningStack) -> float:
    return stack.gateway_metrics().total("spillway_gateway_client_disconnects_total")


def test_engine_reports_readiness_and_configuration(stack: RunningStack) -> None:
    engine: EngineClient
    for engine in stack.engines:
        assert httpx.get(f"{engine.url}/ready", timeout=120).json() == {"ready": True}
        assert engine.configuration()["servedName"] == stack.model
