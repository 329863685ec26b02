"""Settings of limits that all replicas of the gateway count together, in Redis or Valkey."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta

from spillway_gateway.errors import ConfigError
from spillway_settings.typed import CamelSection, Count, Positive, Text
from spillway_settings.values.gateway import SharedLimits

_CHART = SharedLimits()

_FORMS = (
    "redis://HOST:PORT/DB, rediss://HOST:PORT/DB (TLS), unix:///PATH?db=DB, redis-cluster://HOST:PORT or "
    "rediss-cluster://HOST:PORT"
)
KeyPrefix = Annotated[str, Meta(pattern=r"^[^{]{0,128}\Z", description="up to 128 printable characters without {")]
SCHEMES = ("redis", "rediss", "unix", "redis-cluster", "rediss-cluster")


class SharedLimitsConfig(CamelSection, frozen=True):
    """Redis 7 or Valkey 7 and newer. Names and passwords come from the environment, never from the file."""

    url: Text
    username_env: Text | None = None  # the variable that holds the user's name
    password_env: Text | None = None
    tls_ca_file: Text | None = None  # None: the system's authorities
    key_prefix: KeyPrefix = _CHART.key_prefix
    connections: Count = _CHART.connections
    # of one question; what takes longer is decided by this replica alone
    timeout_seconds: Positive = _CHART.timeout_seconds
    failures: Count = _CHART.failures  # in a row, before Redis is left alone and only a background task asks for it
    retry_seconds_max: Positive = _CHART.retry_seconds_max  # longest pause of that task
    report_seconds: Positive = _CHART.report_seconds  # for which ends of requests are collected into one report
    lease_seconds: Positive = _CHART.lease_seconds  # until what a replica that died had running is no longer counted


@dataclass(frozen=True, slots=True)
class Login:
    username: str | None
    password: str | None = field(default=None, repr=False)


def check_shared_limits(where: str, given: SharedLimitsConfig) -> None:
    """Raises ConfigError naming the setting, what was given and what is needed."""
    if "@" in given.url:  # before anything repeats it: messages end up in logs
        raise ConfigError(
            f"{where}.url: must not carry a user or password; name variables in usernameEnv and passwordEnv"
        )
    try:
        parts = urlsplit(given.url)
        usable = parts.scheme in SCHEMES and bool(parts.path if parts.scheme == "unix" else parts.hostname)
        usable = usable and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"{where}.url: {given.url!r} is not understood; use {_FORMS}")
    if not given.key_prefix.isprintable():
        raise ConfigError(f"{where}.keyPrefix: {given.key_prefix!r} given, printable characters needed")
    if given.lease_seconds < 10 * given.report_seconds:
        raise ConfigError(f"{where}.leaseSeconds: {given.lease_seconds} given, at least ten times reportSeconds needed")


def login(config: SharedLimitsConfig, environment: Mapping[str, str] = os.environ) -> Login:
    """Raises ConfigError if a named variable is not set."""
    values: list[str | None] = []
    for key, name in (("usernameEnv", config.username_env), ("passwordEnv", config.password_env)):
        if name is not None and not environment.get(name):
            raise ConfigError(f"auth.sharedLimits.{key}: the variable {name!r} is not set; set it, or remove {key}")
        values.append(environment[name] if name is not None else None)
    return Login(*values)
