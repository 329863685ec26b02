"""Everything one start needs, decided before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spillway_engine.ascend_versions import version_problem
from spillway_engine.drafters import with_drafter
from spillway_engine.errors import BudgetError
from spillway_engine.extra_arguments import argument_value
from spillway_engine.launch import EngineCommand, python_module
from spillway_engine.machine import SHARED_MEMORY_FOLDER, Machine
from spillway_engine.memory_budget import MemoryBudget, plan_memory
from spillway_engine.model_shape import DTYPE_BYTES, ModelShape
from spillway_engine.platform_facts import fact_contradictions
from spillway_engine.pod_channel import PodBrief
from spillway_engine.reference_likelihood import reference_name
from spillway_engine.settings import EngineSettings
from spillway_engine.tier_files import misplaced_tier, require_tier_files
from spillway_engine.tier_settings import SharedTierSettings
from spillway_engine.vllm_arguments import (
    SERVER_MODULE,
    WORKER_MODULE,
    public_configuration,
    server_arguments,
    server_environment,
    without_secrets,
)
from spillway_settings.byte_sizes import format_byte_count

JUDGING_MODULE = "spillway_engine.server"  # runs the module that is its first argument


@dataclass(frozen=True, slots=True)
class ResolvedEngine:
    settings: EngineSettings
    shape: ModelShape
    machine: Machine
    budget: MemoryBudget

    def require_fit(self) -> None:
        """Raises BudgetError with every reason at once, SettingsError for a file or variable that this pod lacks."""
        names, chunk_tokens = self.settings.names, self.settings.offload.blocks_per_chunk * self.budget.block_tokens
        wrong = fact_contradictions(self.settings, self.shape, self.machine.platform, chunk_tokens, names)
        problems = [*(each.sentence(names) for each in wrong), *self.budget.problems]
        nodes, index = self.settings.nodes_per_replica, self.settings.node_rank
        if index >= nodes or (nodes > 1 and not self.settings.leader):
            problems.append(
                f"{names.given('nodesPerReplica', nodes)} needs `leader`, the host of the first pod, "
                f"and a nodeRank below {nodes}, not {index}; LeaderWorkerSet gives them as LWS_LEADER_ADDRESS and "
                "LWS_WORKER_INDEX"
            )
        versions = self._version_problem()
        if versions is not None and self.settings.version_check == "refuse":
            problems.append(f"{versions}; or start all the same by {names.given('versionCheck', 'warn')}")
        if problems:
            raise BudgetError("\n".join(problems))
        if self.settings.offload.enabled:
            require_tier_files(self.settings.offload.shared_tier, names=self.settings.names)

    def warnings(self) -> list[str]:
        """The faults that are no reason to refuse to serve."""
        offload = self.settings.offload
        misplaced = misplaced_tier(offload.shared_tier, self.settings.names) if offload.enabled else None
        return [text for text in (self._version_problem(), misplaced) if text is not None]

    def _version_problem(self) -> str | None:
        return None if self.machine.ascend is None else version_problem(self.machine.ascend)

    def public(self) -> dict[str, Any]:
        return {
            **public_configuration(self.settings, self.budget),
            "platform": self.machine.platform,
            "arguments": without_secrets(server_arguments(self.settings, self.machine, self.budget)),
        }

    def command(self) -> EngineCommand:
        settings = self.settings
        arguments = server_arguments(settings, self.machine, self.budget)
        is_folder = Path(settings.model.path).is_dir()
        is_worker = settings.node_rank > 0
        return EngineCommand(
            arguments=python_module(JUDGING_MODULE, [WORKER_MODULE if is_worker else SERVER_MODULE, *arguments]),
            environment=server_environment(settings, self.machine, is_folder),
            brief=self._brief(arguments),
            lifecycle=settings.lifecycle,
            leader=(settings.leader, settings.port) if is_worker else None,
            index=settings.node_rank,
            further_pods=0 if is_worker else settings.nodes_per_replica - 1,
        )

    def _brief(self, arguments: Sequence[str]) -> PodBrief:
        settings = self.settings
        return PodBrief(
            served_name=settings.served_name,
            data_parallel_ranks=settings.data_parallel_size,
            self_check=settings.lifecycle.self_check == "auto",
            self_check_text=settings.lifecycle.self_check_text,
            self_check_timeout_seconds=settings.lifecycle.self_check_timeout_seconds,
            reference=None if settings.model.quantization else reference_name(settings.model.path, settings.extra_args),
            vocabulary=self.shape.vocabulary,
            generates_logits="logits" in (argument_value(settings.extra_args, "--logprobs-mode") or ""),
            dtype=self.budget.dtype,
            quantised_kv=self.budget.kv_dtype not in DTYPE_BYTES,
            eager="--enforce-eager" in arguments,
            settles=settings.offload.enabled
            and settings.offload.storing != "eager"
            and settings.offload.shared_tier.type != "none",
            names=settings.names,
            extra_arguments=len(settings.extra_args),
            configuration=self.public(),
        )

    def table(self) -> str:
        """The same for people, printed at the top of the pod's log."""
        budget, settings = self.budget, self.settings
        offload = settings.offload
        rows = [
            (
                "model",
                f"{settings.model.path} as {settings.served_name}, {budget.dtype}, "
                f"up to {settings.model.max_length:,} tokens",
            ),
            (
                "platform",
                f"{self.machine.platform}, {len(self.machine.cores)} cores, "
                f"tensor parallel {settings.tensor_parallel_size}{_stages_text(settings)}{_cores_text(settings)}"
                f"{_nodes_text(settings)}",
            ),
            ("KV per token", f"{budget.bytes_per_token:,} B in {budget.kv_dtype}"),
            *_adapter_rows(settings),
            ("KV per block", f"{budget.bytes_per_block:,} B of {settings.block_size} tokens"),
            ("device blocks", _device_text(budget)),
        ]
        if offload.enabled:
            rows += [
                (
                    "CPU tier",
                    f"{_times(budget)}{budget.cpu_chunks:,} chunks x {budget.cpu_row_bytes:,} B = "
                    f"{format_byte_count(budget.cpu_tier_bytes)}, {budget.cpu_tier_tokens:,} tokens{_each(budget)}",
                ),
                ("shared tier", _shared_tier_text(settings)),
            ]
            if offload.node_tier is not None:
                text = f"{budget.node_tier_chunks:,} chunks, {format_byte_count(budget.node_tier_bytes)}"
                rows.insert(len(rows) - 1, ("node's tier", f"{text} in {offload.node_tier.path}"))
        else:
            rows.append(("offload", "off"))
        rows += [
            (
                str(SHARED_MEMORY_FOLDER),
                f"needs {format_byte_count(budget.shared_memory_needed_bytes)}, "
                f"{format_byte_count(budget.shared_memory_free_bytes)} free",
            ),
            (
                "memory",
                f"needs {format_byte_count(budget.memory_needed_bytes)}, "
                f"{format_byte_count(budget.memory_available_bytes)} available ({budget.memory_limit_source})",
            ),
        ]
        lines = [f"  {name:<14} {text}" for name, text in rows]
        return "\n".join(
            [f"Spillway engine {settings.name}", *lines, *(f"  warning: {text}" for text in budget.warnings)]
        )


def resolve_engine(settings: EngineSettings, shape: ModelShape, machine: Machine) -> ResolvedEngine:
    shape = with_drafter(shape, settings.extra_args)
    return ResolvedEngine(settings, shape, machine, plan_memory(settings, shape, machine))


def _adapter_rows(settings: EngineSettings) -> list[tuple[str, str]]:
    names = [adapter.name for adapter in settings.lora.adapters]
    return [("adapters", f"{', '.join(names)}, {settings.lora.max_active} in a batch")] if names else []


def _stages_text(settings: EngineSettings) -> str:
    stages = settings.pipeline_parallel_size
    return f", {stages} pipeline stages" if stages > 1 else ""


def _cores_text(settings: EngineSettings) -> str:
    ranks = settings.data_parallel_size
    return f", {ranks} data parallel ranks" if ranks > 1 else ""


def _nodes_text(settings: EngineSettings) -> str:
    nodes = settings.nodes_per_replica
    return f", pod {settings.node_rank} of {nodes}, led by {settings.leader}" if nodes > 1 else ""


def _each(budget: MemoryBudget) -> str:
    return " each" if budget.data_parallel_ranks > 1 else ""


def _times(budget: MemoryBudget) -> str:
    ranks = budget.data_parallel_ranks
    return f"{ranks} ranks x " if ranks > 1 else ""


def _device_text(budget: MemoryBudget) -> str:
    if budget.device_blocks is None or budget.device_bytes is None:
        return "as many as the engine finds room for"
    return (
        f"{_times(budget)}{budget.device_blocks:,} = {format_byte_count(budget.device_bytes)}, "
        f"{budget.device_tokens:,} tokens{_each(budget)}"
    )


def _shared_tier_text(settings: EngineSettings) -> str:
    tier = settings.offload.shared_tier
    if tier.type == "none":
        return "none"
    sealed = "" if tier.encryption is None else f", sealed with key {tier.encryption.key_id}"
    return "; below it ".join(_store_text(tier, each) for each in tier.types) + sealed


def _store_text(tier: SharedTierSettings, tier_type: str) -> str:
    if tier_type == "redis":
        return f"redis, {tier.redis.url}"
    if tier_type == "s3":
        return f"s3, {tier.s3.bucket}/{tier.s3.prefix}, {tier.s3.endpoint or f'AWS {tier.s3.region}'}"
    bound = (
        format_byte_count(tier.nvme.max_bytes)
        if tier.nvme.max_bytes is not None
        else "four fifths of what the file system can give"
    )
    return f"nvme, {tier.nvme.path}, {tier.nvme.mode}, up to {bound}"
