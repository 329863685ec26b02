"""The names of uvicorn that the gateway's servers use without its promise to keep them: a release that moves one fails
here, by name, before a connection does. pyproject.toml bounds the version; raise the bound once this passes."""

from __future__ import annotations

import asyncio
import inspect
import re
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httptools
import pytest
import uvicorn
from uvicorn.lifespan.on import LifespanOn
from uvicorn.protocols.http import flow_control, httptools_impl
from uvicorn.server import Server, ServerState

PROTOCOL_METHODS = {  # overridden or called by client/bounded_connection.py and client/connection.py
    "connection_made": ["transport"],
    "connection_lost": ["exc"],
    "data_received": ["data"],
    "on_message_begin": [],
    "on_url": ["url"],
    "on_header": ["name", "value"],
    "on_headers_complete": [],
    "on_body": ["body"],
    "on_message_complete": [],
    "on_response_complete": [],
    "_start_asgi_task": ["cycle", "app"],
}
PROTOCOL_ATTRIBUTES = (
    "client",
    "cycle",
    "expect_100_continue",
    "flow",
    "headers",
    "loop",
    "parser",
    "pipeline",
    "scope",
    "server_state",
    "transport",
    "url",
)
FLOW_ATTRIBUTES = ("write_paused", "pause_reading", "resume_reading")
CYCLE_ATTRIBUTES = (
    "body",
    "default_headers",
    "disconnected",
    "keep_alive",
    "message_event",
    "more_body",
    "on_response",
    "response_complete",
    "response_started",
    "scope",
)
SERVER_METHODS = {  # overridden or called by listeners/server.py and ops/server.py
    "serve": ["sockets"],
    "startup": ["sockets"],
    "on_tick": ["counter"],
    "capture_signals": [],
    "handle_exit": ["sig", "frame"],
}
SERVER_ATTRIBUTES = ("config", "server_state", "should_exit", "started")
CONFIG_ATTRIBUTES = ("loaded", "loaded_app")


def parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


@pytest.mark.parametrize("name", PROTOCOL_METHODS)
def test_httptools_protocol_has_the_method(name: str) -> None:
    assert parameters(getattr(httptools_impl.HttpToolsProtocol, name)) == PROTOCOL_METHODS[name]


@pytest.mark.parametrize("name", SERVER_METHODS)
def test_server_has_the_method(name: str) -> None:
    assert parameters(getattr(Server, name)) == SERVER_METHODS[name]


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def close(self) -> None: ...


async def test_protocol_cycle_and_server_have_the_attributes() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.get_running_loop().create_future()

    config = uvicorn.Config(app, lifespan="off")
    config.load()
    state = ServerState()
    protocol = httptools_impl.HttpToolsProtocol(config, state, LifespanOn(config).state)
    protocol.connection_made(Transport())
    assert protocol in state.connections
    protocol.data_received(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nab")

    assert [name for name in PROTOCOL_ATTRIBUTES if not hasattr(protocol, name)] == []
    assert [name for name in CYCLE_ATTRIBUTES if not hasattr(protocol.cycle, name)] == []
    assert [
        name for name in ("write_paused", "pause_reading", "resume_reading") if not hasattr(protocol.flow, name)
    ] == []
    assert isinstance(protocol.parser, httptools.HttpRequestParser)
    assert protocol.cycle.body == b"ab" and protocol.cycle.more_body and not protocol.cycle.response_started
    assert isinstance(state.total_requests, int)
    server = Server(config)
    assert [name for name in SERVER_ATTRIBUTES if not hasattr(server, name)] == []
    assert [name for name in CONFIG_ATTRIBUTES if not hasattr(config, name)] == []
    for task in state.tasks:
        task.cancel()


def test_constants() -> None:
    assert httptools_impl.STATUS_LINE[200].startswith(b"HTTP/1.1 200 ")
    assert isinstance(flow_control.HIGH_WATER_LIMIT, int)


def test_the_installed_uvicorn_is_within_the_bounds() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (given,) = [each for each in project["dependencies"] if each.startswith("uvicorn")]
    bound = re.search(r"<0\.(\d+)", given)
    assert bound is not None, f"{given}: no upper bound"
    assert int(version("uvicorn").split(".")[1]) < int(bound[1])
