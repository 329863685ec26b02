"""vLLM's own API server in this process, with an engine core that computes nothing and keeps what it is given."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.request import Request

from spillway_connector.testing.models import write_tiny_llama
from spillway_gateway.testing.small_tokenizer import write_tokenizer

MODEL = "tiny"
TOKENS_MAX = 256
SCALE_OUT = "--enable-scale-out"  # without which newer servers refuse token ids
TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
# Inputs beyond what the model takes are computed in pieces, as operators may set it.
IN_PIECES = json.dumps({"enable_chunked_processing": True, "max_embed_len": 64 * TOKENS_MAX})
# Kind of model -> its tasks, and the arguments that make one of a small Llama.
KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "text": (("generate",), ()),
    "vectors": (("embed", "token_embed"), ("--runner", "pooling", "--convert", "embed")),
    "pieces": (("embed", "token_embed"), ("--runner", "pooling", "--convert", "embed", "--pooler-config", IN_PIECES)),
    "labels": (("classify", "token_classify"), ("--runner", "pooling", "--convert", "classify")),
}


def _module(*names: str) -> Any:
    """The first of them that this vLLM has."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise AssertionError(f"this vLLM has none of {names}")


def write_model(folder: Path) -> Path:
    """A Llama that can be made into all KINDS."""
    write_tiny_llama(folder, max_position_embeddings=TOKENS_MAX, num_labels=1, label2id={"LABEL_0": 0})
    write_tokenizer(folder, "the quick brown fox jumps over the lazy dog", 300, TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def parsed(words: list[str]) -> Any:
    """Return the command line as vLLM's own server parses it."""
    cli = _module("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
    parser = cli.make_arg_parser(FlexibleArgumentParser())
    if SCALE_OUT in parser._option_string_actions:
        words = [*words, SCALE_OUT]
    return parser.parse_args(words)


class IdleCore:
    """Stands in for EngineCoreClient: ends each request with one token, or one vector."""

    engine_ranks_managed = (0,)
    resources = SimpleNamespace(engine_dead=False)

    def __init__(self, tasks: tuple[str, ...]) -> None:
        self.requests: list[Request] = []
        self._tasks = tasks
        self._outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()

    async def add_request_async(self, given: Any) -> None:
        self.requests.append(Request.from_engine_core_request(given, None))
        pools = given.pooling_params is not None
        output = EngineCoreOutput(
            request_id=given.request_id,
            new_token_ids=[] if pools else [5],
            pooling_output=torch.zeros(1) if pools else None,
            finish_reason=FinishReason.LENGTH,
        )
        self._outputs.put_nowait(EngineCoreOutputs(outputs=[output]))

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return self._tasks

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self._outputs.get()

    async def abort_requests_async(self, request_ids: list[str]) -> None: ...

    def shutdown(self, timeout: float | None = None) -> None: ...


class ApiServer:
    """state: of vLLM's application."""

    def __init__(self, http: httpx.AsyncClient, core: IdleCore, app: Any) -> None:
        self.state = app.state
        self._app = app
        self._lifespan: asyncio.Task[None] | None = None
        self._http = http
        self._core = core

    async def started(self) -> None:
        """Tells the middleware that the server starts, as uvicorn does before it opens the port."""
        begun = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if begun.is_set():
                await asyncio.Event().wait()
            return {"type": "lifespan.startup"}

        async def send(message: Any) -> None:
            assert message["type"] == "lifespan.startup.complete", message
            begun.set()

        scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
        self._lifespan = asyncio.create_task(self._app(scope, receive, send))
        await begun.wait()

    async def ended(self) -> None:
        if self._lifespan is not None:
            self._lifespan.cancel()
            await asyncio.wait([self._lifespan])

    async def reply(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return await self._http.post(path, json=body)

    async def salts(self, path: str, body: bytes) -> list[str | None]:
        """The salts of the engine's requests that one request of a client became."""
        reply = await self._http.post(path, content=body, headers={"content-type": "application/json"})
        assert self._core.requests, (path, reply.status_code, reply.text)
        return self.taken()

    def taken(self) -> list[str | None]:
        """Salts of the engine's requests since the last call."""
        salts = [request.cache_salt for request in self._core.requests]
        self._core.requests.clear()
        return salts


@asynccontextmanager
async def api_server(model: Path, kind: str, *more: str) -> AsyncIterator[ApiServer]:
    """more: further arguments of vLLM."""
    tasks, made_by = KINDS[kind]
    server = _module("vllm.entrypoints.launchers.app", "vllm.entrypoints.openai.api_server")
    states = _module("vllm.entrypoints.launchers.api_server.app_state", "vllm.entrypoints.openai.api_server")
    args = parsed(["--model", str(model), "--served-model-name", MODEL, "--enforce-eager", *made_by, *more])
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    core = IdleCore(tasks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineCoreClient, "make_async_mp_client", staticmethod(lambda *_, **__: core))
        engine = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
    app = server.build_app(args, tasks, config.model_config)
    app.state.server = None  # which uvicorn's would be
    await states.init_app_state(engine, app.state, args, tasks)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
        try:
            yield (running := ApiServer(http, core, app))
            await running.ended()
        finally:
            engine.shutdown()
