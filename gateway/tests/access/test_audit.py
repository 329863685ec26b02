"""Audit lines of real requests, and the log's own bounds."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from spillway_gateway.access.audit import REFUSALS_BURST, REFUSALS_PER_SECOND, AuditLine, AuditLog
from spillway_gateway.access.keys import hash_key
from spillway_gateway.config.settings import AuditConfig
from spillway_gateway.errors import ConfigError
from spillway_gateway.testing.faults import Hang
from spillway_gateway.testing.running import gateway_config, running_gateway, until

SECRET = "the quick brown fox of the prompt"
KEY = "sk-a" + "0" * 40
TRACE = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_one_line_per_request_and_no_word_of_it(start_engine: Any, tmp_path: Path) -> None:
    engine = await start_engine()
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump({"tenants": [{"name": "search", "keys": [hash_key(KEY)]}]}))
    (tmp_path / "salt").write_text("s" * 32)
    file = tmp_path / "audit.log"
    settings = {
        "audit": {"enabled": True, "file": str(file)},
        "auth": {"keysFile": str(tmp_path / "keys.yaml"), "saltSecretFile": str(tmp_path / "salt")},
    }
    body = {"model": "fake", "messages": [{"role": "user", "content": SECRET}]}
    async with running_gateway(gateway_config([engine], **settings)) as running, aiohttp.ClientSession() as client:
        url = running.url + "/v1/chat/completions"
        with_key = {"authorization": f"Bearer {KEY}", "x-request-id": "asked", "traceparent": TRACE}
        for fields, headers in (
            ({}, with_key),
            ({"stream": True}, with_key),
            ({"stream": True, "stream_options": {"include_usage": True}}, with_key),
            ({"model": SECRET}, with_key),
            ({}, {}),
        ):
            async with client.post(url, json={**body, **fields}, headers=headers) as reply:
                await reply.read()
        engine.fault = Hang()
        left = asyncio.create_task(client.post(url, json=body, headers=with_key))
        await until(lambda: len(engine.seen) == 4)
        left.cancel()
        await until(lambda: not running.gateway.lifecycle.running)

    plain, stream, with_usage, unknown, refused, gone = lines(file)
    assert plain["tenant"] == "search"
    assert (plain["request_id"], plain["trace_id"]) == ("asked", "ab" * 16)
    assert (plain["model"], plain["engine"], plain["route"], plain["status"]) == ("fake", "fake-0", "only", 200)
    assert (plain["prompt_tokens"], plain["completion_tokens"], plain["stream"]) == (39, 4, False)
    assert plain["milliseconds"] > 0 and plain["error"] is None
    assert stream["stream"] and stream["first_byte_milliseconds"] <= stream["milliseconds"]
    assert stream["completion_tokens"] == 5  # events, as the stream had no usage
    assert with_usage["completion_tokens"] == 4
    assert (unknown["status"], unknown["error"], unknown["tenant"]) == (404, "model_not_found", "search")
    assert (refused["status"], refused["error"], refused["tenant"]) == (401, "missing_api_key", None)
    assert gone["status"] == 499
    text = file.read_text()
    assert SECRET not in text and KEY not in text


def line(number: int) -> AuditLine:
    return AuditLine(
        time="t",
        request_id=str(number),
        trace_id=None,
        tenant=None,
        model=None,
        path="/",
        status=200,
        milliseconds=1.0,
    )


def test_a_moved_file_is_opened_anew(tmp_path: Path) -> None:
    file = tmp_path / "audit.log"
    log = AuditLog(AuditConfig(True, str(file)))
    log.write(line(1))
    log.close()
    log = AuditLog(AuditConfig(True, str(file)))
    file.rename(tmp_path / "audit.log.1")
    log.write(line(2))
    log.close()

    assert [entry["request_id"] for entry in lines(tmp_path / "audit.log.1")] == ["1"]
    assert [entry["request_id"] for entry in lines(file)] == ["2"]


def test_a_place_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"audit.file .*cannot be opened"):
        AuditLog(AuditConfig(True, str(tmp_path / "absent" / "audit.log")))


def test_refusals_of_unknown_callers_do_not_fill_the_disk(tmp_path: Path) -> None:
    now = 0.0
    log = AuditLog(AuditConfig(True, str(tmp_path / "audit.log")), clock=lambda: now)
    asked: dict[str, Any] = dict.fromkeys(["trace_id", "tenant", "model"]) | {"milliseconds": 0}
    asked |= dict.fromkeys(["time", "request_id", "path"], "x")
    for number in range(20_000):
        log.write(AuditLine(**asked, status=401))
        if number % 1000 == 0:
            log.write(AuditLine(**asked, status=200))
    now = 5.0
    for _ in range(100):
        log.write(AuditLine(**asked, status=401))
    log.close()

    statuses = [line["status"] for line in lines(tmp_path / "audit.log")]
    assert statuses.count(200) == 20
    assert statuses.count(401) == REFUSALS_BURST + 5 * REFUSALS_PER_SECOND
    assert log.refusals_unwritten_total == 20_100 - statuses.count(401)
    assert log.dropped_total == 0
