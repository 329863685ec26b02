"""The patches of vLLM 0.23."""

from __future__ import annotations

from collections.abc import Sequence

from spillway_connector.engine.patches.common import (
    COMMON,
    ENGINE,
    ENGINE_CORE,
    SCHEDULER,
    compute_while_loading,
    fair_steps,
)
from spillway_connector.engine.patches.patching import Needed, Patch

_INVALID_BLOCKS = ("self", "requests", "invalid_block_ids", "num_scheduled_tokens", "evict_blocks")
_WITH_0_23 = "vLLM 0.23 is no longer supported; later versions do it themselves"

PATCHES: Sequence[Patch] = (
    *COMMON,
    Patch(
        name="failed-loads",
        module=SCHEDULER,
        cls="Scheduler",
        function="_update_requests_with_invalid_blocks",
        parameters=_INVALID_BLOCKS,
        replacement=f"{ENGINE}.v023.failed_loads:full_recompute",
        reason="a failed load of a model with several KV groups ends the engine, or keeps blocks never loaded",
        until=_WITH_0_23,
    ),
    Patch(
        name="group-hits",
        module="vllm.v1.core.kv_cache_coordinator",
        cls="KVCacheCoordinator",
        function="allocate_new_computed_blocks",
        parameters=(
            "self",
            "request_id",
            "new_computed_blocks",
            "num_local_computed_tokens",
            "num_external_computed_tokens",
        ),
        replacement=f"{ENGINE}.v023.group_hits:holding_allocate",
        reason="blocks that one KV group has on the device can be allocated for the load of another",
        until=_WITH_0_23,
        upstream="vllm#43884, mended by vllm#44409",
    ),
    Patch(
        name="pauses",
        module=SCHEDULER,
        cls="Scheduler",
        function="has_requests",
        parameters=("self",),
        replacement=f"{ENGINE}.v023.pauses:waiting_has_requests",
        reason="a pause counts as complete while a rank still copies, and an idle engine does not step to store",
        until=_WITH_0_23,
    ),
    Patch(
        name="failed-pauses",
        module=ENGINE_CORE,
        cls="EngineCoreProc",
        function="_notify_idle_state_callbacks",
        parameters=("self",),
        replacement=f"{ENGINE}.v023.pauses:answering_notify",
        reason="what fails at the end of a pause ends the engine core, instead of answering its caller",
        until=_WITH_0_23,
    ),
    compute_while_loading("self"),
    fair_steps("self"),
    Patch(
        name="failed-step-loads",
        module=SCHEDULER,
        cls="Scheduler",
        function="_update_requests_with_invalid_blocks",
        parameters=_INVALID_BLOCKS,
        replacement=f"{ENGINE}.v023.failed_step_loads:step_retreat",
        needed_by=Needed.LAYERWISE_LOADS,
        reason="steps that were sent before a load failed still report tokens, and bad blocks stay in the prefix cache",
        until="layerwise_loads, which 0.23 alone has, goes",
    ),
)
