"""Faults on demand: GET /engines, GET /faults, POST /engines/{name}/fault with a fault as JSON; name * means all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from spillway_simulator.server.engine_host import CannotNow, EngineHost
from spillway_simulator.server.faults import Fault, decode_fault
from spillway_simulator.server.http_connection import HttpConnection

_encode = msgspec.json.Encoder().encode


def engine_entry(host: EngineHost) -> dict[str, Any]:
    """An engine as the gateway's configuration names it, under `engines`."""
    entry = {"name": host.name, "url": host.url}
    if host.publisher is not None:
        entry |= {"kvEvents": host.publisher.events_url, "kvReplay": host.publisher.replay_url}
    return entry


class AdminRoutes:
    def __init__(self, hosts: Sequence[EngineHost]) -> None:
        self._hosts = hosts

    def handle(self, connection: HttpConnection, method: str, path: str, body: bytes) -> None:
        parts = path.strip("/").split("/")
        if method == "GET" and parts == ["engines"]:
            connection.reply(200, _encode([self._state(host) for host in self._hosts]))
        elif method == "GET" and parts == ["faults"]:
            connection.reply(200, _encode(msgspec.json.schema(Fault)))
        elif method == "POST" and len(parts) == 3 and parts[0] == "engines" and parts[2] == "fault":
            self._apply(connection, parts[1], body)
        else:
            connection.reply(404, _encode({"detail": "GET /engines, GET /faults or POST /engines/NAME/fault"}))

    def _state(self, host: EngineHost) -> dict[str, Any]:
        return {
            **engine_entry(host),
            "up": host.up,
            "running": host.model.running_requests,
            "waiting": host.model.waiting_requests,
            "deviceBlocks": len(host.model.device.keys()),
            "cpuBlocks": len(host.model.tiers.cpu),
            "nextEventSequence": host.publisher.next_sequence if host.publisher is not None else None,
            "lagSeconds": host.lag_seconds,
        }

    def _apply(self, connection: HttpConnection, name: str, body: bytes) -> None:
        hosts = [host for host in self._hosts if name in (host.name, "*")]
        if not hosts:
            connection.reply(404, _encode({"detail": f"no engine {name!r}; GET /engines lists them"}))
            return
        try:
            fault = decode_fault(body)
            for host in hosts:
                host.apply(fault)
        except msgspec.DecodeError as error:
            connection.reply(400, _encode({"detail": f"not a fault: {error}; GET /faults describes them"}))
        except CannotNow as error:
            connection.reply(409, _encode({"detail": str(error)}))
        else:
            connection.reply(200, _encode({"applied": [host.name for host in hosts]}))
