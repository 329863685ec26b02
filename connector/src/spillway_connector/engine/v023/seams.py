"""The names and signatures of vLLM 0.23 that the connector calls, overrides or patches."""

from __future__ import annotations

from spillway_connector.engine.generation import COMMON_METHODS, OFFLOADING, Methods, Seams
from spillway_connector.engine.patches.patching import patched_methods
from spillway_connector.engine.patches.vllm_patches import V023

SEAMS = Seams(
    names={
        "vllm.v1.kv_offload.tiering.base": ("JobMetadata", "JobResult", "SecondaryTierManager"),
        "vllm.v1.kv_offload.cpu.manager": ("CPUOffloadingManager",),
        "vllm.v1.kv_offload.worker.worker": ("OffloadingHandler", "TransferResult"),
        "vllm.v1.core.kv_cache_utils": ("_gen_lora_extra_hash_keys",),
        f"{OFFLOADING}.scheduler": ("OffloadingConnectorScheduler",),
        f"{OFFLOADING}.worker": ("OffloadingConnectorWorker",),
    },
    methods=(
        Methods(
            f"{OFFLOADING}.scheduler",
            "OffloadingConnectorScheduler",
            {
                "_lookup": ("self", "req_status"),
                "_maximal_prefix_lookup": ("self", "keys", "req_context"),
                "_touch": ("self", "req_status"),
                "on_new_request": ("self", "request"),
                "reset_cache": ("self",),
            },
        ),
        Methods(
            "vllm.v1.core.sched.scheduler",
            "Scheduler",
            {"_preempt_request": ("self", "request", "timestamp")},
        ),
        Methods(
            "vllm.distributed.kv_transfer.kv_connector.v1.base",
            "KVConnectorBase_V1",
            {
                "bind_gpu_block_pool": ("self", "gpu_block_pool"),
            },
        ),
        Methods("vllm.v1.core.block_pool", "BlockPool", {"free_blocks": ("self", "ordered_blocks", "prepend")}),
        Methods(
            "vllm.v1.request",
            "Request",
            {"get_skip_reading_prefix_cache": ("self",)},
        ),
        *COMMON_METHODS,
        *patched_methods(V023),
    ),
)
