"""The real `openai` client against a gateway before a fake engine."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from spillway_gateway.testing.faults import DieInStream
from spillway_gateway.testing.running import gateway_config, running_gateway


async def test_chat_streaming_completions_and_models(start_engine: Any) -> None:
    engine = await start_engine()
    async with (
        running_gateway(gateway_config([engine])) as running,
        openai.AsyncOpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        plain = await client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "hi"}])
        stream = await client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        completion = await client.completions.create(model="fake", prompt="hi")
        models = await client.models.list()

    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == plain.choices[0].message.content
    assert chunks[-1].usage is not None and chunks[-1].usage.prompt_tokens > 0
    assert completion.choices[0].text
    assert [model.id for model in models.data] == ["fake"]


async def test_errors_arrive_as_the_client_s_own_exceptions(start_engine: Any) -> None:
    engine = await start_engine(max_model_len=20)
    async with (
        running_gateway(gateway_config([engine])) as running,
        openai.AsyncOpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.chat.completions.create(model="absent", messages=[{"role": "user", "content": "hi"}])
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "x" * 50}])
        engine.fault = DieInStream(2)
        stream = await client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        with pytest.raises(openai.APIError, match="closed the connection"):
            async for _ in stream:
                pass

    assert unknown.value.code == "model_not_found"
