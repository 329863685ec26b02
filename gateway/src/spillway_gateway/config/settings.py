"""Configuration of the gateway: YAML parsed once into frozen structs.

Keys are camelCase in the file and snake_case in code. Sections that the chart has too are its own (settings/values/),
with sizes as bytes; the other defaults are written here. Unknown keys are refused
by name, because a misspelt timeout that is silently ignored is found only in an incident.
"""

from __future__ import annotations

import ipaddress
import math
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
import yaml
from msgspec import Meta

from spillway_gateway.config import unique_yaml
from spillway_gateway.config.cors import CorsConfig, check_cors
from spillway_gateway.config.disaggregation import DisaggregationConfig, check_disaggregation, check_roles
from spillway_gateway.config.discovery import DiscoveryConfig, Ranks, check_discovery, check_rank_ports
from spillway_gateway.config.shared_limits import SharedLimitsConfig, check_shared_limits
from spillway_gateway.config.tracing import TracingConfig, check_tracing
from spillway_gateway.errors import ConfigError
from spillway_settings.byte_sizes import ByteCount
from spillway_settings.roles import EngineRole
from spillway_settings.typed import (
    LARGEST,
    CamelSection,
    NotNegative,
    Positive,
    Text,
    WrongSetting,
    read_settings,
    settings_json,
)
from spillway_settings.values import gateway as values
from spillway_settings.values.gateway import PROCESSES_MAX

_CHART = values.Gateway()
Processes = Annotated[int, Meta(ge=1, le=PROCESSES_MAX, description=f"1 to {PROCESSES_MAX} processes")]
ListenPort = Annotated[int, Meta(ge=0, le=65_535, description="0 to 65535 (0 lets the system choose)")]
LoadFactor = Annotated[float, Meta(ge=1, le=LARGEST)]
_ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
LONG_BODY_SHARE = 0.75  # of limits.bodiesBytesMax for bodies above 1 MiB; the rest stays free for short ones


FILE_BYTES_MAX = 1024 * 1024  # reading takes seconds for each MiB, in which no other reload begins


class TlsConfig(CamelSection, frozen=True):
    """Certificate of the main listener; read again when a file changes."""

    cert_file: Text  # PEM, the server's own certificate first and then its chain
    key_file: Text
    reload_seconds: Positive = _CHART.tls.reload_seconds  # between two looks at the files


class ListenConfig(CamelSection, frozen=True):
    host: Text = "127.0.0.1"
    port: ListenPort = _CHART.port
    # A listener of its own for /metrics and /spillway/config, which the main one then does not serve.
    ops_port: ListenPort | None = None
    ops_host: Text | None = None  # host without it
    # A gRPC listener for proxies that ask which engine gets a request, on `host` and with `tls`; see picker/.
    picker_port: ListenPort | None = None
    tls: TlsConfig | None = None


class ContinuationConfig(values.Continuation, frozen=True):
    """Streamed answers that go on from another engine when theirs fails; see upstream/continuation/."""

    bytes_max: ByteCount = ByteCount.read(_CHART.continuation.bytes_max)  # of token ids kept for all streams


class ConnectionsConfig(values.Connections, frozen=True):
    """Bounds of clients' connections and of what they send before their key is checked, per gateway process.

    See client/bounded_connection.py.
    """

    head_bytes_max: ByteCount = ByteCount.read(_CHART.connections.head_bytes_max)  # request line and headers
    target_bytes_max: ByteCount = ByteCount.read(_CHART.connections.target_bytes_max)  # path and query
    body_bytes_per_second_min: ByteCount = ByteCount.read(_CHART.connections.body_bytes_per_second_min)


class EngineConfig(CamelSection, frozen=True):
    """One engine process. The name is unique in the gateway and is what headers and metrics show."""

    name: Text
    url: Text
    kv_events: Text | None = None  # ZMQ PUB address of the engine
    kv_replay: Text | None = None  # ZMQ ROUTER address of the engine
    data_parallel_ranks: Ranks = 1  # vLLM's --data-parallel-size; the addresses above are those of rank 0
    role: EngineRole = EngineRole.BOTH
    # Hosts of the further pods of a replica over several, which have the ranks in equal parts.
    workers: tuple[Text, ...] = ()


def rank_name(engine: str, rank: int) -> str:
    """The name of a data parallel rank. No pod has a slash in its name."""
    return f"{engine}/dp{rank}"


class ModelConfig(CamelSection, frozen=True):
    """engines or discovery: one of them is set."""

    name: Text
    engines: tuple[EngineConfig, ...] = ()
    discovery: DiscoveryConfig | None = None  # where engines are found that come and go; see discovery/
    aliases: tuple[Text, ...] = ()
    adapters: tuple[Text, ...] = ()  # LoRA adapters that the engines load at their start
    # Names (shell patterns) of adapters that engines load when a request names them: vLLM's LoRA resolvers.
    loadable_adapters: tuple[Text, ...] = ()
    adapter_aliases: dict[Text, Text] = msgspec.field(default_factory=dict)  # alias -> adapter
    tokenizer: Text | None = None  # folder with tokenizer.json; without it prompts are matched by text blocks
    # While no engine is ready, requests wait so long for one, and are counted: for a model that is scaled to zero.
    # None: they are refused at once.
    wake_seconds: Positive | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Everything that a request may name, besides adapters that engines load and unload while they run."""
        return (self.name, *self.aliases, *self.adapters, *self.adapter_aliases)

    def adapter_named(self, name: str) -> str | None:
        """The adapter of this configured name, as engines know it; None: the name is the model's own or an alias."""
        return self.adapter_aliases.get(name) or (name if name in self.adapters else None)

    def loads(self, adapter: str) -> bool:
        """Whether an engine loads this adapter when a request names it. vLLM's resolvers join a name to a folder's
        path, so a name with a slash would let a client choose any folder of the engine's machine."""
        patterns = self.loadable_adapters
        return (
            bool(patterns)
            and _ADAPTER_NAME.fullmatch(adapter) is not None
            and (any(fnmatchcase(adapter, pattern) for pattern in patterns))
        )


class TimeoutsConfig(values.Timeouts, frozen=True):
    """Times that the gateway waits; docs/gateway.md says what each bounds."""


class HealthConfig(values.Health, frozen=True):
    ending_seconds: Positive = 60.0  # what requests get on an engine that drains or terminates; less than it gives them


class LimitsConfig(values.Limits, frozen=True):
    body_bytes_max: ByteCount = ByteCount.read(_CHART.limits.body_bytes_max)
    # Bounds over all requests: bodies are counted by client/body_budget.py, unread replies by client/reply_budget.py.
    bodies_bytes_max: ByteCount = ByteCount.read(_CHART.limits.bodies_bytes_max)
    plain_reply_buffer_bytes: ByteCount = ByteCount.read(_CHART.limits.plain_reply_buffer_bytes)
    replies_bytes_max: ByteCount = ByteCount.read(_CHART.limits.replies_bytes_max)


class RoutingConfig(values.Routing, frozen=True):
    """Prices used until an engine's own are measured; see routing/load.py for the sum."""


class RetentionConfig(values.Retention, frozen=True):
    """The retention that clients may ask for; see api/retention.py. A tenant's keys entry may say otherwise."""


class BreakerConfig(values.Breaker, frozen=True):
    """Bounds beyond which an engine is left alone that answers polls and fails requests; see fleet/breaker.py."""


class AuthConfig(CamelSection, frozen=True):
    """API keys and tenants; see access/keys.py. Without a keys file no key is required, and clients set their salts."""

    keys_file: Text | None = None
    salt_secret_file: Text | None = None  # needed with keysFile: at least 32 random bytes, equal on every replica
    engine_key_file: Text | None = None  # the engines' own API key; a client's key never goes to an engine
    reload_seconds: Positive = _CHART.auth.reload_seconds  # between two looks at the keys file
    shared_limits: SharedLimitsConfig | None = None  # None: tenants' limits hold per gateway process
    # Routes on which the engine takes no salt, so that tenants share blocks.
    unsalted_routes: Literal["refuse", "allow"] = _CHART.auth.unsalted_routes
    # Tenants that are routers in front: only their kv_transfer_params pass, in requests and replies.
    kv_transfer_tenants: tuple[Text, ...] = ()


class AdmissionConfig(values.Admission, frozen=True):
    """The treatment of requests when every engine of a model is full; see access/admission.py."""


class IndexConfig(values.Index, frozen=True):
    bytes_max: ByteCount = ByteCount.read(_CHART.index.bytes_max)


class ShutdownConfig(CamelSection, frozen=True):
    drain_delay_seconds: NotNegative = 0.0  # between /ready turning 503 and the listening socket closing
    drain_timeout_seconds: NotNegative = 30.0  # what running streams get before they are ended


class LogConfig(values.Log, frozen=True):
    """One line per request with `requests`; never any prompt text."""


class AuditConfig(values.Audit, frozen=True):
    """One JSON line per request, without any text of prompts or replies; see access/audit.py.

    The file is opened for appending, and again after it was moved away.
    """


class ReloadConfig(values.Reload, frozen=True):
    """Pause between two looks at the configuration file; 0: only SIGHUP reads it again."""


class GatewayConfig(CamelSection, frozen=True):
    models: tuple[ModelConfig, ...]
    # behind one port; with more than one, another one counts and routes for all of them
    processes: Processes = _CHART.processes
    listen: ListenConfig = ListenConfig()
    connections: ConnectionsConfig = ConnectionsConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()
    health: HealthConfig = HealthConfig()
    limits: LimitsConfig = LimitsConfig()
    routing: RoutingConfig = RoutingConfig()
    disaggregation: DisaggregationConfig = DisaggregationConfig()
    retention: RetentionConfig = RetentionConfig()
    breaker: BreakerConfig = BreakerConfig()
    auth: AuthConfig = AuthConfig()
    cors: CorsConfig = CorsConfig()
    admission: AdmissionConfig = AdmissionConfig()
    index: IndexConfig = IndexConfig()
    shutdown: ShutdownConfig = ShutdownConfig()
    log: LogConfig = LogConfig()
    audit: AuditConfig = AuditConfig()
    reload: ReloadConfig = ReloadConfig()
    continuation: ContinuationConfig = ContinuationConfig()
    tracing: TracingConfig = TracingConfig()


def load_config(path: Path, reading: unique_yaml.Reading | None = None) -> GatewayConfig:
    """Read and check a configuration file.

    Raises ConfigError naming the setting, what was given, what is needed and what to change, and unique_yaml.GivenUp
    once `reading` is.
    """
    try:
        if (size := path.stat().st_size) > FILE_BYTES_MAX:
            raise ConfigError(
                f"--config {path}: {size} bytes given, at most {FILE_BYTES_MAX} read, what a ConfigMap holds; list "
                "fewer engines, or find them with models[].discovery"
            )
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read ({error.strerror}); give a YAML file's path") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path}: is not UTF-8 text; save it as UTF-8") from error
    try:
        document = unique_yaml.load(text, reading)
    except yaml.YAMLError as error:
        detail = " ".join(str(error).split())
        raise ConfigError(f"--config {path}: is not valid YAML: {detail}") from error
    return parse_config(document)


def parse_config(document: object) -> GatewayConfig:
    """Turn the parsed YAML document into a GatewayConfig. Pure; raises ConfigError."""
    try:
        config = read_settings(GatewayConfig, document)
    except WrongSetting as wrong:
        raise ConfigError(f"{wrong.path or 'the configuration'}: {wrong.problem}") from wrong
    _check(config)
    return config


def shown_config(config: GatewayConfig) -> dict[str, Any]:
    """The resolved configuration with the file's own keys, as /spillway/config shows it. Secrets stand in files, of
    which it names the paths alone; a user and password in an engine's URL are left out."""
    document: dict[str, Any] = msgspec.json.decode(settings_json(config))
    for model in document["models"]:
        for engine in model["engines"]:
            parts = urlsplit(engine["url"])
            engine["url"] = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    return document


def _check(config: GatewayConfig) -> None:
    if not config.models:
        raise ConfigError("models: empty; list at least one model with one engine")
    _check_names(config)
    for model in config.models:
        for engine in model.engines:
            _check_engine(model.name, engine)
        if model.discovery is not None:
            check_discovery(model.name, model.discovery)
        check_roles(model)
    check_disaggregation(config.disaggregation)
    _check_listeners(config.listen)
    _check_picker(config)
    check_tracing(config.tracing)
    check_cors("cors", config.cors)
    limits = config.limits
    if limits.body_bytes_max * config.processes > LONG_BODY_SHARE * limits.bodies_bytes_max:
        each = f", of which each of {config.processes} processes has its share" if config.processes > 1 else ""
        raise ConfigError(
            f"limits.bodiesBytesMax: {limits.bodies_bytes_max} given with bodyBytesMax {limits.body_bytes_max}{each}; "
            f"at least {math.ceil(config.processes * limits.body_bytes_max / LONG_BODY_SHARE)} needed, as long bodies "
            f"get {LONG_BODY_SHARE:.0%} of it"
        )
    _check_auth(config.auth)


def _check_auth(auth: AuthConfig) -> None:
    """Refuse half of an `auth` section: each of its settings rests on the keys that clients are asked for."""
    if (auth.keys_file is None) != (auth.salt_secret_file is None):
        raise ConfigError("auth: one of keysFile and saltSecretFile given; set both, or neither")
    if auth.keys_file is None:
        if auth.engine_key_file is not None:
            raise ConfigError(
                "auth.engineKeyFile: set without auth.keysFile, so that the gateway would add the engines' key to the "
                "requests of clients that have none; set keysFile and saltSecretFile too, or remove engineKeyFile "
                "(clients then send the engines' key themselves)"
            )
        if auth.kv_transfer_tenants:
            raise ConfigError("auth.kvTransferTenants: set without auth.keysFile; set both, or neither")
        if auth.shared_limits is not None:
            raise ConfigError("auth.sharedLimits: set without auth.keysFile; set both, or neither")
        if auth.unsalted_routes == "allow":
            raise ConfigError("auth.unsaltedRoutes: allow given without auth.keysFile; set both, or neither")
    if auth.shared_limits is not None:
        check_shared_limits("auth.sharedLimits", auth.shared_limits)
    given: dict[str, str] = {}
    for key, file in (
        ("keysFile", auth.keys_file),
        ("saltSecretFile", auth.salt_secret_file),
        ("engineKeyFile", auth.engine_key_file),
    ):
        if file is not None and (other := given.setdefault(file, key)) != key:
            raise ConfigError(f"auth.{key}: {file} is auth.{other} too; give each a file of its own")


def _check_listeners(listen: ListenConfig) -> None:
    if listen.ops_port is not None:
        same_host = listen.ops_host in (None, listen.host)
        if listen.ops_port == listen.port != 0 and same_host:
            raise ConfigError(f"listen.opsPort: {listen.ops_port} is listen.port too; give it another port")
    elif listen.ops_host is not None:
        raise ConfigError("listen.opsHost: set without listen.opsPort; set both, or neither")


def _check_picker(config: GatewayConfig) -> None:
    port = config.listen.picker_port
    if port is None:
        return
    if port != 0 and port in (config.listen.port, config.listen.ops_port):
        raise ConfigError(f"listen.pickerPort: {port} is another listener's too; give it a port of its own")
    for model in config.models:
        for engine in model.engines:
            host = urlsplit(engine.url).hostname or ""
            try:
                ipaddress.ip_address(host)
            except ValueError:
                raise ConfigError(
                    f"models: engine {engine.name!r} of {model.name!r}: host {host!r} given with listen.pickerPort, an "
                    "IP address needed, as proxies look up no names"
                ) from None


def _check_names(config: GatewayConfig) -> None:
    served: dict[str, str] = {}
    engines: dict[str, str] = {}
    for model in config.models:
        if not model.engines and model.discovery is None:
            raise ConfigError(f"models: {model.name!r} has no engine; add one under its 'engines', or set 'discovery'")
        if model.engines and model.discovery is not None:
            raise ConfigError(f"models: {model.name!r} has both engines and discovery; remove one of them")
        for name in model.names:
            if name in served:
                raise ConfigError(
                    f"models: the name {name!r} is used twice; names, aliases and adapters must be unique"
                )
            served[name] = model.name
        for engine in model.engines:
            ranks = engine.data_parallel_ranks
            for name in {engine.name, *(rank_name(engine.name, rank) for rank in range(ranks if ranks > 1 else 0))}:
                if name in engines:
                    raise ConfigError(f"models: two engines are named {name!r}; give each a name of its own")
                engines[name] = model.name


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
    _check_ranks(where, engine)
    if any(ord(letter) < 0x21 or ord(letter) > 0x7E for letter in engine.name):
        raise ConfigError(f"{where}: the name goes into a header; use visible ASCII letters without blanks")


def _check_ranks(where: str, engine: EngineConfig) -> None:
    """Rank r publishes at the port + r, so both addresses need a port, and room behind it."""
    ranks = engine.data_parallel_ranks
    if ranks % (1 + len(engine.workers)):
        raise ConfigError(
            f"{where}: workers has {len(engine.workers)} hosts, so that dataParallelRanks {ranks} are on "
            f"{1 + len(engine.workers)} pods, which does not divide them; correct one of the two"
        )
    by_host: dict[str | None, dict[str, int]] = {}
    for key, address in (("kvEvents", engine.kv_events), ("kvReplay", engine.kv_replay)):
        if ranks > 1 and address is not None:
            if not address.startswith("tcp://"):
                raise ConfigError(
                    f"{where}: {key} {address!r} given with dataParallelRanks {ranks}, tcp://HOST:PORT needed, as rank "
                    "r publishes at PORT + r"
                )
            parts = urlsplit(address)
            by_host.setdefault(parts.hostname, {})[key] = parts.port or 0
    for ports in by_host.values():
        check_rank_ports(where, ranks, ports)


def _is_zmq_address(address: str) -> bool:
    if address.startswith("ipc://"):
        return len(address) > len("ipc://")
    try:
        parts = urlsplit(address)
        return parts.scheme == "tcp" and bool(parts.hostname) and bool(parts.port) and not parts.path
    except ValueError:
        return False
