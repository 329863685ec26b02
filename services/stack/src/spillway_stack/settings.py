"""Settings of the local stack, and the ports that follow from them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from spillway_engine.settings import LifecycleSettings, ModelSettings
from spillway_settings.values.engine import DATA_PARALLEL_RANKS_MAX, Engine
from spillway_settings.values.gateway import PROCESSES_MAX, Gateway
from spillway_settings.values.offload import TierType
from spillway_stack import make_variables
from spillway_stack.engine_environments import VLLM_HERE, VLLM_VERSIONS
from spillway_stack.errors import StackError

RANKS_KEY = "dataParallelSize"
DTYPES = get_args(get_type_hints(ModelSettings)["dtype"])
SELF_CHECKS = get_args(get_type_hints(LifecycleSettings)["self_check"])
SHARED_TIERS = get_args(TierType)
VALKEY_MAX_BYTES = 1 << 30
GATEWAY_MEMORY_BYTES = 400 << 20  # of each of its processes
ENGINES_MAX = 50
PORTS_APART = 100  # of engines, events and replays


@dataclass(frozen=True, slots=True)
class StackSettings:
    """Defaults suit two cores and 12 GB: a device cache of ten thousand tokens, small enough to see eviction."""

    port: int = Gateway().port  # gateway; engines + 100, events + 200, replays + 300, Valkey + 400, S3 + 410
    engines: int = 2
    model: str = ""  # folder or hub name; empty: the bundled SmolLM2-135M-Instruct
    shared_tier: str = "nvme"
    offload: bool = True
    node_tier: str = "off"  # bytes of one CPU tier for all engines, such as 1GiB; off: each has one of its own
    num_cpu_blocks: int = 112  # chunks of one block, per engine: the demo's documents of 4,096 tokens and its probes
    device_blocks: int = 80
    block_size: int = Engine().block_size  # tokens
    max_length: int = 8192  # tokens
    nvme_max_bytes: int = 4 << 30
    gateway: bool = True
    gateway_processes: int = Gateway().processes  # that serve clients; with more than one, another one routes for them
    dtype: str = Engine().model.dtype
    self_check: str = LifecycleSettings().self_check
    self_check_text: str = ""  # empty: the built-in sentences
    engine_args: tuple[str, ...] = ()  # further arguments of vLLM, for every engine
    vllm: tuple[str, ...] = (VLLM_HERE,)  # of all engines, or one for each
    engine_overrides: tuple[str, ...] = ()  # `key.path=value`, as spillway_engine --set takes them, for every engine

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> StackSettings:
        """Read the settings from the variables of `make up`. Raises StackError naming the variable."""
        default = cls()
        settings = cls(
            port=_number(environment, "PORT", default.port, least=1, most=65_535 - 420),
            engines=_number(environment, "ENGINES", default.engines, least=1, most=ENGINES_MAX),
            model=_model(environment.get("MODEL", "")),
            shared_tier=_choice(environment, "SHARED_TIER", default.shared_tier, SHARED_TIERS),
            offload=_choice(environment, "OFFLOAD", "on", ("on", "off")) == "on",
            node_tier=environment.get("NODE_TIER", "").strip() or default.node_tier,
            num_cpu_blocks=_number(environment, "NUM_CPU_BLOCKS", default.num_cpu_blocks, least=1),
            device_blocks=_number(environment, "DEVICE_BLOCKS", default.device_blocks, least=2),
            gateway_processes=_number(
                environment, "GATEWAY_PROCESSES", default.gateway_processes, least=1, most=PROCESSES_MAX
            ),
            max_length=_number(environment, "MAX_LENGTH", default.max_length, least=1),
            dtype=_choice(environment, "DTYPE", default.dtype, DTYPES),
            self_check=_choice(environment, "SELF_CHECK", default.self_check, SELF_CHECKS),
            self_check_text=environment.get("SELF_CHECK_TEXT", "").strip(),
            engine_args=make_variables.arguments(environment),
            vllm=vllm_versions(environment.get("VLLM", "")),
            engine_overrides=make_variables.overrides(environment),
        )
        if len(settings.vllm) not in (1, settings.engines):
            raise StackError(
                f"VLLM={','.join(settings.vllm)} names {len(settings.vllm)} versions for {settings.engines} engines; "
                f"give one for all, or ENGINES={len(settings.vllm)}"
            )
        ranks = settings.engines * settings.data_parallel_size
        if ranks > PORTS_APART:
            raise StackError(
                f"ENGINES={settings.engines} and ENGINE_SET=dataParallelSize={settings.data_parallel_size} are {ranks} "
                f"ranks, and there are ports for {PORTS_APART}; lower one of the two"
            )
        longest = (settings.device_blocks - 1) * settings.block_size
        if longest < settings.max_length and not environment.get("MAX_LENGTH", "").strip():
            # A small device cache is a way to see eviction; it also bounds the longest prompt.
            return replace(settings, max_length=longest)
        return settings

    def engine_vllm(self, index: int) -> str:
        return self.vllm[index % len(self.vllm)]

    @property
    def data_parallel_size(self) -> int:
        """The value that ENGINE_SET gives; the engine service checks it. 1 if it gives none that could be one."""
        given = [text for key, _, text in (word.partition("=") for word in self.engine_overrides) if key == RANKS_KEY]
        return (
            int(given[-1]) if given and given[-1].isdecimal() and 0 < int(given[-1]) <= DATA_PARALLEL_RANKS_MAX else 1
        )

    @property
    def gateway_memory_bytes(self) -> int:
        return GATEWAY_MEMORY_BYTES * (self.gateway_processes + (self.gateway_processes > 1))

    def gateway_port(self) -> int:
        return self.port

    def engine_port(self, index: int) -> int:
        return self.port + 100 + index

    def events_port(self, index: int) -> int:
        """The port of the first data parallel rank's events; those of the other ranks follow."""
        return self.port + 200 + index * self.data_parallel_size

    def replay_port(self, index: int) -> int:
        """The port of the first data parallel rank's replays; those of the other ranks follow."""
        return self.port + 300 + index * self.data_parallel_size

    def valkey_port(self) -> int:
        return self.port + 400

    def s3_port(self) -> int:
        """The port of S3; those of the object store's other parts follow."""
        return self.port + 410

    def as_dict(self) -> dict[str, Any]:
        """JSON-compatible; the inverse is `from_dict`."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> StackSettings:
        """Unknown keys are ignored, missing ones have their defaults."""
        names = {field.name for field in fields(cls)}
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in record.items() if name in names
        }
        return cls(**values)


def _number(environment: Mapping[str, str], name: str, default: int, least: int, most: int | None = None) -> int:
    text = environment.get(name, "").strip()
    if not text:
        return default
    if not text.isdigit() or int(text) < least or (most is not None and int(text) > most):
        bounds = f"from {least} to {most}" if most is not None else f"of at least {least}"
        raise StackError(f"{name}={text} is not a whole number {bounds}")
    return int(text)


def _choice(environment: Mapping[str, str], name: str, default: str, choices: tuple[str, ...]) -> str:
    text = environment.get(name, "").strip() or default
    if text not in choices:
        raise StackError(f"{name}={text} is none of {', '.join(choices)}")
    return text


def vllm_versions(text: str) -> tuple[str, ...]:
    """The versions that VLLM= lists; this environment's if it is empty. Raises StackError for an unknown one."""
    versions = tuple(word.strip() for word in text.split(",") if word.strip()) or (VLLM_HERE,)
    for version in versions:
        if version not in VLLM_VERSIONS:
            raise StackError(
                f"VLLM={text} is none of {', '.join(VLLM_VERSIONS)}; give one of them, or one for each engine "
                f"separated by commas"
            )
    return versions


def _model(text: str) -> str:
    text = text.strip()
    return str(Path(text).expanduser().resolve()) if text and Path(text).expanduser().is_dir() else text
