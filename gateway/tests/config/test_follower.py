"""A configuration file that changes under a running gateway."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from spillway_gateway.config.follower import differences, merge_live
from spillway_gateway.config.settings import parse_config
from spillway_gateway.testing.faults import HoldInStream
from spillway_gateway.testing.running import RunningGateway, gateway_config, running_gateway, until

NO_POLL: dict[str, Any] = {"reload": {"periodSeconds": 0}}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}


def write(path: Path, document: Any) -> None:
    beside = path.with_suffix(".new")
    beside.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    beside.replace(path)  # as a ConfigMap changes: at once


async def read(client: aiohttp.ClientSession, url: str) -> str:
    async with client.get(url) as reply:
        return await reply.text()


async def reread(running: RunningGateway, document: dict[str, Any] | None) -> None:
    """Reread the file as SIGHUP does, and wait until `document` is in effect; None: until the file has been refused."""
    follower = running.gateway.follower
    assert follower is not None
    follower.read_soon()
    if document is None:
        await until(lambda: follower.refused_now)
        return
    given = parse_config(document)
    await until(lambda: not follower.refused_now and follower.current == merge_live(follower.current, given)[0])


async def test_engines_come_and_go_and_no_stream_is_lost(start_engine: Any, tmp_path: Path) -> None:
    old, new = await start_engine("old"), await start_engine("new")
    path = tmp_path / "gateway.yaml"
    only_old = gateway_config([old], **NO_POLL)
    write(path, only_old)
    release = asyncio.Event()
    old.fault = HoldInStream(2, release)
    async with (
        running_gateway(only_old, config_path=path) as running,
        aiohttp.ClientSession() as client,
        client.post(running.url + "/v1/chat/completions", json={**CHAT, "stream": True}) as stream,
    ):
        begun = await stream.content.readany()
        gone = running.engine("old")

        only_new = gateway_config([new], aliases=["nick"], **NO_POLL)
        write(path, only_new)
        await reread(running, only_new)
        await running.until_engine("new", lambda engine: engine.routable)

        assert list(running.gateway.fleets[0].engines) == ["new"]
        for _ in range(3):
            async with client.post(running.url + "/v1/chat/completions", json={**CHAT, "model": "nick"}) as reply:
                assert (reply.status, reply.headers["x-spillway-engine"]) == (200, "new")
        assert gone.running_requests == 1
        release.set()
        rest = await stream.read()
        assert (begun + rest).endswith(b"data: [DONE]\n\n")
        await until(lambda: gone.running_requests == 0)
        shown = await read(client, running.url + "/spillway/config")
        assert new.url in shown and old.url not in shown
    assert gone.queued_tokens == gone.resident_tokens == 0


async def test_an_engine_with_a_new_address_under_its_old_name(start_engine: Any, tmp_path: Path) -> None:
    first, second = await start_engine("same"), await start_engine("same")
    path = tmp_path / "gateway.yaml"
    write(path, gateway_config([first], **NO_POLL))
    async with (
        running_gateway(gateway_config([first], **NO_POLL), config_path=path) as running,
        aiohttp.ClientSession() as client,
    ):
        async with client.post(running.url + "/v1/chat/completions", json=CHAT) as reply:
            assert reply.status == 200
        write(path, gateway_config([second], **NO_POLL))
        await reread(running, gateway_config([second], **NO_POLL))
        await running.until_engine("same", lambda engine: engine.routable)
        async with client.post(running.url + "/v1/chat/completions", json=CHAT) as reply:
            assert reply.status == 200
    assert (len(first.seen), len(second.seen)) == (1, 1)


async def test_models_come_and_go(start_engine: Any, tmp_path: Path) -> None:
    one, two = await start_engine("one", model="m1"), await start_engine("two", model="m2")
    path = tmp_path / "gateway.yaml"
    both = gateway_config([one], **NO_POLL)
    both["models"] += gateway_config([two])["models"]
    write(path, gateway_config([one], **NO_POLL))
    async with (
        running_gateway(gateway_config([one], **NO_POLL), config_path=path) as running,
        aiohttp.ClientSession() as client,
    ):

        async def status(model: str) -> int:
            async with client.post(running.url + "/v1/chat/completions", json={**CHAT, "model": model}) as reply:
                return reply.status

        assert [await status("m1"), await status("m2")] == [200, 404]
        write(path, both)
        await reread(running, both)
        await running.until_engine("two", lambda engine: engine.routable)
        assert [await status("m1"), await status("m2")] == [200, 200]
        async with client.get(running.url + "/v1/models") as reply:
            assert [card["id"] for card in (await reply.json())["data"]] == ["m1", "m2"]
        write(path, gateway_config([two], **NO_POLL))
        await reread(running, gateway_config([two], **NO_POLL))
        assert [await status("m1"), await status("m2")] == [404, 200]
        assert list(running.gateway.admissions) == ["m2"]


@pytest.mark.parametrize("bad", ["models: [", "modles: []", "models: []"])
async def test_a_bad_file_leaves_what_was_and_says_so(
    start_engine: Any, tmp_path: Path, bad: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await start_engine()
    path = tmp_path / "gateway.yaml"
    document = gateway_config([engine], **NO_POLL)
    write(path, document)
    caplog.set_level(logging.DEBUG, logger="spillway_gateway.config")
    async with (
        running_gateway(document, config_path=path) as running,
        aiohttp.ClientSession() as client,
    ):
        write(path, bad)
        await reread(running, None)
        async with client.post(running.url + "/v1/chat/completions", json=CHAT) as reply:
            assert reply.status == 200
        page = await read(client, running.url + "/metrics")
        assert 'spillway_gateway_config_reloads_total{outcome="refused"} 0.0' not in page
        assert "spillway_gateway_config_refused 1.0" in page
        assert "stays in use" in caplog.text

        changed = {**document, "limits": {"bodyBytesMax": 10}, "routing": {"runningRequestMs": 3}}
        write(path, changed)
        await reread(running, changed)
        async with client.post(running.url + "/v1/chat/completions", json=CHAT) as reply:
            assert reply.status == 413
        page = await read(client, running.url + "/metrics")
        assert "spillway_gateway_config_refused 0.0" in page
        assert "spillway_gateway_config_restart_pending 1.0" in page
        assert "restart to apply: routing" in caplog.text
        assert "limits.bodyBytesMax: 67108864 becomes 10 now" in caplog.text
        assert "routing.runningRequestMs: 10 becomes 3.0 after a restart" in caplog.text


def test_settings_that_differ_are_named_with_both_values() -> None:
    before = {"limits": {"a": 1, "b": 2}, "log": {"level": "info"}, "models": [1]}
    after = {"limits": {"a": 1, "b": 3}, "models": [2], "tracing": {"c": 4}}
    assert list(differences(before, after)) == [
        ("limits.b", 2, 3),
        ("log", {"level": "info"}, None),
        ("models", [1], [2]),
        ("tracing", None, {"c": 4}),
    ]


def test_only_live_sections_change() -> None:
    engine = {"name": "e0", "url": "http://127.0.0.1:1"}
    current = parse_config({"models": [{"name": "m", "engines": [engine]}]})
    given = parse_config(
        {
            "models": [{"name": "m", "engines": [{**engine, "name": "e1"}]}],
            "timeouts": {"idleSeconds": 3},
            "listen": {"port": 1},
            "auth": {"reloadSeconds": 9},
        }
    )

    effective, pending = merge_live(current, given)

    assert pending == ("listen", "auth")
    assert (effective.models, effective.timeouts) == (given.models, given.timeouts)
    assert (effective.listen, effective.auth) == (current.listen, current.auth)


async def test_sighup_and_a_changed_file_reach_the_process(tmp_path: Path, start_engine: Any) -> None:
    first, second = await start_engine("first"), await start_engine("second")
    path = tmp_path / "gateway.yaml"
    settings = {"listen": {"port": 0}, "reload": {"periodSeconds": 0.05}}
    write(path, gateway_config([first], **settings))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "spillway_gateway", "--config", str(path), stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None

    async def until_said(text: bytes) -> None:
        assert process.stderr is not None
        while text not in await process.stderr.readline():
            assert process.returncode is None

    async with asyncio.timeout(120):
        await until_said(b"first is ready")
        write(path, gateway_config([second], **settings))
        await until_said(b"second is ready")
        os.kill(process.pid, signal.SIGHUP)
        await until_said(b"nothing to change")
        process.terminate()
        _, rest = await process.communicate()
    assert process.returncode == 0
    assert b"Traceback" not in rest
