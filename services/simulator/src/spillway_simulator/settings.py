"""Settings of a simulator process: YAML and --set, parsed once. Keys are camelCase in the file; defaults stand here."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from spillway_simulator.errors import SettingsError
from spillway_simulator.model.engine import EngineShape
from spillway_simulator.model.presets import PRESETS
from spillway_simulator.model.rates import EngineRates, LinkRates

ENGINES_MAX = 64


@dataclass(frozen=True, slots=True)
class Settings:
    """Ports: engine i listens on port + i; 0 lets the system choose each."""

    model: str = "simulated"
    tokenizer: str | None = None  # model folder; None: the built-in tokens of three bytes
    host: str = "127.0.0.1"
    engines: int = 1
    port: int = 8100
    kv_events_port: int = 8200
    kv_replay_port: int = 8300
    admin_port: int = 8400
    kv_events: bool = True
    event_form: Literal["array", "map"] = "array"  # vLLM 0.23's form, or that of 0.26 and later
    replay_batches: int = 10_000
    speed: float = 1.0  # virtual seconds per real second
    preset: str = "h200-qwen3-14b-nvme"
    rates: dict[str, float] = field(default_factory=dict)  # overrides by name, "cpu.loadTokensPerSecond" for links
    block_tokens: int = 128
    device_blocks: int = 4_800
    cpu_blocks: int = 4_800
    shared_blocks: int = 48_000  # of the one tier that all engines share
    announce_shared: bool = False
    max_running: int = 256
    max_batched_tokens: int = 8_192
    max_model_tokens: int = 32_768
    answer_tokens: int = 64  # where the request's own limit is larger, and it does not ignore the end

    @property
    def shape(self) -> EngineShape:
        return EngineShape(
            block_tokens=self.block_tokens,
            device_blocks=self.device_blocks,
            cpu_blocks=self.cpu_blocks,
            max_running=self.max_running,
            max_batched_tokens=self.max_batched_tokens,
            max_model_tokens=self.max_model_tokens,
            announce_shared=self.announce_shared,
            whole_decodes=False,
        )

    @property
    def engine_rates(self) -> EngineRates:
        return _overridden(PRESETS[self.preset], self.rates)


def load_settings(path: Path | None, overrides: typing.Sequence[str]) -> Settings:
    """overrides: KEY=VALUE, the value as YAML; `rates.NAME=VALUE` reaches into rates. Raises SettingsError."""
    document: dict[str, Any] = {}
    if path is not None:
        try:
            loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise SettingsError(f"--config {path}: cannot be read ({error}); give a YAML file's path") from error
        if loaded is not None and not isinstance(loaded, dict):
            raise SettingsError(f"--config {path}: a {type(loaded).__name__} given, a mapping of settings needed")
        document = loaded or {}
    for item in overrides:
        key, separator, text = item.partition("=")
        if not separator:
            raise SettingsError(f"--set {item}: KEY=VALUE needed")
        target = document
        if key.startswith("rates."):
            target = document.setdefault("rates", {})
            key = key.removeprefix("rates.")
        target[key] = yaml.safe_load(text)
    return parse_settings(document)


def parse_settings(document: dict[str, Any]) -> Settings:
    """Raises SettingsError naming the setting, what was given and what is needed."""
    hints = typing.get_type_hints(Settings)
    names = {camel(item.name): item.name for item in dataclasses.fields(Settings)}
    values: dict[str, Any] = {}
    for key, value in document.items():
        if key not in names:
            raise SettingsError(f"{key}: unknown setting; known are {', '.join(sorted(names))}")
        values[names[key]] = _checked(key, value, hints[names[key]])
    settings = Settings(**values)
    _check(settings)
    return settings


def camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(word.capitalize() for word in rest)


def _checked(key: str, value: object, hint: Any) -> object:
    if typing.get_origin(hint) is Literal:
        if value in typing.get_args(hint):
            return value
        raise SettingsError(f"{key}: {value!r} given, one of {', '.join(typing.get_args(hint))} needed")
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if hint is bool and isinstance(value, bool):
        return value
    if hint is str and isinstance(value, str) and value:
        return value
    if hint == (str | None) and (value is None or isinstance(value, str)):
        return value
    if typing.get_origin(hint) is dict and isinstance(value, dict):
        if all(isinstance(number, (int, float)) and not isinstance(number, bool) for number in value.values()):
            return {str(name): float(number) for name, number in value.items()}
        raise SettingsError(f"{key}: {value!r} given, numbers by name needed")
    raise SettingsError(f"{key}: {value!r} given, {getattr(hint, '__name__', str(hint))} needed")


def _check(settings: Settings) -> None:
    if not 1 <= settings.engines <= ENGINES_MAX:
        raise SettingsError(f"engines: {settings.engines} given, 1 to {ENGINES_MAX} needed")
    for name in ("port", "kv_events_port", "kv_replay_port", "admin_port"):
        port = getattr(settings, name)
        if not 0 <= port <= 65_535 - settings.engines:
            raise SettingsError(f"{camel(name)}: {port} given, 0 to {65_535 - settings.engines} needed")
    if settings.preset not in PRESETS:
        raise SettingsError(f"preset: {settings.preset!r} given, one of {', '.join(PRESETS)} needed")
    if not 0 < settings.speed < float("inf"):
        raise SettingsError(f"speed: {settings.speed} given, a finite number above 0 needed")
    for name in ("block_tokens", "device_blocks", "max_running", "max_model_tokens", "answer_tokens", "replay_batches"):
        if getattr(settings, name) < 1:
            raise SettingsError(f"{camel(name)}: {getattr(settings, name)} given, at least 1 needed")
    for name in ("cpu_blocks", "shared_blocks"):
        if getattr(settings, name) < 0:
            raise SettingsError(f"{camel(name)}: {getattr(settings, name)} given, at least 0 needed")
    if settings.max_batched_tokens <= settings.max_running:
        raise SettingsError(
            f"maxBatchedTokens: {settings.max_batched_tokens} given, more than maxRunning ({settings.max_running}) "
            "needed, or a full batch of decoding requests leaves no room for a prompt"
        )
    if settings.shared_blocks and not settings.cpu_blocks:
        raise SettingsError(
            "sharedBlocks: needs cpuBlocks above 0, as blocks reach the shared tier through the CPU tier"
        )
    _ = settings.engine_rates


def _overridden(rates: EngineRates, overrides: dict[str, float]) -> EngineRates:
    links: dict[str, LinkRates] = {"cpu": rates.cpu, "shared": rates.shared}
    plain = {camel(item.name): item.name for item in dataclasses.fields(EngineRates)}
    for without in (*links, "sources"):
        del plain[without]
    for key, value in overrides.items():
        if not 0 <= value < float("inf"):
            raise SettingsError(f"rates.{key}: {value} given, a finite number from 0 needed")
        link, _, name = key.partition(".")
        fields = {camel(item): item for item in LinkRates._fields}
        if link in links and name in fields:
            if value == 0 and not name.endswith("Seconds"):
                raise SettingsError(f"rates.{key}: 0 given, a rate above 0 needed")
            links[link] = links[link]._replace(**{fields[name]: value})
        elif key in plain:
            change: dict[str, Any] = {plain[key]: int(value) if plain[key] == "kv_bytes_per_token" else value}
            rates = replace(rates, **change)
        else:
            known = [*plain, *(f"{link}.{name}" for link in links for name in fields)]
            raise SettingsError(f"rates.{key}: unknown; known are {', '.join(known)}")
    if overrides:
        rates = replace(rates, sources=(*rates.sources, ("overridden", ", ".join(sorted(overrides)))))
    return replace(rates, cpu=links["cpu"], shared=links["shared"])
