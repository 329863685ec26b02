"""The cache salt of the engine's own request, on every route that the gateway's table counts as salted: bodies as the
gateway sends them, to vLLM's own API server. Every version runs this."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import vllm
import yaml
from vllm.engine.arg_utils import AsyncEngineArgs

from engine_salts.api_server import IN_PIECES, KINDS, MODEL, TOKENS_MAX, ApiServer, api_server, parsed, write_model
from spillway_engine.vllm_arguments import MIDDLEWARE
from spillway_gateway.access.keys import hash_key
from spillway_gateway.api.routes import ROUTES, Salting
from spillway_gateway.testing.fake_engine import FakeEngine
from spillway_gateway.testing.running import gateway_config, running_gateway
from spillway_settings.vllm_salts import SALTS_ALL, version_of, why_salts_are_dropped

VERSION = version_of(vllm.__version__)
EXACT = VERSION >= SALTS_ALL or VERSION == (0, 23)  # between them the table is on the safe side
KEY = "sk-a" + "0" * 40
CHAT = [{"role": "user", "content": "hi"}]
LONG = "the quick brown fox " * TOKENS_MAX  # of more tokens than the model takes
Cases = list[tuple[str, dict[str, Any]]]  # route, and a body for it

TEXT: Cases = [
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/completions", {"prompt": ["hi", "there"], "n": 2, "stream": True}),
    ("/v1/completions", {"prompt": [[5, 6], [7]], "echo": True}),
    ("/v1/completions", {"prompt": "hi", "use_beam_search": True, "n": 2, "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": CHAT}),
    ("/v1/chat/completions", {"messages": CHAT, "n": 2, "stream": True}),
    ("/v1/chat/completions", {"messages": CHAT, "use_beam_search": True, "n": 2, "max_tokens": 2}),
    ("/v1/chat/completions/batch", {"messages": [CHAT, CHAT]}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/responses", {"input": CHAT, "stream": True}),
    ("/v1/messages", {"messages": CHAT, "max_tokens": 4}),
    ("/v1/messages", {"messages": CHAT, "max_tokens": 4, "stream": True}),
    ("/inference/v1/generate", {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4}}),
    ("/generative_scoring", {"query": "hi", "items": ["you", "there"], "label_token_ids": [5, 6]}),
]
PAIRS: Cases = [
    *((path, {"text_1": "hi", "text_2": ["you", "there"]}) for path in ("/score", "/v1/score")),
    ("/score", {"queries": ["hi", "ho"], "documents": ["you", "there"]}),
    *((path, {"query": "hi", "documents": ["you"]}) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
]
VECTORS: Cases = [
    ("/v1/embeddings", {"input": "hi"}),
    ("/v1/embeddings", {"input": ["hi", "there"]}),
    ("/v1/embeddings", {"input": [[5, 6], [7]]}),
    ("/v1/embeddings", {"messages": CHAT}),
    ("/v2/embed", {"texts": ["hi"]}),
    ("/pooling", {"input": "hi"}),
    ("/pooling", {"messages": CHAT}),
    *PAIRS,
]
PIECES: Cases = [  # once they are enabled, vLLM 0.23 drops the salts of short inputs as well (docs/gateway.md)
    ("/v1/embeddings", {"input": LONG}),
    ("/v1/embeddings", {"input": ["hi", LONG]}),
    ("/v1/embeddings", {"input": [5] * (TOKENS_MAX + 1)}),
    ("/v1/embeddings", {"messages": [{"role": "user", "content": LONG}]}),
]
LABELS: Cases = [
    ("/classify", {"input": ["hi", "there"]}),
    ("/classify", {"messages": CHAT}),
    ("/pooling", {"input": "hi", "task": "classify"}),
    *PAIRS,
]
CASES = {"text": TEXT, "vectors": VECTORS, "pieces": PIECES, "labels": LABELS}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("engine-salts") / "model")


def test_every_route_of_the_table_has_a_case() -> None:
    named = {path for cases in CASES.values() for path, _ in cases}
    assert named == {route.path for route in ROUTES if route.body and route.salting is not Salting.NEEDLESS}
    assert CASES.keys() == KINDS.keys()


async def as_the_gateway_sends(cases: Cases, folder: Path) -> list[bytes]:
    """The bodies that an engine gets of a tenant's requests."""
    (folder / "keys.yaml").write_text(yaml.safe_dump({"tenants": [{"name": "a", "keys": [hash_key(KEY)]}]}))
    (folder / "salt").write_text("s" * 32)
    auth = {
        "keysFile": str(folder / "keys.yaml"),
        "saltSecretFile": str(folder / "salt"),
        "unsaltedRoutes": "allow",  # the bodies are wanted of closed routes, too
    }
    engine = FakeEngine(model=MODEL, max_model_len=TOKENS_MAX)
    engine.version = vllm.__version__
    await engine.start()
    try:
        async with (
            running_gateway(gateway_config([engine], auth=auth)) as running,
            aiohttp.ClientSession(headers={"authorization": f"Bearer {KEY}"}) as http,
        ):
            for path, body in cases:
                async with http.post(running.url + path, json={"model": MODEL, **body}) as reply:
                    await reply.read()
    finally:
        await engine.stop()
    assert [seen.path for seen in engine.seen] == [path for path, _ in cases]
    return [seen.body for seen in engine.seen]


@pytest.mark.parametrize("kind", CASES)
async def test_the_engine_has_the_salt_where_the_table_says_so(kind: str, model: Path, tmp_path: Path) -> None:
    cases = CASES[kind]
    bodies = await as_the_gateway_sends(cases, tmp_path)
    routes = {route.path: route for route in ROUTES}
    wrong = []
    async with api_server(model, kind) as server:
        for (path, given), body in zip(cases, bodies, strict=True):
            salting = routes[path].salting_of(routes[path].parse(body), VERSION, TOKENS_MAX)
            sent = json.loads(body)["cache_salt"]
            found = await server.salts(path, body)
            # vLLM 0.23 keeps the salts of pairs that it embeds, not of those it classifies: the gateway cannot tell.
            may_be_kept = not EXACT or (kind == "vectors" and (path, given) in PAIRS)
            needless = routes[path].salting is Salting.FIELD and set(found) == {sent} and salting is Salting.UNKNOWN
            if (set(found) != {sent} and salting is Salting.FIELD) or (needless and not may_be_kept):
                wrong.append((path, given, salting, found))
        if kind == "text":
            assert await salts_of_two_turns(server, "s") == (["s", "s"] if VERSION >= SALTS_ALL else ["s", None])
    assert not wrong


async def test_an_engine_that_would_drop_salts_serves_nobody(model: Path) -> None:
    async with api_server(model, "pieces", "--middleware", MIDDLEWARE) as server:
        await server.started()
        replies = [await server.reply(path, {"model": MODEL, "cache_salt": "s", **body}) for path, body in VECTORS]
        salts = server.taken()
    if VERSION < SALTS_ALL:
        assert {reply.status_code for reply in replies} == {503}
        assert "enable_chunked_processing" in replies[0].json()["error"]["message"]
        assert salts == []
    else:
        assert "s" in salts


@pytest.mark.parametrize(
    "words",
    [
        ["--pooler-config", IN_PIECES],
        ["--pooler_config=" + IN_PIECES.replace(":", " :  ")],
        ["--pooler-config.enable_chunked_processing", "true"],
        ["--pooler_config.enable_chunked_processing=true"],
        ["--pooler-con", IN_PIECES],
        ["--pooler-config", "{}", "--pooler-config.enable_chunked_processing=true"],
    ],
)
def test_pieces_are_seen_however_they_are_written(words: list[str], model: Path) -> None:
    args = parsed(["--model", str(model), "--enforce-eager", "--runner", "pooling", "--convert", "embed", *words])
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    assert (why_salts_are_dropped(config, vllm.__version__) is not None) == (VERSION < SALTS_ALL)


async def salts_of_two_turns(server: ApiServer, salt: str) -> list[str | None]:
    """The salts of a response whose model calls one of the engine's own tools in between, in the format of gpt-oss."""
    from vllm import SamplingParams
    from vllm.entrypoints.openai.responses.context import HarmonyContext

    class Turns(HarmonyContext):
        def __init__(self) -> None:
            self.turns = 0
            self.request = None
            self._messages = []

        def append_output(self, output: Any) -> None:
            self.turns += 1

        def need_builtin_tool_call(self) -> bool:
            return self.turns < 2

        async def call_tool(self) -> list[Any]:
            return []

        def append_tool_output(self, output: Any) -> None: ...

        def render_for_completion(self) -> list[int]:
            return [5, 6, 7]

    with pytest.MonkeyPatch.context() as patch:
        if VERSION >= SALTS_ALL:
            patch.setattr("vllm.renderers.online_renderer.render_for_completion", lambda messages: [5, 6, 7])
        serving = server.state.openai_serving_responses
        prompt: Any = {"type": "token", "prompt_token_ids": [5, 6], "cache_salt": salt}
        async for _ in serving._generate_with_builtin_tools("r", prompt, SamplingParams(max_tokens=1), Turns()):
            pass
    return server.taken()
