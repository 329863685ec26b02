"""EndpointSlices as the API server sends them, and the engines that they add up to. Pure.

Structure and meaning: Kubernetes API reference, discovery.k8s.io/v1. A Service has several slices: 100 endpoints each
by default, and one set per address family. While the control plane moves an endpoint it may stand in two of them, so
an engine is the pod (targetRef.uid) and not the entry.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NamedTuple

import msgspec

from spillway_gateway.config.discovery import KubernetesDiscovery
from spillway_gateway.config.settings import EngineConfig
from spillway_gateway.discovery.found import FoundEngine
from spillway_settings.roles import EngineRole

SERVICE_LABEL = "kubernetes.io/service-name"


class Conditions(msgspec.Struct, rename="camel", frozen=True):
    """Conditions of an endpoint. None: unknown, which the API defines as true for the first two, false for the last."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class TargetRef(msgspec.Struct, rename="camel", frozen=True):
    kind: str = ""
    name: str = ""
    uid: str = ""


class Endpoint(msgspec.Struct, rename="camel", frozen=True):
    addresses: list[str] | None = None
    conditions: Conditions | None = None
    hostname: str | None = None
    target_ref: TargetRef | None = None


class Port(msgspec.Struct, rename="camel", frozen=True):
    name: str | None = None
    port: int | None = None
    protocol: str | None = None


class Metadata(msgspec.Struct, rename="camel", frozen=True):
    name: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None


class EndpointSlice(msgspec.Struct, rename="camel", frozen=True):
    metadata: Metadata
    address_type: str = "IPv4"  # IPv4 | IPv6 | FQDN
    endpoints: list[Endpoint] | None = None
    ports: list[Port] | None = None


class ListMetadata(msgspec.Struct, rename="camel", frozen=True):
    resource_version: str = ""
    continue_token: str = msgspec.field(default="", name="continue")


class EndpointSliceList(msgspec.Struct, rename="camel", frozen=True):
    metadata: ListMetadata
    items: list[EndpointSlice] | None = None


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """piece: None for a bookmark. version: the version from which a later watch may begin."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]
    version: str
    piece: EndpointSlice | None


class SliceTable:
    """The slices of a Service by name, as of the last event."""

    def __init__(self) -> None:
        self.slices: dict[str, EndpointSlice] = {}

    def apply(self, event: WatchEvent) -> bool:
        """Apply an event. Returns whether something may have changed. Repeats are harmless."""
        if event.piece is None:
            return False
        name = event.piece.metadata.name
        if event.type == "DELETED":
            return self.slices.pop(name, None) is not None
        self.slices[name] = event.piece
        return True


class Reduction(NamedTuple):
    """engines: the engines by name. problems: slices that could not be used as configured, for people to read."""

    engines: tuple[FoundEngine, ...]
    problems: tuple[str, ...]


class _Withheld(IntEnum):
    NO = 0
    NOT_READY = 1
    TERMINATING = 2


_TEXTS = {_Withheld.NOT_READY: "its pod is not ready", _Withheld.TERMINATING: "its pod is terminating"}
_FAMILIES = {"IPv4": 0, "IPv6": 1}


class _Entry(NamedTuple):
    """One endpoint of one slice; the order is that of preference. kv_*: empty without."""

    family: int
    withheld: _Withheld
    address: str
    url: str
    kv_events: str
    kv_replay: str
    name: str
    role: EngineRole


def engines_of(slices: Iterable[EndpointSlice], config: KubernetesDiscovery) -> Reduction:
    """The engines of a model's Services. The order of slices and of endpoints does not matter.

    An engine whose pod is not ready or terminating is withheld: it keeps its requests and gets no new ones. If a pod
    is listed more than once, one such entry is enough; its IPv4 address is taken if there is one.
    """
    entries: dict[str, list[_Entry]] = {}
    problems: set[str] = set()
    for piece in slices:
        wanted = (config.port, config.kv_events_port, config.kv_replay_port)
        ports = [_port(piece, port, problems) for port in wanted]
        port, kv_events_port, kv_replay_port = ports
        if port is None:
            continue
        role = config.role_services.get((piece.metadata.labels or {}).get(SERVICE_LABEL, ""), config.role)
        for endpoint in piece.endpoints or ():
            if not endpoint.addresses or not endpoint.addresses[0]:
                continue
            address = endpoint.addresses[0]  # all of them mean the same pod
            host = f"[{address}]" if ":" in address else address
            target = endpoint.target_ref
            key = target.uid if target is not None and target.uid else f"address {address}"
            entry = _Entry(
                family=_FAMILIES.get(piece.address_type, 2),
                withheld=_withheld(endpoint.conditions),
                address=address,
                url=f"{config.scheme}://{host}:{port}",
                kv_events=f"tcp://{host}:{kv_events_port}" if kv_events_port is not None else "",
                kv_replay=f"tcp://{host}:{kv_replay_port}" if kv_events_port and kv_replay_port is not None else "",
                name=(target.name if target is not None else "") or endpoint.hostname or address,
                role=role,
            )
            entries.setdefault(key, []).append(entry)
    by_name: dict[str, FoundEngine] = {}
    for key, found in sorted(entries.items()):
        engine = _engine(key, found, config)
        rival = by_name.get(engine.config.name)
        # A pod that was replaced under its name, as in a StatefulSet, while an old slice still names the one before.
        if rival is None or (rival.withheld is not None and engine.withheld is None):
            by_name[engine.config.name] = engine
    return Reduction(tuple(by_name[name] for name in sorted(by_name)), tuple(sorted(problems)))


def _engine(key: str, entries: list[_Entry], config: KubernetesDiscovery) -> FoundEngine:
    best = min(entries)
    withheld = max(entry.withheld for entry in entries)
    engine = EngineConfig(
        best.name,
        best.url,
        best.kv_events or None,
        best.kv_replay or None,
        config.data_parallel_ranks,
        best.role,
        tuple(_worker(best.name, index, config.namespace) for index in range(1, config.nodes_per_replica)),
    )
    return FoundEngine(engine, f"{key} {best.address}", _TEXTS.get(withheld), withheld is _Withheld.TERMINATING)


def _worker(leader: str, index: int, namespace: str | None) -> str:
    """The host of a further pod of a LeaderWorkerSet's group: leader SET-0 has SET-0-1, both under the Service SET."""
    host = f"{leader}-{index}.{leader.rpartition('-')[0]}"
    return host if namespace is None else f"{host}.{namespace}"


def _withheld(conditions: Conditions | None) -> _Withheld:
    """serving is looked at too: with publishNotReadyAddresses `ready` is always true."""
    if conditions is None:
        return _Withheld.NO
    if conditions.terminating:
        return _Withheld.TERMINATING
    not_ready = conditions.ready is False or conditions.serving is False
    return _Withheld.NOT_READY if not_ready else _Withheld.NO


def _port(piece: EndpointSlice, wanted: int | str | None, problems: set[str]) -> int | None:
    if wanted is None or isinstance(wanted, int):
        return wanted
    for port in piece.ports or ():
        if port.name == wanted and port.port is not None and port.protocol in (None, "TCP"):
            return port.port
    if piece.endpoints:  # an empty slice has no ports either
        names = ", ".join(repr(port.name or "") for port in piece.ports or ()) or "none"
        problems.add(f"EndpointSlice {piece.metadata.name} has no TCP port named {wanted!r}; its ports: {names}")
    return None
