"""The stack that `make up` started, as the demo needs it; reports whatever prevents a demo."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spillway_settings.wire import CONFIG_PATH
from spillway_stack.demo.sizing import EngineLimits
from spillway_stack.errors import StackError
from spillway_stack.local_http import READ_SECONDS, exchange
from spillway_stack.local_stack import LocalStack
from spillway_stack.settings import VALKEY_MAX_BYTES, StackSettings
from spillway_stack.state_folder import StateFolder


@dataclass(frozen=True, slots=True)
class RunningStack:
    stack: LocalStack
    model: str
    dtype: str
    platform: str
    limits: EngineLimits
    shared_tier: str  # nvme or redis
    shared_tier_bytes: int

    @property
    def gateway_port(self) -> int:
        return self.stack.settings.gateway_port()

    def engine_port(self, index: int) -> int:
        return self.stack.settings.engine_port(index)

    def engine_index(self, name: str) -> int:
        """Raises StackError for an engine name that is not of this stack."""
        names = [engine.name for engine in self.stack.engines]
        if name not in names:
            raise StackError(f"the gateway answered from {name!r}, the stack's engines are {', '.join(names)}")
        return names.index(name)


def find_stack(state_dir: Path) -> RunningStack:
    """Raises StackError with what to start, or to change."""
    folder = StateFolder(state_dir.resolve())
    plan = folder.read_plan()
    if plan is None or folder.read_state() is None:
        raise StackError(f"no stack is running in {folder.root}; start one with `make up`, then run `make demo` again")
    settings = StackSettings.from_dict(plan["settings"])
    require_offload(settings)
    stack = LocalStack(settings, folder.root)
    waiting = [f"{status.name} ({status.detail or status.state})" for status in stack.status() if not status.ready]
    if waiting:
        raise StackError(f"the stack is not ready: {', '.join(waiting)}; see `make status` and `make logs`")
    with exchange(settings.engine_port(0), "GET", CONFIG_PATH, timeout_seconds=READ_SECONDS) as response:
        configuration: dict[str, Any] = json.load(response)
    return RunningStack(
        stack=stack,
        model=stack.model.served_name,
        dtype=str(configuration["memory"]["dtype"]),
        platform=str(configuration["platform"]),
        limits=limits_from_configuration(configuration),
        shared_tier=settings.shared_tier,
        shared_tier_bytes=settings.nvme_max_bytes if settings.shared_tier == "nvme" else VALKEY_MAX_BYTES,
    )


def require_offload(settings: StackSettings) -> None:
    """Raises StackError when a phase would have nothing to show."""
    again = "run `make down` and then `make up` with"
    if settings.engines < 2:
        raise StackError(f"ENGINES={settings.engines}: the demo needs another engine to share with; {again} ENGINES=2")
    if not settings.offload:
        raise StackError(f"OFFLOAD=off: there are no tiers to show; {again} OFFLOAD=on")
    if settings.shared_tier == "none":
        raise StackError(f"SHARED_TIER=none: engines share nothing; {again} SHARED_TIER=nvme or SHARED_TIER=redis")
    if not settings.gateway:
        raise StackError(
            "the stack runs without a gateway, whose headers the demo shows; run `make down` and then `make up`"
        )


def limits_from_configuration(configuration: dict[str, Any]) -> EngineLimits:
    """Read the limits from an engine's /spillway/config. Raises StackError when its cache sizes are not stated."""
    settings, memory = configuration["settings"], configuration["memory"]
    if memory["device_blocks"] is None:
        raise StackError("the engine's device cache has no stated size; run `make up` with DEVICE_BLOCKS=<number>")
    return EngineLimits(
        max_length=int(settings["model"]["maxLength"]),
        block_size=int(settings["blockSize"]),
        chunk_tokens=int(settings["blockSize"]) * int(settings["offload"]["blocksPerChunk"]),
        device_blocks=int(memory["device_blocks"]),
        cpu_chunks=int(memory["cpu_chunks"]),
        bytes_per_token=int(memory["bytes_per_token"]),
    )
