"""The picker's process ends and starts again under load, behind a real Envoy."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import socket
import subprocess
import sys
from collections import Counter
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from gateway.tests.conftest import StartEngine
from gateway.tests.picker.test_envoy import post, texts
from spillway_gateway.testing.envoy import envoy_config, running_envoy
from spillway_gateway.testing.faults import Slow
from spillway_gateway.testing.running import gateway_config, until

CLIENTS = 6
PROMPT = "word " * 20_000
RETRIES = 10_000  # until the picker is back, however slow the machine is
PICKED, PASSED = "picked", "passed on without the picker"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Gateway:
    """The gateway's process, which may be started again with the same ports."""

    def __init__(self, path: Path, document: dict[str, Any]) -> None:
        self.picker_port = free_port()
        self._path = path
        listen = {"host": "127.0.0.1", "port": free_port(), "pickerPort": self.picker_port}
        path.write_text(yaml.safe_dump(document | {"listen": listen}))

    async def start(self) -> None:
        command = [sys.executable, "-m", "spillway_gateway", "--config", str(self._path)]
        self._process = await asyncio.create_subprocess_exec(
            *command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    async def end(self, by: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(by)
        await self._process.wait()


class Load:
    """Clients that send prompts until they are stopped. text: of each answer. streams: every second one is a stream."""

    def __init__(self, url: str, model: str, text: str, *, streams: bool) -> None:
        self._streams = streams
        self.answers: Counter[str] = Counter()
        self.failures: list[object] = []
        self._ending = False
        self._text = text
        self._clients = [asyncio.create_task(self._client(f"{url}/v1/completions", model)) for _ in range(CLIENTS)]

    async def stop(self) -> None:
        self._ending = True
        await asyncio.gather(*self._clients)

    async def until_more(self, kind: str) -> None:
        before = self.answers[kind]
        await until(lambda: self.answers[kind] >= before + 2 * CLIENTS or self.failures)

    async def _client(self, url: str, model: str) -> None:
        async with aiohttp.ClientSession() as session:
            for number in itertools.count():
                if self._ending:
                    return
                stream = self._streams and number % 2 == 1
                body = {"model": model, "prompt": PROMPT, "max_tokens": 2, "stream": stream}
                try:
                    async with session.post(url, json=body) as reply:
                        answer = await reply.read()
                        if reply.status != 200 or text_of(answer, stream=stream) != self._text:
                            self.failures.append((reply.status, answer[:200]))
                        self.answers[PICKED if "x-spillway-engine" in reply.headers else PASSED] += 1
                except aiohttp.ClientError as error:
                    self.failures.append(error)


def text_of(answer: bytes, *, stream: bool) -> str:
    """The text of an answer; empty if a stream is not whole."""
    if stream:
        return "".join(texts(answer)) if answer.endswith(b"data: [DONE]\n\n") else ""
    text: str = json.loads(answer)["choices"][0]["text"]
    return text


@pytest.mark.parametrize(
    ("by", "fails_open", "keeps_bodies", "retries"),
    [
        (signal.SIGTERM, True, False, 0),
        (signal.SIGKILL, True, True, 0),
        (signal.SIGKILL, True, False, RETRIES),
        (signal.SIGKILL, False, False, RETRIES),
    ],
    ids=[
        "ended, fail-open",
        "killed, fail-open and bodies kept",
        "killed, fail-open and a hop that repeats",
        "killed, fail-close and a hop that repeats",
    ],
)
async def test_no_request_fails_while_the_picker_ends_and_starts_again(
    start_engine: StartEngine, tmp_path: Path, by: signal.Signals, fails_open: bool, keeps_bodies: bool, retries: int
):
    engines = [await start_engine(f"fake-{number}", max_model_len=1_000_000) for number in range(2)]
    for engine in engines:
        engine.write_bytes = 61  # chunks end within events
        engine.fault = Slow(0.02, 0.01 if keeps_bodies else 0.0)
    addresses = [f"127.0.0.1:{engine.port}" for engine in engines] if fails_open else None
    # Envoy has to see the health service's answer before the picker goes.
    gateway = Gateway(tmp_path / "gateway.yaml", gateway_config(engines, shutdown={"drainDelaySeconds": 4.0}))
    config = envoy_config(gateway.picker_port, fail_open_to=addresses, retries=retries, keeps_bodies=keeps_bodies)
    async with AsyncExitStack() as stack:
        await gateway.start()
        stack.push_async_callback(gateway.end, signal.SIGKILL)
        url = await stack.enter_async_context(running_envoy(config))
        model = engines[0].model
        _, _, direct = await post(
            engines[0].url, "/v1/completions", {"model": model, "prompt": PROMPT, "max_tokens": 2}
        )
        load = Load(url, model, text_of(direct, stream=False), streams=keeps_bodies)
        stack.push_async_callback(load.stop)
        await load.until_more(PICKED)
        await gateway.end(by)
        if fails_open:
            await load.until_more(PASSED)
        await gateway.start()
        await load.until_more(PICKED)
        assert not load.failures
