"""What the connector relies on in vLLM 0.23: what it calls or overrides, and what its patches replace."""

from __future__ import annotations

from spillway_connector.engine.generation import WAITING_QUEUES, Methods, Seams
from spillway_connector.engine.patches.patching import patched_methods
from spillway_connector.engine.patches.v023 import PATCHES

SEAMS = Seams(
    names={
        "vllm.v1.kv_offload.tiering.base": ("JobMetadata", "JobResult", "SecondaryTierManager"),
        "vllm.v1.kv_offload.cpu.manager": ("CPUOffloadingManager",),
        "vllm.v1.kv_offload.worker.worker": ("OffloadingHandler", "TransferResult"),
        "vllm.v1.core.kv_cache_utils": ("_gen_lora_extra_hash_keys",),
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler": ("OffloadingConnectorScheduler",),
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker": ("OffloadingConnectorWorker",),
    },
    methods=(
        Methods(
            "vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker",
            "OffloadingConnectorWorker",
            {
                "register_kv_caches": ("self", "kv_caches"),
                "start_kv_transfers": ("self", "metadata"),
                "prepare_store_kv": ("self", "metadata"),
                "handle_preemptions": ("self", "kv_connector_metadata"),
                "get_finished": ("self", "finished_req_ids"),
                "build_connector_worker_meta": ("self",),
            },
        ),
        Methods(
            "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler",
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
            "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler",
            "RequestOffloadState",
            {
                "update_offload_keys": ("self",),
            },
        ),
        Methods(
            "vllm.v1.core.sched.scheduler",
            "Scheduler",
            {
                "_preempt_request": ("self", "request", "timestamp"),
                "_inflight_prefill_reserved_blocks": ("self",),
            },
        ),
        Methods(
            "vllm.distributed.kv_transfer.kv_connector.v1.base",
            "KVConnectorBase_V1",
            {
                "bind_gpu_block_pool": ("self", "gpu_block_pool"),
                "reset_cache": ("self",),
                "start_load_kv": ("self", "forward_context", "kwargs"),
                "wait_for_layer_load": ("self", "layer_name"),
            },
        ),
        Methods(
            "vllm.v1.core.block_pool",
            "BlockPool",
            {
                "get_cached_block": ("self", "block_hash", "kv_cache_group_ids"),
                "get_num_free_blocks": ("self",),
                "touch": ("self", "blocks"),
                "free_blocks": ("self", "ordered_blocks", "prepend"),
                "evict_blocks": ("self", "block_ids"),
            },
        ),
        Methods(
            "vllm.v1.request",
            "Request",
            {
                "get_skip_reading_prefix_cache": ("self",),
            },
        ),
        *WAITING_QUEUES,
        *patched_methods(PATCHES),
    ),
)
