"""Clients' requests to keep a prompt: read once, refused if unreadable, bounded, and passed on by the gateway alone."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tests.conftest import auth_files
from spillway_gateway.access.keys import NOBODY, Tenant, hash_key
from spillway_gateway.api.retention import RetentionMark, anthropic_marks, granted, openai_marks
from spillway_gateway.config.settings import RetentionConfig
from spillway_gateway.errors import ClientBadRequest
from spillway_gateway.testing.running import gateway_config, running_gateway

KEYS = {"a": "sk-a" + "0" * 40, "b": "sk-b" + "0" * 40}
ON = RetentionConfig(seconds_max=3600, tier_share=0.1)
FIVE_MINUTES = {"cache_control": {"type": "ephemeral"}}
ONE_HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def text(letters: int, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": "x" * letters, **more}


@pytest.mark.parametrize(
    ("retention", "options", "seconds"),
    [
        (None, None, None),
        ("in_memory", None, None),
        ("in-memory", {}, None),
        ("24h", None, 86_400),
        (None, {"ttl": "30m"}, 1_800),
        (None, {"ttl": None, "mode": "explicit"}, None),
        ("24h", {"ttl": "2d"}, 172_800),
    ],
)
def test_openai_asks_for_the_whole_prompt(retention: Any, options: Any, seconds: float | None) -> None:
    assert openai_marks(retention, options) == (() if seconds is None else (RetentionMark(1.0, seconds),))


def test_anthropic_asks_for_what_lies_before_a_mark() -> None:
    tools = [{"name": "t", "description": "x" * 4000, **ONE_HOUR}]
    messages = [
        {"role": "user", "content": [text(4000, **FIVE_MINUTES)]},
        {"role": "assistant", "content": "x" * 4000},
        {"role": "user", "content": [text(4000, **FIVE_MINUTES), text(4000)]},
    ]
    marks = dict((seconds, part) for part, seconds in anthropic_marks(None, tools, "x" * 4000, messages))

    assert marks == {3600.0: pytest.approx(1 / 6, abs=0.01), 300.0: pytest.approx(5 / 6, abs=0.01)}
    assert dict((seconds, part) for part, seconds in anthropic_marks({"type": "ephemeral"}, None, None, messages)) == {
        300.0: 1.0
    }
    assert anthropic_marks(None, None, "plain", [{"role": "user", "content": "plain"}]) == ()


BAD_OPENAI = ["24 h", "48h", "", 24, True, ["24h"], {"ttl": "24h"}]
BAD_OPTIONS: list[Any] = ["30m", 5, [], {"ttl": 30}, {"ttl": "m"}, {"ttl": "-5m"}, {"ttl": "0m"}, {"ttl": "1w"}]
BAD_CONTROLS: list[Any] = ["5m", True, [], {}, {"type": "forever"}, {"type": "ephemeral", "ttl": "2h"}]
BAD_CONTROLS += [{"type": "ephemeral", "ttl": ttl} for ttl in (300, [], {}, "")]


@pytest.mark.parametrize("given_value", BAD_OPENAI)
def test_another_retention_is_refused(given_value: Any) -> None:
    with pytest.raises(ClientBadRequest, match=r"^prompt_cache_retention: .* send "):
        openai_marks(given_value, None)


@pytest.mark.parametrize("given_value", BAD_OPTIONS)
def test_other_options_are_refused(given_value: Any) -> None:
    with pytest.raises(ClientBadRequest, match=r"^prompt_cache_options(\.ttl)?: .* send "):
        openai_marks(None, given_value)


@pytest.mark.parametrize("given_value", BAD_CONTROLS)
def test_another_cache_control_is_refused(given_value: Any) -> None:
    control = {"cache_control": given_value}
    with pytest.raises(ClientBadRequest, match=r"^cache_control"):
        anthropic_marks(given_value, None, None, [])
    with pytest.raises(ClientBadRequest, match=r"^tools\[0\]\.cache_control"):
        anthropic_marks(None, [control], None, [])
    with pytest.raises(ClientBadRequest, match=r"^system\[0\]\.cache_control"):
        anthropic_marks(None, None, [text(1, **control)], [])
    with pytest.raises(ClientBadRequest, match=r"^messages\[1\]\.content\[0\]\.cache_control"):
        anthropic_marks(None, None, None, [{}, {"content": [text(1, **control)]}])


marks_of = st.lists(
    st.builds(RetentionMark, st.floats(0.01, 1), st.sampled_from([300.0, 3_600.0, 86_400.0])), min_size=1, max_size=4
)


@given(marks_of, st.integers(1, 100_000), st.floats(0, 100_000), st.floats(0, 0.5))
def test_nothing_beyond_the_ceiling_is_granted(
    marks: list[RetentionMark], prompt_tokens: int, seconds_max: float, share: float
) -> None:
    tenant = Tenant("a", retention_seconds_max=seconds_max, retention_tier_share=share)
    retention = granted(tuple(marks), prompt_tokens, tenant, ON)

    assert (retention is None) == (not seconds_max or not share)
    if retention is None:
        return
    pairs = retention.member["marks"]
    assert retention.member["share"] == share and 0 < len(pairs) <= len(marks)
    for tokens, seconds in pairs:
        assert seconds <= seconds_max and (tokens is None or 0 < tokens <= prompt_tokens)
    longest = max(seconds for _, seconds in pairs)
    assert retention.token_hours <= prompt_tokens * longest / 3600 * 1.001
    assert retention.shortened == any(seconds > seconds_max for _, seconds in marks)


def test_each_token_is_priced_once_for_the_longest_time() -> None:
    marks = (RetentionMark(0.25, 3600.0), RetentionMark(1.0, 360.0))
    retention = granted(marks, 1000, NOBODY, ON)

    assert retention is not None and retention.token_hours == pytest.approx(250 + 75)
    assert retention.member == {"marks": [[250, 3600.0], [None, 360.0]], "share": 0.1}
    assert granted(marks, 1000, NOBODY, RetentionConfig()) is None, "off by default"


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield session


CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**CHAT, "prompt_cache_retention": "24h"},
    "/v1/responses": {"model": "fake", "input": "hi", "prompt_cache_retention": "24h"},
    "/v1/messages": {**CHAT, "max_tokens": 5, "cache_control": {"type": "ephemeral", "ttl": "1h"}},
}


@pytest.mark.parametrize("path", BODIES)
async def test_the_engine_learns_what_the_tenant_may_keep_and_the_audit_log_what_it_costs(
    start_engine: Any, client: aiohttp.ClientSession, tmp_path: Path, path: str
) -> None:
    tenants = [
        {"name": "a", "keys": [hash_key(KEYS["a"])], "retentionSecondsMax": 1800, "retentionTierShare": 0.25},
        {"name": "b", "keys": [hash_key(KEYS["b"])], "operator": True},
    ]
    auth = auth_files(tmp_path, tenants, unsaltedRoutes="allow")
    audit = tmp_path / "audit.log"
    engine = await start_engine()
    forged = {"kv_transfer_params": {"spillway_retention": {"marks": [[None, 604800]], "share": 1.0}}}
    config = gateway_config([engine], auth=auth, audit={"enabled": True, "file": str(audit)})
    async with running_gateway(config) as running:
        for key in KEYS.values():
            headers = {"authorization": f"Bearer {key}"}
            async with client.post(running.url + path, json=BODIES[path] | forged, headers=headers) as reply:
                assert reply.status == 200, await reply.text()
        wrong = {"cache_control": 1, "prompt_cache_retention": 1}
        async with client.post(running.url + path, json=BODIES[path] | wrong, headers=headers) as reply:
            assert reply.status == 400
            error = await reply.json()
            assert "send" in error["error"]["message"]
            assert (error.get("type") == "error") == (path == "/v1/messages"), "the shape of each API's own errors"
        async with client.get(running.url + "/metrics", headers=headers) as reply:
            page = await reply.text()
    of_a, of_b = (json.loads(seen.body).get("kv_transfer_params") for seen in engine.seen[-2:])

    assert of_a["spillway_retention"] == {"marks": [[None, 1800.0]], "share": 0.25}
    assert of_b is None, "off, and a client's own idea of it passes no gateway"
    first, second, refused = (json.loads(line) for line in audit.read_text().splitlines())
    assert first["retained_token_hours"] > 0
    assert second["retained_token_hours"] is None and refused["retained_token_hours"] is None
    assert 'spillway_gateway_retentions_total{model="fake",outcome="shortened"} 1.0' in page
    assert 'spillway_gateway_retentions_total{model="fake",outcome="refused"} 1.0' in page
