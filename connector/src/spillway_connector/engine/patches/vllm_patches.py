"""The patches of vLLM: those that all of its generations need, and the list of each generation, which continues them.

What 0.23's own patches do to its failed loads, pauses and KV groups, later versions do themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

from spillway_connector.engine.patches.patching import Needed, Patch
from spillway_settings.wire import PROMOTE_UTILITY, SETTLE_UTILITY, WEIGHTS_UTILITY

_ENGINE = "spillway_connector.engine"
_ENGINE_CORE = "vllm.v1.engine.core:EngineCore"
_ENGINE_CORE_PROC = f"{_ENGINE_CORE}Proc"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_BLOCK_POOL = "vllm.v1.core.block_pool:BlockPool"

_A_HOOK = "vLLM calls connectors before and after it loads an adapter"
_PER_OBJECT = "vLLM tells connectors of it"

_COMMON: Sequence[Patch] = (
    Patch(
        name="adapter-loads",
        place=_ENGINE_CORE,
        signature="add_lora(self, lora_request)",
        replacement=f"{_ENGINE}.namespace.adapters:reporting_add_lora",
        reason="the scheduler half does not know which files an adapter was loaded from, so its KV is not shared",
        until=_A_HOOK,
    ),
    Patch(
        name="adapter-of-request",
        place=_ENGINE_CORE,
        signature="preprocess_add_request(self, request)",
        replacement=f"{_ENGINE}.namespace.adapters:tagging_preprocess",
        reason="a request that is hashed while its adapter is replaced can be stored under the other weights' key",
        until=_A_HOOK,
    ),
    Patch(
        name="adapter-version-in-hash",
        place="vllm.v1.core.kv_cache_utils",
        signature="_gen_lora_extra_hash_keys(request)",
        replacement=f"{_ENGINE}.namespace.adapters:numbered_extra_keys",
        reason="vLLM hashes an adapter's name alone, so its prefix cache serves KV of weights that were replaced",
        until="vLLM's block hashes tell the weights of an adapter apart",
    ),
    Patch(
        name="adapter-loads-of-workers",
        place="vllm.lora.worker_manager:WorkerLoRAManager",
        signature="_load_adapter(self, lora_request)",
        replacement=f"{_ENGINE}.namespace.adapters:watched_load",
        needed_by=Needed.LORA_WORKER,
        reason="loads within a step go unseen: at an adapter's first use, and again after an eviction",
        until=_A_HOOK,
    ),
    Patch(
        name="weight-changes",
        place=_ENGINE_CORE,
        signature="collective_rpc(self, method, timeout, args, kwargs)",
        replacement=f"{_ENGINE}.namespace.weights:watched_collective_rpc",
        reason="KV of weights that were changed in place is shared in the old weights' namespace",
        until="vLLM tells connectors before its weights change",
    ),
    Patch(
        name="sleeps",
        place=_ENGINE_CORE,
        signature="sleep(self, level, mode)",
        replacement=f"{_ENGINE}.namespace.weights:watched_sleep",
        reason="a sleep of level 2 drops the weights unseen, with the same result",
        until="vLLM tells connectors before its weights change",
    ),
    Patch(
        name="caches-of-sleeps",
        place=_ENGINE_CORE,
        signature="_reset_caches(self, reset_running_requests, reset_connector)",
        reason="a sleep of level 1 empties the CPU tier, although the weights come back",
        until="a sleep leaves connectors' caches to them",
    ),
    Patch(
        name="weight-names",
        place=_ENGINE_CORE,
        signature=WEIGHTS_UTILITY,
        replacement=f"{_ENGINE}.namespace.weights:weights_utility",
        reason="weights that were changed in place have no name, so the shared tiers rest until a restart",
        until="vLLM lets connectors add utilities",
    ),
    Patch(
        name="promotion-hints",
        place=_ENGINE_CORE,
        signature=PROMOTE_UTILITY,
        replacement=f"{_ENGINE}.features.hints:promote_utility",
        reason="the gateway's hints do not reach EngineCore, which vLLM lets a process call by the name of a method",
        until="vLLM lets connectors add utilities",
    ),
    Patch(
        name="settling",
        place=_ENGINE_CORE,
        signature=SETTLE_UTILITY,
        replacement=f"{_ENGINE}.scheduler.settling:settle_utility",
        reason="an engine without requests does not step, so what its device alone holds is in no shared tier",
        until="vLLM lets connectors add utilities",
    ),
    Patch(
        name="forced-resets",
        place=_SCHEDULER,
        signature="reset_prefix_cache(self, reset_running_requests, reset_connector)",
        replacement=f"{_ENGINE}.scheduler.resets:forcing_reset",
        reason="vLLM refuses a reset that preempts running requests while a waiting one holds blocks for its load",
        until="such a reset gives up asynchronous loads",
    ),
    Patch(
        name="transfer-params",
        place=_ENGINE_CORE,
        signature="preprocess_add_request(self, request)",
        replacement=f"{_ENGINE}.connector_base:filtering_preprocess",
        reason="vLLM reads clients' kv_transfer_params on the scheduler's thread, where an exception ends the engine",
        until="vLLM checks their types when it takes a request",
    ),
    Patch(
        name="queue-order",
        place=_SCHEDULER,
        signature="_enqueue_waiting_request(self, request)",
        replacement=f"{_ENGINE}.features.queue_order:ordering_queue",
        reason="vLLM makes its queue of waiting requests itself, in one of two orders that know no prefix",
        until="vLLM takes a queue, or an order, from its configuration",
    ),
    Patch(
        name="device-resets",
        place=_BLOCK_POOL,
        signature="reset_prefix_cache(self)",
        reason="a reset of the device alone goes unseen: owed stores and stale requests count on its blocks",
        until=_PER_OBJECT,
    ),
    Patch(
        name="blocks-taken",
        place=_BLOCK_POOL,
        signature="get_new_blocks(self, num_blocks)",
        reason="with `storing: auto` a block that is taken during its copy would be published with other bytes",
        until=_PER_OBJECT,
    ),
)


def _steering(schedule: str) -> Sequence[Patch]:
    """The patches that let a feature choose what a step computes.

    Args:
        schedule: The generation's `Scheduler.schedule` with its parameters.
    """
    return (
        Patch(
            name="compute-while-loading",
            place=_SCHEDULER,
            signature=schedule,
            replacement=f"{_ENGINE}.features.meetings:stepping_with_meetings",
            needed_by=Needed.COMPUTE_WHILE_LOADING,
            reason="vLLM asks connectors for loaded tokens only when it admits a request; a scheduler class for "
            "`--scheduler-cls` would replace one of vLLM's two, or a platform's",
            until="vLLM asks again about a request that runs",
        ),
        Patch(
            name="fair-steps",
            place=_SCHEDULER,
            signature=schedule,
            replacement=f"{_ENGINE}.features.fair_steps:stepping_fairly",
            needed_by=Needed.FAIR_STEPS,
            reason="vLLM fills a step with the prompts that it began, also those of a flood, and others wait for all "
            "of it",
            until="vLLM shares its steps among tenants, or lets connectors leave requests out of one",
        ),
        Patch(
            name="fair-step-plans",
            place=_ENGINE_CORE_PROC,
            signature="_process_input_queue(self)",
            replacement=f"{_ENGINE}.features.fair_steps:awaiting_others",
            needed_by=Needed.FAIR_STEPS,
            reason="vLLM plans a step as soon as the one before it has begun, so a prompt that comes then waits for "
            "both",
            until="vLLM plans a step when the one before it is about to end",
        ),
    )


_INVALID_BLOCKS = (
    "_update_requests_with_invalid_blocks(self, requests, invalid_block_ids, num_scheduled_tokens, evict_blocks)"
)
_WITH_0_23 = "vLLM 0.23 is no longer supported; later versions do it themselves"


def _failed_step_loads(room: str) -> Patch:
    """Make the patch that takes a step back; how that is done differs by generation."""
    return Patch(
        name="failed-step-loads",
        place=_SCHEDULER,
        signature=_INVALID_BLOCKS,
        replacement=f"{_ENGINE}.{room}.failed_loads:step_retreat",
        needed_by=Needed.LAYERWISE_LOADS,
        reason="steps that were sent before a load failed still report tokens, and bad blocks stay in the prefix cache",
        until="vLLM takes a step back whose load failed",
    )


V023: Sequence[Patch] = (
    *_COMMON,
    Patch(
        name="failed-loads",
        place=_SCHEDULER,
        signature=_INVALID_BLOCKS,
        replacement=f"{_ENGINE}.v023.failed_loads:full_recompute",
        reason="a failed load of a model with several KV groups ends the engine, or keeps blocks never loaded",
        until=_WITH_0_23,
    ),
    Patch(
        name="group-hits",
        place="vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator",
        signature="allocate_new_computed_blocks(self, request_id, new_computed_blocks, num_local_computed_tokens, "
        "num_external_computed_tokens)",
        replacement=f"{_ENGINE}.v023.group_hits:holding_allocate",
        reason="blocks that one KV group has on the device can be allocated for the load of another",
        until=_WITH_0_23,
        upstream="vllm#43884, mended by vllm#44409",
    ),
    Patch(
        name="pauses",
        place=_SCHEDULER,
        signature="has_requests(self)",
        replacement=f"{_ENGINE}.v023.pauses:waiting_has_requests",
        reason="a pause counts as complete while a rank still copies, and an idle engine does not step to store",
        until=_WITH_0_23,
    ),
    Patch(
        name="failed-pauses",
        place=_ENGINE_CORE_PROC,
        signature="_notify_idle_state_callbacks(self)",
        replacement=f"{_ENGINE}.v023.pauses:answering_notify",
        reason="what fails at the end of a pause ends the engine core, instead of answering its caller",
        until=_WITH_0_23,
    ),
    *_steering("schedule(self)"),
    _failed_step_loads("v023"),
)

V030: Sequence[Patch] = (
    *_COMMON,
    *_steering("schedule(self, throttle_prefills)"),
    Patch(
        name="step-bounds",
        place=_SCHEDULER,
        signature="_reserve_prefill_lookahead(self, request, num_computed_tokens, num_new_tokens)",
        needed_by=Needed.COMPUTE_WHILE_LOADING,
        reason="vLLM's bound for long prompts does not hold for a request that is alone in a step",
        until="the part of one request in a step can be bounded",
    ),
    _failed_step_loads("v030"),
    Patch(
        name="kv-memory-releases",
        place=_ENGINE_CORE,
        signature="release_kv_cache_memory(self)",
        replacement=f"{_ENGINE}.namespace.weights:watched_release",
        reason="a release of the device's KV empties the CPU tier, although the weights stay",
        until="a release leaves connectors' caches to them",
        may_be_missing=True,
    ),
)
