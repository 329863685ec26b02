"""Settings of engine discovery: where a model's engines are found when they are not listed one by one."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from spillway_gateway.errors import ConfigError

_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount/"
_PORT_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_OBJECT_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class KubernetesDiscovery:
    """The EndpointSlices of one Service, followed by a watch. Ports by their name in the Service, or by number.

    What the gateway needs to be allowed: get, list and watch of endpointslices (discovery.k8s.io) in the namespace.
    """

    service: str
    namespace: str | None = None  # None: the gateway's own, from namespace_file
    port: int | str = "http"
    kv_events_port: int | str | None = None
    kv_replay_port: int | str | None = None
    scheme: str = "http"  # http | https
    resync_seconds: float = 300.0  # between two full lists, however quiet the watch is
    timeout_seconds: float = 10.0  # of a list, and until a watch begins
    # Longest pause between two tries while the API server is away: changes meanwhile are followed within two seconds.
    retry_seconds_max: float = 1.0
    api_server: str | None = None  # https://HOST:PORT; None: of the cluster that the gateway runs in
    token_file: str = _ACCOUNT + "token"  # read anew for every call: the kubelet renews it
    ca_file: str = _ACCOUNT + "ca.crt"
    namespace_file: str = _ACCOUNT + "namespace"


@dataclass(frozen=True, slots=True)
class DnsDiscovery:
    """All addresses of one name, asked for again and again. With port: A records, AAAA where there are none. Without:
    SRV records, which bring the port."""

    name: str
    port: int | None = None
    kv_events_port: int | None = None
    kv_replay_port: int | None = None
    scheme: str = "http"  # http | https
    period_seconds: float = 2.0
    timeout_seconds: float = 2.0  # of one resolution, all its tries together
    empty_answers_before_removal: int = 3  # in a row: a name server that starts may not know the name for a moment
    nameservers: tuple[str, ...] = ()  # IP or IP:PORT; empty: those of /etc/resolv.conf


@dataclass(frozen=True, slots=True)
class DiscoveryConfig:
    """Exactly one of the two."""

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
    for key, name in (("service", given.service), ("namespace", given.namespace)):
        if name is not None and not _OBJECT_NAME.fullmatch(name):
            raise ConfigError(
                f"{where}.{key}: {name!r} given, the plain name of a Kubernetes object needed (a-z, 0-9 and -)"
            )
    ports = {"port": given.port, "kvEventsPort": given.kv_events_port, "kvReplayPort": given.kv_replay_port}
    for key, port in ports.items():
        if isinstance(port, str) and not _PORT_NAME.fullmatch(port):
            raise ConfigError(f"{where}.{key}: {port!r} given, a port's name in the Service or its number needed")
    _check_ports(where, ports)
    _check_scheme(where, given.scheme)
    _check_positive(
        where,
        resyncSeconds=given.resync_seconds,
        timeoutSeconds=given.timeout_seconds,
        retrySecondsMax=given.retry_seconds_max,
    )
    if given.api_server is not None:
        parts = urlsplit(given.api_server)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise ConfigError(f"{where}.apiServer: {given.api_server!r} given, https://HOST:PORT needed")


def _check_dns(where: str, given: DnsDiscovery) -> None:
    ports = {"port": given.port, "kvEventsPort": given.kv_events_port, "kvReplayPort": given.kv_replay_port}
    _check_ports(where, ports)
    _check_scheme(where, given.scheme)
    _check_positive(where, periodSeconds=given.period_seconds, timeoutSeconds=given.timeout_seconds)
    if given.empty_answers_before_removal < 1:
        raise ConfigError(
            f"{where}.emptyAnswersBeforeRemoval: {given.empty_answers_before_removal} given, at least 1 needed"
        )
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


def _check_ports(where: str, ports: dict[str, int | str | None] | dict[str, int | None]) -> None:
    for key, port in ports.items():
        if isinstance(port, int) and not 0 < port <= 65535:
            raise ConfigError(f"{where}.{key}: {port} given, 1 to 65535 needed")
    if ports["kvReplayPort"] is not None and ports["kvEventsPort"] is None:
        raise ConfigError(f"{where}: kvReplayPort is set without kvEventsPort; set both, or neither")


def _check_scheme(where: str, scheme: str) -> None:
    if scheme not in ("http", "https"):
        raise ConfigError(f"{where}.scheme: {scheme!r} given, http or https needed")


def _check_positive(where: str, **numbers: float) -> None:
    for key, number in numbers.items():
        if not 0 < number < float("inf"):
            raise ConfigError(f"{where}.{key}: {number} given, a finite number above 0 needed")
