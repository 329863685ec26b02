"""`python -m vllm.entrypoints.openai.api_server` with a simulated engine behind it.

Reads the command line that spillway_engine writes, loads the middleware that it names, demands VLLM_API_KEY as vLLM
does, and passes every request on to an engine simulator in the same process. So a pod's settings, probes, readiness and
drain are the product's own; only the answers are made up.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import uvicorn

from spillway_simulator.server.simulator import Simulator
from spillway_simulator.settings import Settings
from vllm.rendezvous import await_further_pods

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
# Answers take as long as those of a small model on a CPU, so that there are running requests to drain and to lose.
PRESET = "cpu-smollm2-135m"
GUARDED_PREFIX = "/v1"  # what vLLM asks its API key for


def read_arguments() -> argparse.Namespace:
    """Return the arguments that matter to a simulator; the rest of vLLM's are accepted and ignored."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--block-size", type=int, required=True)
    parser.add_argument("--num-gpu-blocks-override", type=int, default=512)
    parser.add_argument("--middleware", required=True)
    parser.add_argument("--kv-events-config", type=json.loads, default=None)
    parser.add_argument("--kv-transfer-config", type=json.loads, default=None)
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--master-port", type=int, default=0)
    return parser.parse_known_args()[0]


def simulator_settings(given: argparse.Namespace) -> Settings:
    """HTTP on a loopback port of the system's choice, KV events where vLLM would publish them."""
    events = given.kv_events_config or {}
    extra = (given.kv_transfer_config or {}).get("kv_connector_extra_config", {})
    cpu_blocks = int(extra.get("num_cpu_blocks", 0))
    return Settings(
        model=given.served_model_name,
        # KV events are bound to all addresses, the simulator's own HTTP to whatever it listens on beside them.
        host="0.0.0.0",
        port=0,
        admin_port=0,
        kv_events=bool(events),
        kv_events_port=_port(events.get("endpoint")),
        kv_replay_port=_port(events.get("replay_endpoint")),
        preset=PRESET,
        block_tokens=given.block_size,
        device_blocks=given.num_gpu_blocks_override,
        cpu_blocks=cpu_blocks,
        shared_blocks=4 * cpu_blocks if extra.get("secondary_tiers") else 0,
        max_model_tokens=given.max_model_len,
        max_running=64,
        max_batched_tokens=2048,
    )


def _port(endpoint: str | None) -> int:
    return int(endpoint.rsplit(":", 1)[1]) if endpoint else 0


class Server:
    """One ASGI application: a proxy of the simulator's own port."""

    def __init__(self, settings: Settings) -> None:
        self._simulator = Simulator(settings)
        self._session: aiohttp.ClientSession | None = None
        self._key = os.environ.get("VLLM_API_KEY", "")

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        headers = {name: value for name, value in scope["headers"]}
        guarded = self._key and scope["path"].startswith(GUARDED_PREFIX)
        if guarded and headers.get(b"authorization") != f"Bearer {self._key}".encode():
            await _answer(send, 401, b'{"error":"Unauthorized"}')
            return
        await self._pass_on(scope, headers, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        await self._simulator.start()
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(), auto_decompress=False)
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._session.close()
        self._simulator.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _pass_on(self, scope: Message, headers: dict[bytes, bytes], receive: Receive, send: Send) -> None:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        assert self._session is not None
        url = f"http://127.0.0.1:{self._simulator.hosts[0].port}{scope['path']}"
        kept = {name.decode(): headers[name].decode() for name in (b"content-type", b"x-request-id") if name in headers}
        gone = asyncio.ensure_future(_disconnected(receive))
        copying = asyncio.ensure_future(self._copy(scope["method"], url, bytes(body), kept, send))
        try:
            await asyncio.wait({gone, copying}, return_when=asyncio.FIRST_COMPLETED)
            if copying.done():
                copying.result()
        finally:
            gone.cancel()
            copying.cancel()

    async def _copy(self, method: str, url: str, body: bytes, headers: dict[str, str], send: Send) -> None:
        assert self._session is not None
        async with self._session.request(method, url, data=body, headers=headers) as reply:
            kept = [(name.lower().encode(), value.encode()) for name, value in reply.headers.items()]
            kept = [pair for pair in kept if pair[0] in (b"content-type", b"cache-control", b"x-spillway-simulated")]
            await send({"type": "http.response.start", "status": reply.status, "headers": kept})
            async for chunk in reply.content.iter_any():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def main() -> None:
    given = read_arguments()
    module, _, name = given.middleware.rpartition(".")
    middleware = getattr(importlib.import_module(module), name)
    application = middleware(Server(simulator_settings(given)))
    further_pods = await_further_pods(given.master_port, given.nnodes - 1) if given.nnodes > 1 else []
    uvicorn.run(application, host=given.host, port=given.port, lifespan="on", log_level="warning", access_log=False)
    for pod in further_pods:
        pod.close()


if __name__ == "__main__":
    main()
