"""Settings of engine discovery: where a model's engines are found when they are not listed one by one."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from spillway_gateway.errors import ConfigError
from spillway_settings.roles import EngineRole, missing_role
from spillway_settings.typed import CamelSection, Count, Port, Positive, Text

_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount/"
_NAME = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?\Z"
ObjectName = Annotated[str, Meta(pattern=_NAME, description="the plain name of a Kubernetes object (a-z, 0-9 and -)")]
Ranks = Annotated[int, Meta(ge=1, le=1024)]  # data parallel ranks of one engine
PortName = Annotated[str, Meta(pattern=_NAME, description="a port's name in the Service or its number")]


class KubernetesDiscovery(CamelSection, frozen=True):
    """The EndpointSlices of a model's Services, followed by a watch. Ports by their name in the Service, or by number.

    What the gateway needs to be allowed: get, list and watch of endpointslices (discovery.k8s.io) in the namespace, and
    with pod_deletion_cost_seconds patch of pods.
    """

    service: ObjectName
    role: EngineRole = EngineRole.BOTH  # of its engines
    # further Services of the model, each with its engines' role
    role_services: dict[ObjectName, EngineRole] = msgspec.field(default_factory=dict)
    namespace: ObjectName | None = None  # None: the gateway's own, from namespace_file
    port: Port | PortName = "http"
    kv_events_port: Port | PortName | None = None
    kv_replay_port: Port | PortName | None = None
    data_parallel_ranks: Ranks = 1  # of every engine; the ports of events and replays are those of rank 0
    # Pods of every engine, which have the ranks in equal parts and are named as LeaderWorkerSet names them.
    nodes_per_replica: Ranks = 1
    scheme: Literal["http", "https"] = "http"
    resync_seconds: Positive = 300.0  # between two full lists, however quiet the watch is
    timeout_seconds: Positive = 10.0  # of a list, and until a watch begins
    # Engines of a Deployment: between two writes of one pod's deletion cost; None: none is written. See scaling/.
    pod_deletion_cost_seconds: Positive | None = None
    # Longest pause between two tries while the API server is away. Nothing else delays the list after its return, so
    # changes made meanwhile are seen within two seconds.
    retry_seconds_max: Positive = 1.0
    api_server: Text | None = None  # https://HOST:PORT; None: of the cluster that the gateway runs in
    token_file: Text = _ACCOUNT + "token"  # read again for every call: the kubelet renews it
    ca_file: Text = _ACCOUNT + "ca.crt"
    namespace_file: Text = _ACCOUNT + "namespace"


class DnsDiscovery(CamelSection, frozen=True):
    """All addresses of one name, asked for again and again. With port: A records, AAAA if there are none. Without:
    SRV records, which bring the port."""

    name: Text
    port: Port | None = None
    kv_events_port: Port | None = None
    kv_replay_port: Port | None = None
    data_parallel_ranks: Ranks = 1  # of every engine; the ports of events and replays are those of rank 0
    scheme: Literal["http", "https"] = "http"
    period_seconds: Positive = 2.0
    timeout_seconds: Positive = 2.0  # of one resolution, all its tries together
    empty_answers_before_removal: Count = 3  # in a row: a name server that starts may not know the name for a moment
    nameservers: tuple[Text, ...] = ()  # IP or IP:PORT; empty: those of /etc/resolv.conf


class DiscoveryConfig(CamelSection, frozen=True):
    """A source of engines: exactly one of the two."""

    kubernetes: KubernetesDiscovery | None = None
    dns: DnsDiscovery | None = None


def check_discovery(model: str, discovery: DiscoveryConfig) -> None:
    """Raises ConfigError naming the setting, what was given and what is needed."""
    where = f"models: discovery of {model!r}"
    if (discovery.kubernetes is None) == (discovery.dns is None):
        raise ConfigError(f"{where}: one of kubernetes and dns needed; set exactly one")
    if discovery.kubernetes is not None:
        _check_kubernetes(f"{where}: kubernetes", discovery.kubernetes)
    if discovery.dns is not None:
        _check_dns(f"{where}: dns", discovery.dns)


def _check_kubernetes(where: str, given: KubernetesDiscovery) -> None:
    _check_ports(where, given)
    if given.data_parallel_ranks % given.nodes_per_replica:
        raise ConfigError(
            f"{where}.nodesPerReplica: {given.nodes_per_replica} does not divide dataParallelRanks "
            f"{given.data_parallel_ranks}; correct one of the two"
        )
    roles = [given.role, *given.role_services.values()]
    lack = missing_role(roles)
    if lack is not None:
        raise ConfigError(f"{where}: {lack.replace('one of them', 'those of one Service')}")
    if given.service in given.role_services:
        raise ConfigError(f"{where}.roleServices: {given.service!r} is kubernetes.service too; set its role by `role`")
    if given.kv_events_port is None and any(role is not EngineRole.BOTH for role in roles):
        raise ConfigError(
            f"{where}.kvEventsPort: missing, but engines have roles, which rest on what is known of their shared tier; "
            "set it, or remove the roles"
        )
    if given.api_server is not None:
        parts = urlsplit(given.api_server)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise ConfigError(f"{where}.apiServer: {given.api_server!r} given, https://HOST:PORT needed")


def _check_dns(where: str, given: DnsDiscovery) -> None:
    _check_ports(where, given)
    for server in given.nameservers:
        try:
            nameserver(server)
        except ValueError:
            raise ConfigError(
                f"{where}.nameservers: {server!r} given, IP or IP:PORT needed ([IP]:PORT for IPv6)"
            ) from None


def nameserver(text: str) -> tuple[str, int]:
    """Address and port of one entry of dns.nameservers. Raises ValueError."""
    try:
        return str(ipaddress.ip_address(text)), 53
    except ValueError:
        host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or not 0 < int(port) <= 65535:
        raise ValueError(text)
    return str(ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))), int(port)


def _check_ports(where: str, given: KubernetesDiscovery | DnsDiscovery) -> None:
    if given.kv_replay_port is not None and given.kv_events_port is None:
        raise ConfigError(f"{where}: kvReplayPort is set without kvEventsPort; set both, or neither")
    ports = {"kvEventsPort": given.kv_events_port, "kvReplayPort": given.kv_replay_port}
    numbers = {key: port for key, port in ports.items() if isinstance(port, int)}
    check_rank_ports(where, given.data_parallel_ranks, numbers)


def check_rank_ports(where: str, ranks: int, ports: Mapping[str, int]) -> None:
    """Rank r uses each port + r: none may be beyond 65535, nor another setting's. Raises ConfigError."""
    if ranks == 1:
        return
    for key, port in ports.items():
        if port + ranks - 1 > 65_535:
            raise ConfigError(
                f"{where}: {key} {port} given with dataParallelRanks {ranks}, whose last rank would use "
                f"{port + ranks - 1}; set it to {65_536 - ranks} or less"
            )
    if len(ports) == 2:
        (first, low), (second, high) = sorted(ports.items(), key=lambda item: item[1])
        if high - low < ranks:
            raise ConfigError(
                f"{where}: {second} {high} is within the {ranks} ports of {first} from {low} on, one for each of "
                f"dataParallelRanks; set it to {low + ranks} or more"
            )
