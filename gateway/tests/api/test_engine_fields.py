"""The members that steer an engine: which ones clients may send, on each route and in each place that vLLM reads."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.access.keys import hash_key
from spillway_gateway.api.engine_fields import OWN_MEMBERS, STEERING_ARGUMENTS, EngineFields, engine_members
from spillway_gateway.api.routes import ROUTES
from spillway_gateway.testing.running import gateway_config, running_gateway

KEYS = {"a": "sk-a" + "0" * 40, "router": "sk-r" + "0" * 40}
SESSION = {"id": "one"}
JSON_ROUTES = [route.path for route in ROUTES if route.body is not None]
# One route of each parser, for bodies so long that a parser gets the outline of one.
LONG_ROUTES = list({route.parse: route.path for route in ROUTES if route.body is not None}.values())
PROMPT = {
    "messages": [{"role": "user", "content": "hi"}],
    "prompt": "hi",
    "input": "hi",
    "texts": ["hi"],
    "token_ids": [1, 2, 3],
    "query": "hi",
    "documents": ["hi"],
    "tokens": [104, 105],
}
EACH_ROUTE = ("top level", "xargs escaped", "extra args")  # the other places on one route


def prompt_of(path: str) -> dict[str, Any]:
    return {**PROMPT, "messages": [PROMPT["messages"]]} if path.endswith("/batch") else PROMPT


def auth(folder: Path, **settings: Any) -> dict[str, Any]:
    tenants = [{"name": name, "keys": [hash_key(key)]} for name, key in KEYS.items()]
    (folder / "keys.yaml").write_text(yaml.safe_dump({"tenants": tenants}))
    (folder / "salt").write_text("s" * 32)
    files = {"keysFile": str(folder / "keys.yaml"), "saltSecretFile": str(folder / "salt")}
    return {**files, "unsaltedRoutes": "allow", **settings}


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield session


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda inner: (
        st.dictionaries(st.sampled_from([*OWN_MEMBERS, "do_remote_prefill", *STEERING_ARGUMENTS]), inner)
        | st.lists(inner, max_size=2)
    ),
    max_leaves=6,
)
steering_fields = st.builds(
    EngineFields,
    kv_transfer_params=json_values | st.just(msgspec.UNSET),
    ec_transfer_params=json_values | st.just(msgspec.UNSET),
    vllm_xargs=json_values | st.just(msgspec.UNSET),
    sampling_params=st.dictionaries(st.sampled_from(["extra_args", *STEERING_ARGUMENTS]), json_values)
    | st.lists(json_values, max_size=2),
)


def arriving(sent: EngineFields, members: dict[str, Any]) -> dict[str, Any]:
    """The members of the body that reach the engine."""
    given_members = {name: value for name, value in msgspec.structs.asdict(sent).items() if value is not msgspec.UNSET}
    return {name: value for name, value in (given_members | members).items() if value is not None}


@given(steering_fields, st.booleans(), st.booleans())
def test_of_a_tenant_nothing_steers_an_engine(sent: EngineFields, in_session: bool, takes: bool) -> None:
    own = {"spillway_session": SESSION} if in_session else {}
    got = arriving(sent, engine_members(sent, b"", own, steers=False, takes_transfer_params=takes))

    assert got.pop("kv_transfer_params", None) == (own if own and takes else None)
    assert not any(name in json.dumps(got) for name in STEERING_ARGUMENTS)


@given(steering_fields, st.booleans())
def test_of_who_may_steer_the_top_level_passes_and_the_session_is_never_its_own(
    sent: EngineFields, in_session: bool
) -> None:
    own = {"spillway_session": SESSION} if in_session else {}
    got = arriving(sent, engine_members(sent, b"", own, steers=True, takes_transfer_params=True))

    ec_params = sent.ec_transfer_params
    assert got.get("ec_transfer_params") == (None if ec_params is msgspec.UNSET else ec_params)
    params = got.pop("kv_transfer_params", None)
    if isinstance(params, dict):
        assert {name: params[name] for name in OWN_MEMBERS & params.keys()} == own
        kept = sent.kv_transfer_params if isinstance(sent.kv_transfer_params, dict) else {}
        hide = dict.fromkeys(OWN_MEMBERS, 0)
        assert params | hide == kept | hide
    hidden = {name: value for name, value in got.items() if name in ("vllm_xargs", "sampling_params")}
    assert not any(name in json.dumps(hidden) for name in STEERING_ARGUMENTS)


HIDDEN = {
    "top level": '"kv_transfer_params": {"do_remote_prefill": true, "remote_host": "evil"}',
    "a text": '"kv_transfer_params": "evil"',
    "escaped": '"kv\\u005ftransfer_params": {"remote_host": "evil"}',
    "repeated": '"kv_transfer_params": {"remote_host": "evil"}, "x": 1, "kv_transfer_params": {}',
    "repeated, a null last": '"kv\\u005ftransfer_params": {"remote_host": "evil"}, "kv_transfer_params": null',
    "xargs repeated, a null last": '"vllm_xargs": {"kv_transfer_params": "evil"}, "vllm_xargs": null',
    "another": '"ec_transfer_params": {"peer": "evil"}',
    "xargs": '"vllm_xargs": {"kv_transfer_params": "evil", "kept": 1}',
    "xargs escaped": '"vllm\\u005fxargs": {"\\u006bv_transfer_params": "evil", "kept": 1}',
    "xargs repeated, escaped last": '"vllm_xargs": {"kv_transfer_params": "evil"}, "vllm\\u005fxargs": {"kept": 1}',
    "xargs repeated": '"vllm_xargs": {"kv_transfer_params": "evil"}, "vllm_xargs": {"kept": 1}',
    "xargs nested": '"vllm_xargs": {"kept": 1, "more": [{"ec_transfer_params": "evil"}]}',
    "extra args": '"sampling_params": {"n": 1, "extra_args": {"kv_transfer_params": {"remote_host": "evil"}}}',
    "extra args a text": '"sampling_params": {"n": 1, "extra_args": {"kv_transfer_params": "evil"}}',
    "report mode": '"vllm_xargs": {"kv_cache_report_mode": "evil", "kept": 1}',
}


@pytest.mark.parametrize("padding", [0, 80_000])
@pytest.mark.parametrize("keys", [True, False])
async def test_what_is_hidden_from_the_schema_reaches_no_engine(
    start_engine: Any, client: aiohttp.ClientSession, tmp_path: Path, keys: bool, padding: int
) -> None:
    engine = await start_engine()
    settings = {"auth": auth(tmp_path)} if keys else {}
    headers = {"authorization": f"Bearer {KEYS['a']}", "content-type": "application/json"}
    passes = set() if keys else {"top level", "a text", "escaped", "another"}
    async with running_gateway(gateway_config([engine], **settings)) as running:
        for path in LONG_ROUTES if padding else JSON_ROUTES:
            plain = json.dumps({"model": "fake", **prompt_of(path), "pad": [[]] * (padding // 20) + ["x" * padding]})
            for name, hidden in HIDDEN.items():
                if name not in EACH_ROUTE and (padding or path != "/v1/completions"):
                    continue
                body = plain[:-1] + "," + hidden + "}"
                async with client.post(running.url + path, data=body, headers=headers) as reply:
                    assert reply.status == 200, (path, name, await reply.text())
                got = engine.seen[-1].body
                assert (b"evil" in got) == (name in passes), (path, name, got[-200:])
                expected = json.loads(body)
                sent = json.loads(got)
                for member in ("kept", "n"):
                    assert (f'"{member}"' in json.dumps(expected)) == (f'"{member}"' in json.dumps(sent)), (path, name)
                assert {"model", "pad", *prompt_of(path)} <= sent.keys()


async def test_a_router_in_front_is_named_and_tenants_have_the_priority_of_the_keys_file(
    start_engine: Any, client: aiohttp.ClientSession, tmp_path: Path
) -> None:
    engine = await start_engine()
    params = {"do_remote_prefill": True, "remote_host": "10.0.0.7"}
    body = {"model": "fake", "prompt": "hi", "kv_transfer_params": params, "priority": -5}
    settings = auth(tmp_path, kvTransferTenants=["router"])
    async with running_gateway(gateway_config([engine], auth=settings)) as running:
        seen = {}
        for tenant, key in KEYS.items():
            headers = {"authorization": f"Bearer {key}", "x-vllm-priority": "-9"}
            async with client.post(running.url + "/v1/completions", json=body, headers=headers) as reply:
                assert reply.status == 200
            seen[tenant] = json.loads(engine.seen[-1].body)
            assert b"x-vllm-priority" not in dict(engine.seen[-1].headers)
    assert seen["router"]["kv_transfer_params"] == params and seen["router"]["priority"] == -5
    assert not {"kv_transfer_params", "priority"} & seen["a"].keys()


BOUNDARY = "b0undary"


@pytest.mark.parametrize("keys", [True, False])
@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/translations"])
@pytest.mark.parametrize("padding", [0, 80_000])
async def test_a_form_hides_nothing(
    start_engine: Any, client: aiohttp.ClientSession, tmp_path: Path, path: str, keys: bool, padding: int
) -> None:
    engine = await start_engine()
    settings = {"auth": auth(tmp_path)} if keys else {}
    headers = {
        "authorization": f"Bearer {KEYS['a']}",
        "content-type": f"multipart/form-data; boundary={BOUNDARY}",
    }
    xargs = '{"kv_transfer_params": "evil", "kept": NaN}'

    async def sent(*heads: str) -> tuple[int, bytes]:
        before = len(engine.seen)
        fields = [('form-data; name="model"', "fake"), *[(head, xargs) for head in heads]]
        fields.append(('form-data; name="file"; filename="a;name=b.wav"', "RIFF" + "x" * padding))
        body = "".join(f"--{BOUNDARY}\r\nContent-Disposition: {head}\r\n\r\n{text}\r\n" for head, text in fields)
        async with client.post(running.url + path, data=body + f"--{BOUNDARY}--\r\n", headers=headers) as reply:
            assert (reply.status == 200) == (len(engine.seen) > before)
            return reply.status, engine.seen[-1].body if reply.status == 200 else await reply.read()

    async with running_gateway(gateway_config([engine], **settings)) as running:
        status, got = await sent('form-data; name="vllm_xargs"')
        assert status == 200 and b"evil" not in got and b"kept" in got
        status, got = await sent('form-data; name="vllm_xargs"; filename="x"')
        assert status == 200 and b"evil" not in got
        for head in (
            "form-data; name=vllm_xargs",
            'form-data; name="vllm\\_xargs"',
            "form-data; name*=utf-8''vllm%5fxargs",
            'form-data; name="x"; name="vllm_xargs"',
            'form-data; filename="a"; name="vllm_xargs"',
            'form-data; name="x"\r\nContent-Disposition: form-data; name="vllm_xargs"',
        ):
            status, got = await sent(head)
            assert status == 400 and b"content-disposition" in got, head


async def test_a_form_field_that_is_no_json_is_refused(start_engine: Any, client: aiohttp.ClientSession) -> None:
    engine = await start_engine()
    async with running_gateway(gateway_config([engine])) as running:
        form = aiohttp.FormData({"model": "fake", "vllm_xargs": "{kv_transfer_params: 1}"})
        form.add_field("file", b"RIFF", filename="a.wav")
        async with client.post(running.url + "/v1/audio/transcriptions", data=form) as reply:
            assert reply.status == 400 and (await reply.json())["error"]["param"] == "vllm_xargs"
    assert not engine.seen
