"""The patches of vLLM that all of its generations need. A generation's own list continues this one."""

from __future__ import annotations

from collections.abc import Sequence

from spillway_connector.engine.patches.patching import Needed, Patch
from spillway_settings.wire import PROMOTE_UTILITY, SETTLE_UTILITY, WEIGHTS_UTILITY

ENGINE = "spillway_connector.engine"
ENGINE_CORE = "vllm.v1.engine.core"
SCHEDULER = "vllm.v1.core.sched.scheduler"
BLOCK_POOL = "vllm.v1.core.block_pool"

_A_HOOK = "vLLM calls connectors before and after it loads an adapter"
_PER_OBJECT = "vLLM tells connectors of it"

COMMON: Sequence[Patch] = (
    Patch(
        name="adapter-loads",
        module=ENGINE_CORE,
        cls="EngineCore",
        function="add_lora",
        parameters=("self", "lora_request"),
        replacement=f"{ENGINE}.namespace.adapters:reporting_add_lora",
        reason="the scheduler half does not know which files an adapter was loaded from, so its KV is not shared",
        until=_A_HOOK,
    ),
    Patch(
        name="adapter-of-request",
        module=ENGINE_CORE,
        cls="EngineCore",
        function="preprocess_add_request",
        parameters=("self", "request"),
        replacement=f"{ENGINE}.namespace.adapters:tagging_preprocess",
        reason="a request that is hashed while its adapter is replaced can be stored under the other weights' key",
        until=_A_HOOK,
    ),
    Patch(
        name="adapter-version-in-hash",
        module="vllm.v1.core.kv_cache_utils",
        function="_gen_lora_extra_hash_keys",
        parameters=("request",),
        replacement=f"{ENGINE}.namespace.adapters:numbered_extra_keys",
        reason="vLLM hashes an adapter's name alone, so its prefix cache serves KV of weights that were replaced",
        until="vLLM's block hashes tell the weights of an adapter apart",
    ),
    Patch(
        name="adapter-loads-of-workers",
        module="vllm.lora.worker_manager",
        cls="WorkerLoRAManager",
        function="_load_adapter",
        parameters=("self", "lora_request"),
        replacement=f"{ENGINE}.namespace.adapters:watched_load",
        needed_by=Needed.LORA_WORKER,
        reason="loads within a step go unseen: at an adapter's first use, and again after an eviction",
        until=_A_HOOK,
    ),
    Patch(
        name="weight-changes",
        module=ENGINE_CORE,
        cls="EngineCore",
        function="collective_rpc",
        parameters=("self", "method", "timeout", "args", "kwargs"),
        replacement=f"{ENGINE}.namespace.weights:watched_collective_rpc",
        reason="KV of weights that were changed in place is shared in the old weights' namespace",
        until="vLLM tells connectors before its weights change",
    ),
    Patch(
        name="sleeps",
        module=ENGINE_CORE,
        cls="EngineCore",
        function="sleep",
        parameters=("self", "level", "mode"),
        replacement=f"{ENGINE}.namespace.weights:watched_sleep",
        reason="a sleep of level 2 drops the weights unseen, with the same result",
        until="vLLM tells connectors before its weights change",
    ),
    Patch(
        name="caches-of-sleeps",
        module=ENGINE_CORE,
        cls="EngineCore",
        function="_reset_caches",
        parameters=("self", "reset_running_requests", "reset_connector"),
        replacement=None,
        reason="a sleep of level 1 empties the CPU tier, although the weights come back",
        until="a sleep leaves connectors' caches to them",
    ),
    Patch(
        name="weight-names",
        module=ENGINE_CORE,
        cls="EngineCore",
        function=WEIGHTS_UTILITY,
        parameters=None,
        replacement=f"{ENGINE}.namespace.weights:weights_utility",
        reason="weights that were changed in place have no name, so the shared tiers rest until a restart",
        until="vLLM lets connectors add utilities",
    ),
    Patch(
        name="promotion-hints",
        module=ENGINE_CORE,
        cls="EngineCore",
        function=PROMOTE_UTILITY,
        parameters=None,
        replacement=f"{ENGINE}.features.hints:promote_utility",
        reason="the gateway's hints do not reach EngineCore, which vLLM lets a process call by the name of a method",
        until="vLLM lets connectors add utilities",
    ),
    Patch(
        name="settling",
        module=ENGINE_CORE,
        cls="EngineCore",
        function=SETTLE_UTILITY,
        parameters=None,
        replacement=f"{ENGINE}.scheduler.settling:settle_utility",
        reason="an engine without requests does not step, so what its device alone holds is in no shared tier",
        until="vLLM lets connectors add utilities",
    ),
    Patch(
        name="forced-resets",
        module=SCHEDULER,
        cls="Scheduler",
        function="reset_prefix_cache",
        parameters=("self", "reset_running_requests", "reset_connector"),
        replacement=f"{ENGINE}.scheduler.resets:forcing_reset",
        reason="vLLM refuses a reset that preempts running requests while a waiting one holds blocks for its load",
        until="such a reset gives up asynchronous loads",
    ),
    Patch(
        name="transfer-params",
        module=ENGINE_CORE,
        cls="EngineCore",
        function="preprocess_add_request",
        parameters=("self", "request"),
        replacement=f"{ENGINE}.connector_base:filtering_preprocess",
        reason="vLLM reads clients' kv_transfer_params on the scheduler's thread, where an exception ends the engine",
        until="vLLM checks their types when it takes a request",
    ),
    Patch(
        name="queue-order",
        module=SCHEDULER,
        cls="Scheduler",
        function="_enqueue_waiting_request",
        parameters=("self", "request"),
        replacement=f"{ENGINE}.features.queue_order:ordering_queue",
        reason="vLLM makes its queue of waiting requests itself, in one of two orders that know no prefix",
        until="vLLM takes a queue, or an order, from its configuration",
    ),
    Patch(
        name="device-resets",
        module=BLOCK_POOL,
        cls="BlockPool",
        function="reset_prefix_cache",
        parameters=("self",),
        replacement=None,
        reason="a reset of the device alone goes unseen: owed stores and stale requests count on its blocks",
        until=_PER_OBJECT,
    ),
    Patch(
        name="blocks-taken",
        module=BLOCK_POOL,
        cls="BlockPool",
        function="get_new_blocks",
        parameters=("self", "num_blocks"),
        replacement=None,
        reason="with `storing: auto` a block that is taken during its copy would be published with other bytes",
        until=_PER_OBJECT,
    ),
)


def compute_while_loading(*parameters: str) -> Patch:
    """The patch that lets a prompt be computed and loaded at the same time.

    Args:
        parameters: Those of the generation's `Scheduler.schedule`.
    """
    return Patch(
        name="compute-while-loading",
        module=SCHEDULER,
        cls="Scheduler",
        function="schedule",
        parameters=parameters,
        replacement=f"{ENGINE}.features.meetings:stepping_with_meetings",
        needed_by=Needed.COMPUTE_WHILE_LOADING,
        reason="vLLM asks connectors for loaded tokens only when it admits a request; a scheduler class for "
        "`--scheduler-cls` would replace one of vLLM's two, or a platform's",
        until="vLLM asks again about a request that runs",
    )


def fair_steps(*parameters: str) -> Patch:
    """The patch that lets a step compute the prompts of one tenant's session at a time.

    Args:
        parameters: Those of the generation's `Scheduler.schedule`.
    """
    return Patch(
        name="fair-steps",
        module=SCHEDULER,
        cls="Scheduler",
        function="schedule",
        parameters=parameters,
        replacement=f"{ENGINE}.features.fair_steps:stepping_fairly",
        needed_by=Needed.FAIR_STEPS,
        reason="vLLM fills a step with the prompts that it began, whoever sent them, and others wait for all of it",
        until="vLLM shares its steps among tenants, or lets connectors leave requests out of one",
    )
