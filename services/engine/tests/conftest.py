"""A real uvicorn server in this process, for tests that need HTTP and not vLLM; a model that knows some sentences."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import pytest
import uvicorn

from spillway_engine.reference_likelihood import TEXTS

KNOWN_NATS, UNKNOWN_NATS = 1.0, 8.0  # of a word behind the one that it follows in TEXTS, and of any other


@contextlib.asynccontextmanager
async def _serving(app: Any) -> AsyncIterator[str]:
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="on"))
    task = asyncio.create_task(server.serve())
    async with asyncio.timeout(120):
        while not server.started:  # noqa: ASYNC110  uvicorn offers no event for this
            await asyncio.sleep(0)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        async with asyncio.timeout(120):
            await task


@pytest.fixture
def serving() -> Callable[[Any], AbstractAsyncContextManager[str]]:
    return _serving


@dataclass
class BigramModel:
    """Answers /v1/completions as vLLM 0.23.0 does, of a model of words whose only knowledge is TEXTS.

    The values say how it is broken.
    """

    plain_nats: float = KNOWN_NATS
    shuffled_nats: float = UNKNOWN_NATS
    decode_error_nats: float = 0.0  # of generated tokens alone
    drift_nats: float = 0.0  # added with every request
    last_logprob: float | None = None  # of every prompt, instead of what it would be

    def __post_init__(self) -> None:
        self.requests: list[Mapping[str, Any]] = []
        self.words: list[str] = []
        self._pairs = {
            (self._id(one), self._id(other)) for text in TEXTS for one, other in zip(text.split(), text.split()[1:])
        }

    def complete(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self.requests.append(request)
        prompt = request["prompt"]
        token_ids = [self._id(word) for word in prompt.split()] if isinstance(prompt, str) else list(prompt)
        generated = self._continued(token_ids, request["max_tokens"])
        logprobs = self._logprobs(token_ids)
        choice: dict[str, Any] = {
            "text": " ".join(self.words[token] for token in generated),
            "prompt_token_ids": token_ids,
            "token_ids": generated,
        }
        if request.get("prompt_logprobs") is not None:
            rows = [{str(token): {"logprob": value}} for token, value in zip(token_ids[1:], logprobs)]
            choice["prompt_logprobs"] = [None, *rows]
        if request.get("logprobs") is not None:
            whole = self._logprobs([*token_ids, *generated])[-len(generated) :]
            choice["logprobs"] = {"token_logprobs": [value - self.decode_error_nats for value in whole]}
        return {"choices": [choice]}

    def _logprobs(self, token_ids: list[int]) -> list[float]:
        drift = self.drift_nats * len(self.requests)
        values = [
            -(self.plain_nats if pair in self._pairs else self.shuffled_nats) - drift
            for pair in itertools.pairwise(token_ids)
        ]
        if self.last_logprob is not None:
            values[-1] = self.last_logprob
        return values

    def _continued(self, token_ids: list[int], count: int) -> list[int]:
        generated: list[int] = []
        for _ in range(count):
            last = [*token_ids, *generated][-1]
            generated.append(next((other for one, other in sorted(self._pairs) if one == last), 0))
        return generated

    def _id(self, word: str) -> int:
        if word not in self.words:
            self.words.append(word)
        return self.words.index(word)


@pytest.fixture
def bigram_model() -> type[BigramModel]:
    return BigramModel
