"""Transfer parameters in engines' replies reach routers that stand in front, and no tenant."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.access.keys import hash_key
from spillway_gateway.api.private_replies import TransferParamsFilter
from spillway_gateway.testing.fake_engine import Scripted
from spillway_gateway.testing.running import gateway_config, running_gateway

KEYS = {"a": "sk-a" + "0" * 40, "router": "sk-r" + "0" * 40}
NAMES = ("kv_transfer_params", "ec_transfer_params")
pieces = st.sampled_from(
    [*NAMES, '"', "\\", ":", "{", "}", ",", "x", '"kv_transfer_params": {"a": 1}', '"kv_transfer_params']
)
texts = st.lists(pieces, max_size=4).map("".join)
values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-99_999, 99_999) | texts,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(texts.filter(lambda name: name not in NAMES), inner, max_size=3)
    ),
    max_leaves=12,
)
secrets = st.dictionaries(texts, values, min_size=1, max_size=3) | st.integers(1000, 9999) | st.text(min_size=3)


def with_secrets(document: Any, name: str, secret: Any) -> Any:
    return {"first": document, name: secret, "response": {"more": document, name: secret}, "last": document}


@given(values, st.sampled_from(NAMES), secrets, st.lists(st.integers(0, 400), max_size=8), st.booleans(), st.booleans())
def test_the_values_become_null_and_nothing_else_changes(
    document: Any, name: str, secret: Any, cuts: list[int], ascii_only: bool, indented: bool
) -> None:
    whole = json.dumps(
        with_secrets(document, name, secret), ensure_ascii=ascii_only, indent=1 if indented else None
    ).encode("utf-8", "surrogatepass")
    edges = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    one = TransferParamsFilter()
    parts = [one.feed(whole[a:b], last=False) for a, b in itertools.pairwise(edges)]
    filtered = b"".join([*parts, one.feed(b"", last=True)])

    assert len(filtered) == len(whole)
    assert json.loads(filtered) == json.loads(json.dumps(with_secrets(document, name, None)))
    assert filtered == TransferParamsFilter().feed(whole, last=True)


@given(st.binary(max_size=60), st.lists(st.binary(max_size=9), max_size=4))
def test_bytes_that_are_no_json_keep_their_length(first: bytes, rest: list[bytes]) -> None:
    one = TransferParamsFilter()
    mark = b'"kv_transfer_params":'
    parts = [first, mark, *rest, mark[:9], first]
    passed = b"".join([*(one.feed(part, last=False) for part in parts), one.feed(b"", last=True)])
    assert len(passed) == len(b"".join(parts))


PARAMS = {"do_remote_prefill": True, "remote_host": "10.0.0.7", "remote_block_ids": [[1, 2, 3]]}


def auth(folder: Path) -> dict[str, Any]:
    tenants = [{"name": name, "keys": [hash_key(key)]} for name, key in KEYS.items()]
    (folder / "keys.yaml").write_text(yaml.safe_dump({"tenants": tenants}))
    (folder / "salt").write_text("s" * 32)
    return {
        "keysFile": str(folder / "keys.yaml"),
        "saltSecretFile": str(folder / "salt"),
        "kvTransferTenants": ["router"],
        "unsaltedRoutes": "allow",
    }


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("long", [False, True])
async def test_no_tenant_is_told_of_an_engines_blocks(
    start_engine: Any, tmp_path: Path, path: str, stream: bool, long: bool
) -> None:
    reply = {"id": "r1", "object": "x", "pad": "x" * (6_000_000 if long else 9), "kv_transfer_params": PARAMS}
    events = [
        {"id": "r1", "delta": "hi"},
        {"type": "response.completed", "response": {**reply, "ec_transfer_params": PARAMS}},
    ]
    engine = await start_engine(script=lambda *_: Scripted(document=reply, events=events))
    body = {"model": "fake", "stream": stream, "messages": [], "input": "hi", "token_ids": [1]}
    document = gateway_config([engine], auth=auth(tmp_path))
    async with running_gateway(document) as running, aiohttp.ClientSession() as http:
        got, timed = {}, {}
        for tenant, key in KEYS.items():
            headers = {"authorization": f"Bearer {key}"}
            async with http.post(running.url + path, json=body, headers=headers) as answer:
                assert answer.status == 200
                got[tenant] = await answer.read()
                timed[tenant] = "x-spillway-overhead-ms" in answer.headers
        assert timed == {"a": False, "router": True}, "the gateway's own time tells what it has read before"
        assert b"10.0.0.7" in got["router"] and b"10.0.0.7" not in got["a"]
        assert len(got["router"]) == len(got["a"])
        if not stream:
            assert json.loads(got["a"]) == {**reply, "kv_transfer_params": None}


async def test_a_stored_response_does_not_tell_either(start_engine: Any, tmp_path: Path) -> None:
    engine = await start_engine()
    document = gateway_config([engine], auth=auth(tmp_path))
    async with running_gateway(document) as running, aiohttp.ClientSession() as http:
        headers = {"authorization": f"Bearer {KEYS['a']}"}
        async with http.post(
            running.url + "/v1/responses", json={"model": "fake", "input": "hi"}, headers=headers
        ) as made:
            name = (await made.json())["id"]
        engine.responses[name]["kv_transfer_params"] = PARAMS
        async with http.get(f"{running.url}/v1/responses/{name}", headers=headers) as stored:
            assert (await stored.json())["kv_transfer_params"] is None
