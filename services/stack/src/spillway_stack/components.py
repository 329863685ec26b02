"""Derives the processes of the stack from its settings: names, commands, configuration files, readiness. Pure, no
I/O."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from spillway_stack import make_variables, object_store
from spillway_stack.bundled_model import PreparedModel
from spillway_stack.engine_environments import interpreter
from spillway_stack.settings import VALKEY_MAX_BYTES, StackSettings
from spillway_stack.state_folder import StateFolder

# Nothing has to leave a load balancer here before `make down` can stop an engine.
ENGINE_LIFECYCLE = {"drainDelaySeconds": 1, "drainTimeoutSeconds": 30}


@dataclass(frozen=True, slots=True)
class Component:
    """One child process of the supervisor."""

    name: str
    arguments: Sequence[str]
    port: int
    ready_path: str | None  # HTTP path that answers 200 when ready; None: an open port is enough
    ports: Sequence[int] = ()  # every port that it listens on
    stop_rank: int = 0  # lower ones are stopped first
    stop_timeout_seconds: float = 20.0
    hurry: bool = False  # a second SIGTERM means "now" to it
    environment: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "arguments": list(self.arguments), "ports": list(self.ports)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Component:
        return cls(**values)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def plan_components(
    settings: StackSettings, model: PreparedModel, folder: StateFolder, valkey_binary: Path
) -> list[Component]:
    """Return the components in start order: Valkey, object store, engines, gateway. Raises StackError."""
    components = [_valkey(settings, folder, valkey_binary)]
    if settings.shared_tier == "s3":
        components.append(_object_store(settings, folder))
    components += [_engine(settings, folder, index) for index in range(settings.engines)]
    if settings.gateway:
        components.append(_gateway(settings, folder))
    return components


def configuration_files(settings: StackSettings, model: PreparedModel, folder: StateFolder) -> dict[Path, str]:
    """Return the YAML text of every file that the components read, by path."""
    files = {
        folder.config / f"engine-{index}.yaml": engine_configuration(settings, model, folder, index)
        for index in range(settings.engines)
    }
    files[folder.config / "gateway.yaml"] = gateway_configuration(settings, model)
    texts = {path: yaml.safe_dump(tree, sort_keys=False) for path, tree in files.items()}
    if settings.shared_tier == "s3":
        texts[_identities_file(folder)] = object_store.identities()
    return texts


def engine_configuration(
    settings: StackSettings, model: PreparedModel, folder: StateFolder, index: int
) -> dict[str, Any]:
    offload: dict[str, Any] = {"enabled": settings.offload}
    if settings.offload:
        offload |= {"numCpuBlocks": settings.num_cpu_blocks, "sharedTier": _shared_tier(settings, folder)}
        if settings.node_tier != "off":
            offload["nodeTier"] = {"bytes": settings.node_tier, "path": str(folder.node_tier), "fallback": "refuse"}
    return {
        "name": f"engine-{index}",
        "model": {
            "path": model.folder,
            "servedName": model.served_name,
            "dtype": settings.dtype,
            "maxLength": settings.max_length,
        },
        "host": "127.0.0.1",
        "port": settings.engine_port(index),
        "blockSize": settings.block_size,
        "deviceBlocks": settings.device_blocks,
        "kvEvents": {
            "enabled": True,
            "port": settings.events_port(index),
            "replayPort": settings.replay_port(index),
        },
        "offload": offload,
        "lifecycle": {
            **ENGINE_LIFECYCLE,
            "selfCheck": settings.self_check,
            "selfCheckText": settings.self_check_text,
        },
        "extraArgs": list(settings.engine_args),
        "settingNames": make_variables.setting_names(),
    }


def gateway_configuration(settings: StackSettings, model: PreparedModel) -> dict[str, Any]:
    ranks = settings.data_parallel_size
    engines = [
        {
            "name": f"engine-{index}",
            "url": f"http://127.0.0.1:{settings.engine_port(index)}",
            "kvEvents": f"tcp://127.0.0.1:{settings.events_port(index)}",
            "kvReplay": f"tcp://127.0.0.1:{settings.replay_port(index)}",
            **({"dataParallelRanks": ranks} if ranks > 1 else {}),
        }
        for index in range(settings.engines)
    ]
    return {
        "processes": settings.gateway_processes,
        "listen": {"host": "127.0.0.1", "port": settings.gateway_port()},
        "models": [
            {"name": model.served_name, "aliases": [], "tokenizer": model.tokenizer, "engines": engines},
        ],
    }


def _shared_tier(settings: StackSettings, folder: StateFolder) -> dict[str, Any]:
    if settings.shared_tier == "nvme":
        return {"type": "nvme", "nvme": {"path": str(folder.nvme), "maxBytes": settings.nvme_max_bytes}}
    if settings.shared_tier == "redis":
        return {"type": "redis", "redis": {"url": f"redis://127.0.0.1:{settings.valkey_port()}/0"}}
    if settings.shared_tier == "s3":
        endpoint = f"http://127.0.0.1:{settings.s3_port()}"
        return {"type": "s3", "s3": {"bucket": object_store.BUCKET, "endpoint": endpoint}}
    return {"type": "none"}


def _identities_file(folder: StateFolder) -> Path:
    return folder.config / "object-store.json"


def _object_store(settings: StackSettings, folder: StateFolder) -> Component:
    port = settings.s3_port()
    binary, data = object_store.server_binary(), folder.object_store
    ports = range(port, port + len(object_store.PORTS))
    arguments = object_store.server_arguments(binary, data, _identities_file(folder), ports)
    return Component(
        object_store.NAME,
        arguments,
        port,
        ready_path="/healthz",
        ports=tuple(ports),
        stop_rank=2,
        environment=dict(object_store.KEYS),
    )


def _valkey(settings: StackSettings, folder: StateFolder, binary: Path) -> Component:
    arguments = [
        str(binary),
        *("--bind", "127.0.0.1"),
        *("--port", str(settings.valkey_port())),
        *("--dir", str(folder.valkey)),
        *("--save", ""),
        *("--appendonly", "no"),
        *("--maxmemory", str(VALKEY_MAX_BYTES)),
        *("--maxmemory-policy", "allkeys-lfu"),
    ]
    port = settings.valkey_port()
    return Component("valkey", arguments, port, ready_path=None, ports=(port,), stop_rank=2, stop_timeout_seconds=5)


def _engine(settings: StackSettings, folder: StateFolder, index: int) -> Component:
    name = f"engine-{index}"
    overrides = [argument for override in settings.engine_overrides for argument in ("--set", override)]
    port = settings.engine_port(index)
    python = interpreter(settings.engine_vllm(index))
    return Component(
        name,
        [str(python), "-m", "spillway_engine", "--config", str(folder.config / f"{name}.yaml"), *overrides],
        port,
        ready_path="/ready",
        ports=(port, *_event_ports(settings, index)),
        stop_rank=1,
        stop_timeout_seconds=40,
        hurry=True,
        environment=dict(object_store.KEYS) if settings.shared_tier == "s3" else {},
    )


def _event_ports(settings: StackSettings, index: int) -> list[int]:
    ranks = range(settings.data_parallel_size)
    return [first + rank for first in (settings.events_port(index), settings.replay_port(index)) for rank in ranks]


def _gateway(settings: StackSettings, folder: StateFolder) -> Component:
    port = settings.gateway_port()
    return Component(
        "gateway",
        [sys.executable, "-m", "spillway_gateway", "--config", str(folder.config / "gateway.yaml")],
        port,
        ready_path="/ready",
        ports=(port,),
        stop_rank=0,
        stop_timeout_seconds=15,
        hurry=True,
    )
