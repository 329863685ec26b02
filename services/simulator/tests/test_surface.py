"""The newer APIs of a simulated engine, through a real gateway before two of them."""

from __future__ import annotations

import httpx
import openai

from spillway_gateway.testing.running import patient, running_gateway

QUESTION = "tell me about tides and the moon, and why the sea comes twice a day"


def document(running):
    engines = [{"name": host.name, "url": host.url} for host in running.hosts]
    return {
        "models": [{"name": running.hosts[0].settings.model, "engines": engines}],
        **patient(routing={"defaultBlockTokens": 4}),
    }


async def test_responses_stream_what_they_answer_and_share_the_chats_cache(simulator):
    async with (
        simulator(engines=2) as running,
        running_gateway(document(running)) as gateway,
        openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        model = running.hosts[0].settings.model
        plain = await client.responses.create(model=model, input=QUESTION, max_output_tokens=6)
        again = await client.responses.with_raw_response.create(model=model, input=QUESTION, max_output_tokens=6)
        stream = await client.responses.create(model=model, input=QUESTION, max_output_tokens=6, stream=True)
        events = [event async for event in stream]

    assert plain.usage.output_tokens == 6 and len(plain.output_text) == 18
    assert again.parse().usage.input_tokens_details.cached_tokens > 0
    assert again.headers["x-spillway-route"] == "prefix"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == plain.output_text
    assert events[-1].response.output_text == plain.output_text


async def test_messages_in_anthropics_form(simulator):
    async with (
        simulator(engines=2) as running,
        running_gateway(document(running)) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=120) as client,
    ):
        body = {
            "model": running.hosts[0].settings.model,
            "max_tokens": 6,
            "system": "be brief",
            "messages": [{"role": "user", "content": QUESTION}],
        }
        plain = (await client.post("/v1/messages", json=body)).json()
        streamed = await client.post("/v1/messages", json={**body, "stream": True})
        counted = (await client.post("/v1/messages/count_tokens", json=body)).json()

    assert plain["stop_reason"] == "max_tokens" and plain["usage"]["output_tokens"] == 6
    assert counted == {"input_tokens": plain["usage"]["input_tokens"]}
    assert streamed.text.startswith("event: message_start\n")
    assert streamed.text.endswith('data: {"type":"message_stop"}\n\n')
    assert streamed.headers["x-spillway-route"] == "prefix"
