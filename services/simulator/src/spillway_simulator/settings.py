"""Settings of a simulator process: YAML and --set, parsed once. Keys are camelCase in the file; defaults stand here, or
are those of an engine of the chart."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta

from spillway_settings.typed import (
    CamelSection,
    Count,
    NotNegative,
    Positive,
    Text,
    WrongSetting,
    read_settings,
)
from spillway_settings.values.engine import Engine
from spillway_simulator.errors import SettingsError
from spillway_simulator.model.engine import EngineShape
from spillway_simulator.model.presets import PRESETS
from spillway_simulator.model.rates import EngineRates, LinkRates

ENGINES_MAX = 64
_ENGINE = Engine()
EnginePort = Annotated[int, Meta(ge=0, le=65_535)]  # of the first engine
Blocks = Annotated[int, Meta(ge=0)]


class Settings(CamelSection, frozen=True):
    """Ports: engine i listens on port + i; 0 lets the system choose each."""

    model: Text = "simulated"
    tokenizer: str | None = None  # model folder; None: the built-in tokens of three bytes
    host: Text = "127.0.0.1"
    engines: Annotated[int, Meta(ge=1, le=ENGINES_MAX)] = 1
    port: EnginePort = _ENGINE.port
    kv_events_port: EnginePort = _ENGINE.kv_events.port
    kv_replay_port: EnginePort = _ENGINE.kv_events.replay_port
    admin_port: EnginePort = 8400
    kv_events: bool = True
    event_form: Literal["array", "map"] = "array"  # vLLM 0.23's form, or that of 0.26 and later
    replay_batches: Count = 10_000
    speed: Positive = 1.0  # virtual seconds per real second
    preset: Text = "h200-qwen3-14b-nvme"
    # Overrides by name, "cpu.loadTokensPerSecond" for links.
    rates: dict[str, NotNegative] = msgspec.field(default_factory=dict)
    block_tokens: Count = _ENGINE.block_size
    device_blocks: Count = 4_800
    cpu_blocks: Blocks = 4_800
    shared_blocks: Blocks = 48_000  # of the one tier that all engines share
    announce_shared: bool = True
    max_running: Count = 256
    max_batched_tokens: Count = 8_192
    max_model_tokens: Count = 32_768
    answer_tokens: Count = 64  # if the request's own limit is larger, and it does not ignore the end

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


def load_settings(path: Path | None, overrides: Sequence[str]) -> Settings:
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
    try:
        settings = read_settings(Settings, document)
    except WrongSetting as wrong:
        raise SettingsError(str(wrong)) from wrong
    _check(settings)
    return settings


def camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(word.capitalize() for word in rest)


def _check(settings: Settings) -> None:
    for name in ("port", "kv_events_port", "kv_replay_port", "admin_port"):
        port = getattr(settings, name)
        if port > 65_535 - settings.engines:
            raise SettingsError(f"{camel(name)}: {port} given, 0 to {65_535 - settings.engines} needed")
    if settings.preset not in PRESETS:
        raise SettingsError(f"preset: {settings.preset!r} given, one of {', '.join(PRESETS)} needed")
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
