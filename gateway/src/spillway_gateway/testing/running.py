"""A real gateway on a loopback port, inside the test's own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spillway_gateway.app import Gateway
from spillway_gateway.config.settings import parse_config
from spillway_gateway.fleet.engine import Engine
from spillway_gateway.listeners.server import GatewayServer, bind
from spillway_gateway.testing.fake_engine import FakeEngine

MODEL_KEYS = ("aliases", "adapters", "loadableAdapters", "adapterAliases", "tokenizer", "wakeSeconds")
UNTIL_SECONDS_MAX = 120.0  # a busy machine, not a slow gateway


async def until(condition: Callable[[], object]) -> None:
    """Wait until the condition holds; TimeoutError after UNTIL_SECONDS_MAX. For states that no event announces."""
    async with asyncio.timeout(UNTIL_SECONDS_MAX):
        while True:
            if condition():
                return
            await asyncio.sleep(0.001)


@dataclass(frozen=True, slots=True)
class RunningGateway:
    gateway: Gateway
    server: GatewayServer
    url: str
    ops_url: str  # empty without a listener of its own
    picker_port: int | None

    def engine(self, name: str) -> Engine:
        return next(fleet.engines[name] for fleet in self.gateway.fleets if name in fleet.engines)

    async def until_engine(self, name: str, condition: Callable[[Engine], bool]) -> None:
        """Wait for a state of an engine; returns at once when it already holds."""
        engine = self.engine(name)
        reached = asyncio.Event()

        def check(changed: Engine) -> None:
            if condition(changed):
                reached.set()

        engine.on_state.append(check)
        check(engine)
        try:
            async with asyncio.timeout(UNTIL_SECONDS_MAX):
                await reached.wait()
        finally:
            engine.on_state.remove(check)


def gateway_config(engines: Iterable[FakeEngine], **sections: Any) -> dict[str, Any]:
    """A configuration document for fake engines of one model. sections: further top-level settings; those of
    MODEL_KEYS go to the model."""
    fakes = list(engines)
    model: dict[str, Any] = {"name": fakes[0].model, "engines": []}
    for key in MODEL_KEYS:
        if key in sections:
            model[key] = sections.pop(key)
    for fake in fakes:
        entry = {"name": fake.name, "url": fake.url}
        if fake.publisher is not None:
            entry["kvEvents"] = fake.publisher.events_url
            if fake.publisher.replay_url is not None:
                entry["kvReplay"] = fake.publisher.replay_url
        model["engines"].append(entry)
    return {"models": [model], **patient(**sections)}


def patient(**sections: Any) -> dict[str, Any]:
    """Top-level settings with which a busy machine takes no engine out: it is polled often, but only polls and
    connections that are never answered time out. sections: further settings, which precede."""
    patience: dict[str, dict[str, Any]] = {
        "health": {"periodSeconds": 0.1, "timeoutSeconds": UNTIL_SECONDS_MAX},
        "timeouts": {"connectSeconds": UNTIL_SECONDS_MAX},
    }
    return {**sections, **{name: {**kept, **sections.get(name, {})} for name, kept in patience.items()}}


@asynccontextmanager
async def running_gateway(
    document: dict[str, Any], *, wait_ready: bool = True, config_path: Path | None = None
) -> AsyncIterator[RunningGateway]:
    """Serve until the block ends; with wait_ready, every engine has answered a poll first. config_path: a file with
    the same document, to be followed."""
    gateway = Gateway(parse_config(document), config_path)
    listener = bind("127.0.0.1", 0)
    ops_listener = bind("127.0.0.1", 0) if gateway.config.listen.ops_port is not None else None
    picker_listener = None
    if (picker_port := gateway.config.listen.picker_port) is not None:
        picker_listener = bind(gateway.config.listen.host, picker_port, "listen.pickerPort")
    server = GatewayServer(gateway, ops_listener, picker_listener)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    scheme = "https" if server.certificate is not None else "http"
    running = RunningGateway(
        gateway,
        server,
        f"{scheme}://127.0.0.1:{listener.getsockname()[1]}",
        f"http://127.0.0.1:{ops_listener.getsockname()[1]}" if ops_listener is not None else "",
        picker_listener.getsockname()[1] if picker_listener is not None else None,
    )
    try:
        if wait_ready:
            for fleet in gateway.fleets:
                for name in fleet.engines:
                    await running.until_engine(name, lambda engine: engine.routable)
        yield running
    finally:
        gateway.lifecycle.close()
        server.should_exit = True
        await serving
