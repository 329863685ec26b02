"""Addresses of and login to Redis or Valkey servers: one value, parsed once."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from spillway_connector.errors import ConfigError, RefusedReason, TierRefused

_LOOPBACK = ("localhost", "::1")
_FORMS = (
    "redis://HOST:PORT/DB, redis-sentinel://HOST:PORT,HOST:PORT/SERVICE?db=DB, redis-cluster://HOST:PORT,HOST:PORT "
    "(each with rediss in place of redis for TLS) or unix:///PATH?db=DB"
)
_SENTINEL_PORT = 26379
_SERVER_PORT = 6379
SECRET_FILE_BYTES_MAX = 64 * 1024


class Topology(StrEnum):
    """Ways in which the server of a key is found."""

    SERVER = "server"  # there is one
    SENTINEL = "sentinel"  # it is the primary, which the sentinels name
    CLUSTER = "cluster"  # it is the owner of the key's slot


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class RedisEndpoint:
    """``unix_path`` is set for a local socket, ``host`` and ``port`` otherwise. ``password`` never shows in a repr.

    seeds: for Sentinel the sentinels, for Cluster some of its nodes; ``host`` and ``port`` are the first of them.
    password_file: read for every connection, so that a rotated password needs no restart; overrides ``password``.
    tls_certificate_file, tls_key_file: the client's, if the server requests a certificate.
    """

    host: str = "127.0.0.1"
    port: int = _SERVER_PORT
    unix_path: str | None = None
    database: int = 0
    tls: bool = False
    tls_ca_file: str | None = None  # None: the system's authorities
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    password_file: str | None = None
    tls_certificate_file: str | None = None
    tls_key_file: str | None = None
    topology: Topology = Topology.SERVER
    seeds: tuple[Address, ...] = ()
    service: str | None = None  # the primary's name at the sentinels

    @classmethod
    def from_url(
        cls,
        url: str,
        *,
        username: str | None = None,
        password: str | None = None,
        password_file: str | None = None,
        tls_ca_file: str | None = None,
        tls_certificate_file: str | None = None,
        tls_key_file: str | None = None,
    ) -> RedisEndpoint:
        """Parse ``url``. Raises ConfigError; a password inside the URL is refused because URLs end up in logs."""
        if "@" in url:
            raise ConfigError(
                "redis.url: must not carry a user or password; name variables in usernameEnv, passwordEnv "
                "or a file in passwordFile"
            )
        parts = urlsplit(url)
        if parts.scheme == "unix":
            if not parts.path or parts.netloc:
                raise ConfigError(f"redis.url: {url!r} names no socket; use {_FORMS}")
            return cls(
                unix_path=unquote(parts.path),
                database=_database(url, parse_qs(parts.query).get("db", ["0"])[-1]),
                username=username,
                password=password,
                password_file=password_file,
            )
        secure, _, kind = parts.scheme.partition("-")
        if secure not in ("redis", "rediss") or kind not in ("", "sentinel", "cluster") or parts.fragment:
            raise ConfigError(f"redis.url: {url!r} is not understood; use {_FORMS}")
        topology = Topology(kind or "server")
        seeds = _addresses(url, parts, _SENTINEL_PORT if topology is Topology.SENTINEL else _SERVER_PORT)
        service, database = _path(url, parts, topology)
        if topology is Topology.SERVER and len(seeds) != 1:
            raise ConfigError(f"redis.url: {url!r} names {len(seeds)} servers; use {_FORMS}")
        return cls(
            host=seeds[0].host,
            port=seeds[0].port,
            database=database,
            tls=secure == "rediss",
            tls_ca_file=tls_ca_file,
            username=username,
            password=password,
            password_file=password_file,
            tls_certificate_file=tls_certificate_file,
            tls_key_file=tls_key_file,
            topology=topology,
            seeds=() if topology is Topology.SERVER else seeds,
            service=service,
        )

    def at(self, address: Address) -> RedisEndpoint:
        """The one server at ``address``, with the same login and encryption."""
        return replace(self, host=address.host, port=address.port, topology=Topology.SERVER, seeds=(), service=None)

    def without_login(self) -> RedisEndpoint:
        """The same without a login, in database 0: how a sentinel is asked first."""
        return replace(self, username=None, password=None, password_file=None, database=0)

    @property
    def place(self) -> bytes:
        """Name of these servers: the same for every login, with TLS or without, and in any order of the seeds. An
        address that means this machine or pod alone is joined by its host name."""
        if self.unix_path is not None:
            return b"\0".join([b"unix", socket.gethostname().encode(), self.unix_path.encode(), b"%d" % self.database])
        seeds = self.seeds or (Address(self.host, self.port),)
        where = [self.topology.value, self.service or "", str(self.database), *sorted(map(str, seeds))]
        if any(seed.host in _LOOPBACK or seed.host.startswith("127.") for seed in seeds):
            where.append(socket.gethostname())
        return "\0".join(where).encode()

    def current_password(self) -> str | None:
        """The current password. Raises TierRefused(AUTHENTICATION) when its file cannot be read."""
        if self.password_file is None:
            return self.password
        try:
            with Path(self.password_file).open("rb") as file:
                secret = file.read(SECRET_FILE_BYTES_MAX).decode("utf-8").rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise TierRefused(
                RefusedReason.AUTHENTICATION,
                f"{self}: passwordFile {self.password_file} cannot be read; make it readable as UTF-8: {error}",
            ) from error
        if not secret:
            raise TierRefused(
                RefusedReason.AUTHENTICATION,
                f"{self}: passwordFile {self.password_file} is empty; write the password to it",
            )
        return secret

    def __str__(self) -> str:
        if self.unix_path is not None:
            return f"unix://{self.unix_path}?db={self.database}"
        scheme = "rediss" if self.tls else "redis"
        everyone = ",".join(map(str, self.seeds))
        if self.topology is Topology.SENTINEL:
            return f"{scheme}-sentinel://{everyone}/{self.service}?db={self.database}"
        if self.topology is Topology.CLUSTER:
            return f"{scheme}-cluster://{everyone}"
        return f"{scheme}://{Address(self.host, self.port)}/{self.database}"


def _addresses(url: str, parts: SplitResult, default_port: int) -> tuple[Address, ...]:
    found = []
    for text in parts.netloc.split(","):
        try:
            one = urlsplit(f"//{text}")
            host, port = one.hostname, one.port
        except ValueError as error:
            raise ConfigError(f"redis.url: {url!r}: {error}; use {_FORMS}") from error
        if not host:
            raise ConfigError(f"redis.url: {url!r} names no host; use {_FORMS}")
        found.append(Address(host, default_port if port is None else port))
    return tuple(found)


def _path(url: str, parts: SplitResult, topology: Topology) -> tuple[str | None, int]:
    """The service and the database that path and query name."""
    path = unquote(parts.path.strip("/"))
    query = parse_qs(parts.query, keep_blank_values=True)
    if topology is Topology.SERVER and not query:
        return None, _database(url, path or "0")
    if topology is Topology.SENTINEL and path and set(query) <= {"db"}:
        return path, _database(url, query.get("db", ["0"])[-1])
    if topology is Topology.CLUSTER and path in ("", "0") and not query:
        return None, 0  # a cluster has one database
    raise ConfigError(f"redis.url: {url!r} is not understood; use {_FORMS}")


def _database(url: str, text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ConfigError(f"redis.url: {url!r}: the database {text!r} is not a number; use {_FORMS}")
    return int(text)
