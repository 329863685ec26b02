"""A thousand clients that connect at once, and an engine that dies with all of its requests."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from contextlib import ExitStack
from typing import Any

import httpx
from attack.paced_stream import SECONDS_MAX
from attack.raw_client import connect, plain_request
from attack.target import Target
from stack_driver.deadlines import eventually

CLIENTS = 1_000
REQUESTS = 900
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
DYING = "dyin"  # as long as the other model's name, so that the same request fits
OK = b"HTTP/1.1 200 "


def test_a_thousand_new_clients_delay_no_other(target: Target) -> None:
    """All have connected before the first one sends."""

    def attack() -> None:
        with ExitStack() as stack:
            sockets = [stack.enter_context(connect(target.port)) for _ in range(CLIENTS)]
            for sock in sockets:
                sock.sendall(HEALTH)
            assert all(sock.recv(65536).startswith(OK) for sock in sockets)

    target.suffer(attack).assert_bearable(grown_mib_max=64)


def test_an_engine_that_dies_with_many_requests_delays_no_other(start_target: Any) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    model = {"name": DYING, "engines": [{"name": f"{DYING}-0", "url": f"http://127.0.0.1:{port}"}]}
    admission = {"requestsPerEngineMax": REQUESTS}
    target = start_target(settings={"admission": admission, "health": {"periodSeconds": 0.1}}, more_models=[model])

    def reached(name: str, value: int) -> bool:
        page = httpx.get(f"{target.ops_url}/metrics", timeout=SECONDS_MAX).text
        return re.search(rf'^{name}{{[^}}]*engine="{DYING}-0"[^}}]*}} {value}(\.0)?$', page, re.MULTILINE) is not None

    def attack() -> None:
        command = [sys.executable, "-m", "spillway_gateway.testing.fake_engine_host", "--model", DYING]
        command += ["--slow-seconds", str(2 * SECONDS_MAX), "--port", str(port), "--no-tokenize-route"]
        with ExitStack() as stack:
            engine = stack.enter_context(subprocess.Popen(command, stdout=subprocess.DEVNULL))
            stack.callback(engine.kill)
            eventually("it is ready", lambda: reached("spillway_gateway_engine_up", 1), SECONDS_MAX)
            sockets = [stack.enter_context(connect(target.port)) for _ in range(REQUESTS)]
            for sock in sockets:
                sock.sendall(plain_request("hello").replace(b'"fake"', b'"%s"' % DYING.encode()))
            eventually("all wait there", lambda: reached("spillway_gateway_in_flight_requests", REQUESTS), SECONDS_MAX)
            engine.kill()
            assert all(sock.recv(65536).startswith(b"HTTP/1.1 5") for sock in sockets)

    target.suffer(attack).assert_bearable(grown_mib_max=128)
