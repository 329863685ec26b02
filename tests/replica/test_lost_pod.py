"""A replica over several pods loses one of them: its leader, the real engine service with a simulated engine behind it,
says to a real gateway that it ends."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from free_ports import free_port
from lanes.rules import ROOT

from spillway_gateway.testing.fake_engine import FakeEngine
from spillway_gateway.testing.running import RunningGateway, gateway_config, running_gateway, until

STAND_IN = ROOT / "tests/cluster/images/engine_stand_in"
MODEL = "m"
BODY = {"model": MODEL, "prompt": "x" * 64, "max_tokens": 800, "ignore_eos": True}
LEADER = """
import sys
from spillway_engine.launch import EngineCommand, run_engine
from spillway_engine.pod_channel import PodBrief
from spillway_engine.settings import LifecycleSettings

port, lines_port, stand_in = sys.argv[1:]
arguments = [
    "--served-model-name", "m", "--host", "127.0.0.1", "--port", port, "--max-model-len", "4096", "--block-size", "16",
    "--middleware", "spillway_engine.middleware.ReadinessMiddleware",
]
command = EngineCommand(
    [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments],
    {"PYTHONPATH": stand_in},
    PodBrief(served_name="m", self_check=False),
    LifecycleSettings(),
    further_pods=1,
    lines_port=int(lines_port),
)
sys.exit(run_engine(command, log=lambda line: print(line, flush=True)))
"""


class Leader:
    """A leader, to which its further pod is no more than a line."""

    def __init__(self, log: Path) -> None:
        self.port, self._lines_port = free_port(), free_port()
        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", LEADER, str(self.port), str(self._lines_port), str(STAND_IN)],
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._line = socket.socket()

    @property
    def said(self) -> str:
        return self._log.read_text()

    def joined_by_a_further_pod(self) -> None:
        self._line.connect(("127.0.0.1", self._lines_port))
        self._line.sendall(b"spillway pod \x00\x01")
        assert self._line.recv(1) == b"+"

    def loses_its_further_pod(self, *, failed: bool) -> None:
        self._line.sendall(b"!" if failed else b"")
        self._line.close()

    def close(self) -> None:
        self._line.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def leader(tmp_path: Path) -> Iterator[Leader]:
    started = Leader(tmp_path / "leader.log")
    yield started
    started.close()


@pytest.fixture
async def other() -> AsyncIterator[FakeEngine]:
    """An engine that is ready once the leader has the request."""
    engine = FakeEngine(model=MODEL, name="other")
    engine.ready = (503, {"ready": False, "reason": "starting"})
    await engine.start()
    yield engine
    await engine.stop()


@asynccontextmanager
async def serving(leader: Leader, other: FakeEngine) -> AsyncIterator[RunningGateway]:
    document = gateway_config([other])
    document["models"][0]["engines"].append({"name": "leader", "url": f"http://127.0.0.1:{leader.port}"})
    async with running_gateway(document, wait_ready=False) as gateway:
        await gateway.until_engine("leader", lambda engine: engine.routable)
        leader.joined_by_a_further_pod()
        yield gateway


async def ask(http: aiohttp.ClientSession, gateway: RunningGateway) -> tuple[int, str | None]:
    async with http.post(gateway.url + "/v1/completions", json=BODY) as reply:
        await reply.read()
        return reply.status, reply.headers.get("retry-after")


@pytest.mark.parametrize("another", [True, False])
async def test_a_lone_request_is_answered_elsewhere_and_is_no_suspect(
    leader: Leader, other: FakeEngine, another: bool
) -> None:
    async with serving(leader, other) as gateway, aiohttp.ClientSession() as http:
        asked = asyncio.create_task(ask(http, gateway))
        await until(lambda: gateway.engine("leader").running_requests)
        if another:
            other.ready = (200, {"ready": True})
            await gateway.until_engine("other", lambda engine: engine.routable)
        leader.loses_its_further_pod(failed=False)
        status, retry_after = await asked
        assert (status, bool(retry_after)) == ((200, False) if another else (503, True)), leader.said
        assert await asyncio.to_thread(leader.process.wait, 60) == 6, leader.said
        assert (await ask(http, gateway))[0] == (200 if another else 503)
        assert not len(gateway.gateway.suspects)


async def test_a_lone_request_whose_further_pod_lost_its_engine_is_a_suspect(leader: Leader, other: FakeEngine) -> None:
    """The request may be the cause, as in an engine of one pod."""
    async with serving(leader, other) as gateway, aiohttp.ClientSession() as http:
        asked = asyncio.create_task(ask(http, gateway))
        await until(lambda: gateway.engine("leader").running_requests)
        other.ready = (200, {"ready": True})
        await gateway.until_engine("other", lambda engine: engine.routable)
        leader.loses_its_further_pod(failed=True)
        assert (await asked)[0] == 502
        assert (await ask(http, gateway))[0] == 422
