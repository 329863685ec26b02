"""Checks before the start whether this machine can run the stack; reports every reason at once, with its remedy."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from spillway_engine.machine import Machine, probe_machine
from spillway_engine.memory_budget import MemoryBudget
from spillway_engine.model_shape import load_model_shape
from spillway_engine.resolve import resolve_engine
from spillway_engine.settings import EngineSettings
from spillway_engine.settings_reader import engine_settings
from spillway_settings.byte_sizes import format_byte_count
from spillway_stack.bundled_model import PreparedModel
from spillway_stack.components import Component, engine_configuration
from spillway_stack.engine_environments import environment_problems
from spillway_stack.ports import holder, is_free
from spillway_stack.settings import VALKEY_MAX_BYTES, StackSettings
from spillway_stack.state_folder import StateFolder

VLLM_WITH_CPU_PIPELINES = "0.23"
STATE_DISK_BYTES = 512 << 20  # logs, and an NVMe tier that can hold anything at all


def check_machine(
    settings: StackSettings, model: PreparedModel, folder: StateFolder, components: Sequence[Component]
) -> list[str]:
    """Return the reasons why the stack cannot start here; empty if it can."""
    engine = engine_settings(engine_configuration(settings, model, folder, 0), settings.engine_overrides)
    machine = probe_machine(engine.platform)
    budget = resolve_engine(engine, load_model_shape(engine.model.path, engine.names), machine).budget
    return [
        *environment_problems(settings.vllm),
        *pipeline_problems(engine, settings.vllm, machine.platform),
        *port_problems(components),
        *disk_problems(folder.root),
        *budget.problems,
        *memory_problems(settings, machine, budget),
    ]


def pipeline_problems(engine: EngineSettings, versions: Sequence[str], platform: str) -> list[str]:
    """Return why pipelines cannot run: CPU engines of vLLM 0.30 and newer fail at the first step, in any case."""
    stages = engine.pipeline_parallel_size
    newer = [version for version in dict.fromkeys(versions) if version != VLLM_WITH_CPU_PIPELINES]
    if stages == 1 or platform != "cpu" or not newer:
        return []
    names = engine.names
    return [
        f"{names.given('pipelineParallelSize', stages)} needs vLLM {VLLM_WITH_CPU_PIPELINES} on CPUs, but "
        f"VLLM={','.join(versions)} given, whose CPU engines fail at the first step of a pipeline; set "
        f"VLLM={VLLM_WITH_CPU_PIPELINES} or {names.given('pipelineParallelSize', 1)}"
    ]


def port_problems(components: Sequence[Component]) -> list[str]:
    problems = []
    for component in components:
        for port in component.ports:
            if not is_free(port):
                by = holder(port)
                held = f"held by {by}" if by else "taken by another process"
                problems.append(
                    f"port {port} ({component.name}) is {held}; end it, or choose other ports with PORT=<number>"
                )
    return problems


def disk_problems(root: Path, needed_bytes: int = STATE_DISK_BYTES) -> list[str]:
    free_bytes = shutil.disk_usage(root).free
    if free_bytes >= needed_bytes:
        return []
    return [
        f"{root} is on a disk with {format_byte_count(free_bytes)} free, the stack's logs and NVMe tier need "
        f"{format_byte_count(needed_bytes)}; free some space"
    ]


def memory_problems(settings: StackSettings, machine: Machine, budget: MemoryBudget) -> list[str]:
    """Return what all engines together lack. A single engine's lack is among its budget's problems."""
    problems = []
    shared_bytes = budget.shared_memory_needed_bytes * settings.engines
    if shared_bytes > machine.shared_memory_free_bytes and not budget.problems:
        problems.append(
            f"{settings.engines} engines need {format_byte_count(shared_bytes)} of /dev/shm, "
            f"{format_byte_count(machine.shared_memory_free_bytes)} is free; lower NUM_CPU_BLOCKS or ENGINES"
        )
    valkey_bytes = VALKEY_MAX_BYTES if settings.shared_tier == "redis" else 0
    needed_bytes = budget.memory_needed_bytes * settings.engines + settings.gateway_memory_bytes + valkey_bytes
    if needed_bytes > machine.memory_available_bytes and not budget.problems:
        problems.append(
            f"{settings.engines} engines, gateway and tiers need {format_byte_count(needed_bytes)} of memory, "
            f"{format_byte_count(machine.memory_available_bytes)} is available ({machine.memory_limit_source}); "
            "end other programs, or lower ENGINES, NUM_CPU_BLOCKS or DEVICE_BLOCKS"
        )
    return problems
