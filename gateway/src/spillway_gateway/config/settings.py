"""Configuration of the gateway: YAML parsed once into frozen dataclasses.

Keys are camelCase in the file and snake_case in code; every default is written once, here. Unknown keys are refused
by name, because a misspelt timeout that is silently ignored is found only in an incident.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from spillway_gateway.config import unique_yaml
from spillway_gateway.config.connections import ConnectionsConfig
from spillway_gateway.config.discovery import DiscoveryConfig, check_discovery
from spillway_gateway.config.shared_limits import SharedLimitsConfig, check_shared_limits
from spillway_gateway.config.tracing import TracingConfig, check_tracing
from spillway_gateway.errors import ConfigError

LONG_BODY_SHARE = 0.75  # of limits.bodiesBytesMax for bodies above 1 MiB; the rest stays free for short ones


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """Certificate of the main listener; read again when a file changes."""

    cert_file: str  # PEM, the server's own certificate first and then its chain
    key_file: str
    reload_seconds: float = 5.0  # between two looks at the files


@dataclass(frozen=True, slots=True)
class ListenConfig:
    host: str = "127.0.0.1"
    port: int = 8000
    ops_port: int | None = (
        None  # a listener of its own for /metrics and /spillway/config, which then leave the main one
    )
    ops_host: str | None = None  # host without it
    tls: TlsConfig | None = None


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine process. The name is unique in the gateway and is what headers and metrics show."""

    name: str
    url: str
    kv_events: str | None = None  # ZMQ PUB address of the engine
    kv_replay: str | None = None  # ZMQ ROUTER address of the engine


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """engines or discovery: one of them is set."""

    name: str
    engines: tuple[EngineConfig, ...] = ()
    discovery: DiscoveryConfig | None = None  # where engines are found that come and go; see discovery/
    aliases: tuple[str, ...] = ()
    tokenizer: str | None = None  # folder with tokenizer.json; without it prompts are matched by text blocks


@dataclass(frozen=True, slots=True)
class TimeoutsConfig:
    connect_seconds: float = 2.0
    first_byte_seconds: float = 300.0  # streams: request sent -> first body byte; covers queueing and prefill
    idle_seconds: float = 120.0  # streams: between two chunks
    plain_seconds: float = 900.0  # plain replies: request sent -> whole reply
    body_read_seconds: float = 60.0  # the client's own upload; longer where it keeps connections.bodyBytesPerSecondMin


@dataclass(frozen=True, slots=True)
class HealthConfig:
    period_seconds: float = 1.0
    timeout_seconds: float = 2.0
    metrics_period_seconds: float = 1.0  # between two readings of an engine's /metrics, in the rounds of the polls
    timeouts_before_down: int = 3  # a refused connection counts at once; a slow answer may only mean a busy machine
    ending_seconds: float = 60.0  # what requests get on an engine that drains or terminates; less than it gives them


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    body_bytes_max: int = 64 * 1024 * 1024
    bodies_bytes_max: int = 256 * 1024 * 1024  # of all requests together; see body_room.py
    plain_reply_buffer_bytes: int = 4 * 1024 * 1024  # a larger plain reply is streamed, and so can no longer be retried
    attempts_max: int = 3  # engines that may get one request, the first included
    retry_ratio: float = 0.2  # retries per request, over time, where the engine that failed is still there
    retry_burst: int = 64  # such retries at once
    upstream_connections_max: int = 4096  # per gateway process
    text_chars_max: int = 262_144  # text hashed per request where no tokenizer is used


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """Prices used until an engine's own are measured; see routing/load.py for the sum."""

    prefill_tokens_per_second: float = 5000.0
    cpu_load_tokens_per_second: float = 100_000.0
    shared_load_tokens_per_second: float = 40_000.0
    shared_store_tokens_per_second: float | None = None  # what the shared tier can give all engines together, if known
    running_request_ms: float = 10.0  # what each request already on an engine adds for the next one
    bounded_load_factor: float = 1.25  # an engine never takes more than this multiple of the mean by hash alone
    slow_start_seconds: float = 10.0  # after an engine has become ready again, until it counts at its full rate
    default_block_tokens: int = 128  # until the first event names the engine's own
    speculative_seconds: float = 60.0  # engines with events: how long a routed prefix counts as held before one comes
    approximate_seconds: float = 900.0  # engines without events: how long a routed prefix counts as held


@dataclass(frozen=True, slots=True)
class BreakerConfig:
    """When an engine that answers polls and fails requests is left alone; see fleet/breaker.py."""

    failures: int = 5  # failed requests in a row
    window_requests: int = 20  # or this share of the last so many
    failure_share: float = 0.3
    open_seconds: float = 5.0  # doubled with each failed probe
    open_seconds_max: float = 60.0


@dataclass(frozen=True, slots=True)
class AuthConfig:
    """API keys and tenants; see access/keys.py. Without a keys file anybody may ask, and salts are the clients' own."""

    keys_file: str | None = None
    salt_secret_file: str | None = None  # needed with keysFile: at least 32 random bytes, equal on every replica
    engine_key_file: str | None = None  # the engines' own API key; a client's key never goes to an engine
    reload_seconds: float = 2.0  # between two looks at the keys file
    shared_limits: SharedLimitsConfig | None = None  # None: tenants' limits hold per gateway process
    unsalted_routes: str = "refuse"  # refuse | allow: routes on which the engine takes no salt, so tenants share blocks


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """What happens when every engine of a model is full; see access/admission.py."""

    requests_per_engine_max: int = 1024
    waiting_requests_max: int = 1024  # per model; further ones are refused at once
    high_wait_seconds: float = 60.0
    normal_wait_seconds: float = 30.0
    low_wait_seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class IndexConfig:
    bytes_max: int = 256 * 1024 * 1024
    orphans_max: int = 4096  # stored-events kept per engine while their parent is unknown


@dataclass(frozen=True, slots=True)
class ShutdownConfig:
    drain_delay_seconds: float = 0.0  # between /ready turning 503 and the listening socket closing
    drain_timeout_seconds: float = 30.0  # what running streams get before they are ended


@dataclass(frozen=True, slots=True)
class LogConfig:
    level: str = "info"
    requests: bool = False  # one line per request; never any prompt text


@dataclass(frozen=True, slots=True)
class AuditConfig:
    """One JSON line per request, without any text of prompts or replies; see access/audit.py."""

    enabled: bool = False
    file: str | None = None  # opened for appending, and anew after it was moved away; without it, standard output
    waiting_lines_max: int = 10_000  # while the disk or pipe is slow; what comes on top is dropped and counted


@dataclass(frozen=True, slots=True)
class ReloadConfig:
    period_seconds: float = 2.0  # between two looks at the configuration file; 0: only SIGHUP reads it again


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    models: tuple[ModelConfig, ...]
    listen: ListenConfig = field(default_factory=ListenConfig)
    connections: ConnectionsConfig = field(default_factory=ConnectionsConfig)
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    breaker: BreakerConfig = field(default_factory=BreakerConfig)
    auth: AuthConfig = field(default_factory=AuthConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    index: IndexConfig = field(default_factory=IndexConfig)
    shutdown: ShutdownConfig = field(default_factory=ShutdownConfig)
    log: LogConfig = field(default_factory=LogConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)
    reload: ReloadConfig = field(default_factory=ReloadConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)


def load_config(path: Path) -> GatewayConfig:
    """Read and check a configuration file.

    Raises ConfigError naming the setting, what was given, what is needed and what to change.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read ({error.strerror}); give a YAML file's path") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path}: is not UTF-8 text; save it as UTF-8") from error
    try:
        document = unique_yaml.load(text)
    except yaml.YAMLError as error:
        detail = " ".join(str(error).split())
        raise ConfigError(f"--config {path}: is not valid YAML: {detail}") from error
    return parse_config(document)


def parse_config(document: object) -> GatewayConfig:
    """Turn the parsed YAML document into a GatewayConfig. Pure; raises ConfigError."""
    config = _build(GatewayConfig, document, "")
    assert isinstance(config, GatewayConfig)
    _check(config)
    return config


def shown_config(config: GatewayConfig) -> dict[str, Any]:
    """The resolved configuration with the file's own keys, as /spillway/config shows it. Secrets stand in files, of
    which it names the paths alone; a user and password in an engine's URL are left out."""
    document: dict[str, Any] = _shown(config)
    return document


def _shown(value: object) -> Any:
    if isinstance(value, EngineConfig):
        parts = urlsplit(value.url)
        value = dataclasses.replace(value, url=parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {_camel(item.name): _shown(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [_shown(entry) for entry in value]
    return value


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(word.capitalize() for word in rest)


def _build(cls: type[Any], value: object, where: str) -> Any:
    label = where or "the configuration"
    if not isinstance(value, dict):
        raise ConfigError(f"{label}: {_given(value)} given, a mapping of settings needed")
    hints = typing.get_type_hints(cls)
    fields = {_camel(item.name): item for item in dataclasses.fields(cls)}
    arguments: dict[str, Any] = {}
    for key, given in value.items():
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1, cutoff=0.0)
            known = ", ".join(sorted(fields))
            raise ConfigError(f"{_join(where, key)}: unknown setting; did you mean {near[0]!r}? Known here: {known}")
        item = fields[key]
        arguments[item.name] = _convert(hints[item.name], given, _join(where, key))
    for key, item in fields.items():
        required = item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        if required and item.name not in arguments:
            raise ConfigError(f"{_join(where, key)}: missing; add it to {label}")
    return cls(**arguments)


def _convert(hint: Any, value: object, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return _build(hint, value, where)
    origin = typing.get_origin(hint)
    if origin is tuple:
        element = typing.get_args(hint)[0]
        if not isinstance(value, list):
            raise ConfigError(f"{where}: {_given(value)} given, a list needed")
        return tuple(_convert(element, entry, f"{where}[{index}]") for index, entry in enumerate(value))
    if origin is types.UnionType:
        kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
        if value is None and len(kinds) < len(typing.get_args(hint)):
            return None
        if kinds == [int, str]:
            return _convert_scalar(str if isinstance(value, str) else int, value, where)
        return _convert(kinds[0], value, where)
    return _convert_scalar(hint, value, where)


def _convert_scalar(hint: type, value: object, where: str) -> Any:
    if hint is bool and isinstance(value, bool):
        return value
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if hint is str and isinstance(value, str) and value:
        return value
    wanted = {bool: "true or false", float: "a number", int: "a whole number", str: "a non-empty string"}[hint]
    raise ConfigError(f"{where}: {_given(value)} given, {wanted} needed")


def _given(value: object) -> str:
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"


def _join(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)


def _check(config: GatewayConfig) -> None:
    if not config.models:
        raise ConfigError("models: empty; list at least one model with one engine")
    _check_names(config)
    for model in config.models:
        for engine in model.engines:
            _check_engine(model.name, engine)
        if model.discovery is not None:
            check_discovery(model.name, model.discovery)
    if not 0 <= config.listen.port <= 65535:
        raise ConfigError(f"listen.port: {config.listen.port} given, 0 to 65535 needed (0 lets the system choose)")
    _check_listeners(config.listen)
    check_tracing(config.tracing)
    if not 0 <= config.reload.period_seconds < float("inf"):
        raise ConfigError(f"reload.periodSeconds: {config.reload.period_seconds} given, a finite number from 0 needed")
    if config.audit.waiting_lines_max < 1:
        raise ConfigError(f"audit.waitingLinesMax: {config.audit.waiting_lines_max} given, at least 1 needed")
    positive: dict[str, Any] = {
        "connections": config.connections,
        "timeouts": config.timeouts,
        "health": config.health,
        "limits": config.limits,
        "routing": config.routing,
        "breaker": config.breaker,
        "admission": config.admission,
        "index": config.index,
    }
    for section, values in positive.items():
        for item in dataclasses.fields(values):
            number = getattr(values, item.name)
            if number is None:
                continue
            zero_allowed = item.name in ("retry_ratio", "retry_burst", "running_request_ms", "slow_start_seconds")
            if not (number > 0 or (zero_allowed and number == 0)) or number == float("inf"):
                raise ConfigError(f"{section}.{_camel(item.name)}: {number} given, a finite number above 0 needed")
    if config.breaker.failure_share > 1:
        raise ConfigError(f"breaker.failureShare: {config.breaker.failure_share} given, at most 1 needed")
    limits = config.limits
    if limits.body_bytes_max > LONG_BODY_SHARE * limits.bodies_bytes_max:
        raise ConfigError(
            f"limits.bodiesBytesMax: {limits.bodies_bytes_max} given with bodyBytesMax {limits.body_bytes_max}; at "
            f"least {math.ceil(limits.body_bytes_max / LONG_BODY_SHARE)} needed, as long bodies get "
            f"{LONG_BODY_SHARE:.0%} of it"
        )
    if not config.routing.bounded_load_factor >= 1:
        raise ConfigError(f"routing.boundedLoadFactor: {config.routing.bounded_load_factor} given, at least 1 needed")
    for item in dataclasses.fields(config.shutdown):
        seconds = getattr(config.shutdown, item.name)
        if not 0 <= seconds < float("inf"):
            raise ConfigError(f"shutdown.{_camel(item.name)}: {seconds} given, a finite number from 0 needed")
    auth = config.auth
    if (auth.keys_file is None) != (auth.salt_secret_file is None):
        raise ConfigError("auth: one of keysFile and saltSecretFile given; set both, or neither")
    if not 0 < auth.reload_seconds < float("inf"):
        raise ConfigError(f"auth.reloadSeconds: {auth.reload_seconds} given, a finite number above 0 needed")
    if auth.shared_limits is not None:
        if auth.keys_file is None:
            raise ConfigError("auth.sharedLimits: set without auth.keysFile; set both, or neither")
        check_shared_limits("auth.sharedLimits", auth.shared_limits)
    if auth.unsalted_routes not in ("refuse", "allow"):
        raise ConfigError(f"auth.unsaltedRoutes: {auth.unsalted_routes!r} given, refuse or allow needed")
    levels = ("debug", "info", "warning", "error")
    if config.log.level not in levels:
        raise ConfigError(f"log.level: {config.log.level!r} given, one of {', '.join(levels)} needed")


def _check_listeners(listen: ListenConfig) -> None:
    if listen.ops_port is not None:
        if not 0 <= listen.ops_port <= 65535:
            raise ConfigError(f"listen.opsPort: {listen.ops_port} given, 0 to 65535 needed (0 lets the system choose)")
        same_host = listen.ops_host in (None, listen.host)
        if listen.ops_port == listen.port != 0 and same_host:
            raise ConfigError(f"listen.opsPort: {listen.ops_port} is listen.port too; give it another port")
    elif listen.ops_host is not None:
        raise ConfigError("listen.opsHost: set without listen.opsPort; set both, or neither")
    if listen.tls is not None and not 0 < listen.tls.reload_seconds < float("inf"):
        raise ConfigError(
            f"listen.tls.reloadSeconds: {listen.tls.reload_seconds} given, a finite number above 0 needed"
        )


def _check_names(config: GatewayConfig) -> None:
    served: dict[str, str] = {}
    engines: dict[str, str] = {}
    for model in config.models:
        if not model.engines and model.discovery is None:
            raise ConfigError(f"models: {model.name!r} has no engine; add one under its 'engines', or set 'discovery'")
        if model.engines and model.discovery is not None:
            raise ConfigError(f"models: {model.name!r} has both engines and discovery; remove one of them")
        for name in (model.name, *model.aliases):
            if name in served:
                raise ConfigError(f"models: the name {name!r} is used twice; names and aliases must be unique")
            served[name] = model.name
        for engine in model.engines:
            if engine.name in engines:
                raise ConfigError(f"models: two engines are named {engine.name!r}; give each a name of its own")
            engines[engine.name] = model.name


def _check_engine(model: str, engine: EngineConfig) -> None:
    where = f"models: engine {engine.name!r} of {model!r}"
    try:
        parts = urlsplit(engine.url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or any(not 0x21 <= ord(letter) <= 0x7E for letter in engine.url):
        raise ConfigError(f"{where}: url {engine.url!r} given, http://HOST:PORT needed")
    for key, address in (("kvEvents", engine.kv_events), ("kvReplay", engine.kv_replay)):
        if address is not None and not _is_zmq_address(address):
            raise ConfigError(f"{where}: {key} {address!r} given, tcp://HOST:PORT or ipc://PATH needed")
    if engine.kv_replay is not None and engine.kv_events is None:
        raise ConfigError(f"{where}: kvReplay is set without kvEvents; set both, or neither")
    if any(ord(letter) < 0x21 or ord(letter) > 0x7E for letter in engine.name):
        raise ConfigError(f"{where}: the name goes into a header; use visible ASCII letters without blanks")


def _is_zmq_address(address: str) -> bool:
    if address.startswith("ipc://"):
        return len(address) > len("ipc://")
    try:
        parts = urlsplit(address)
        return parts.scheme == "tcp" and bool(parts.hostname) and bool(parts.port) and not parts.path
    except ValueError:
        return False
