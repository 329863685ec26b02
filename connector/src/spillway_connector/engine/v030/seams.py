"""The names and signatures of vLLM 0.30 and later that the connector calls, overrides or patches."""

from __future__ import annotations

from spillway_connector.engine.generation import COMMON_METHODS, OFFLOADING, Methods, Seams
from spillway_connector.engine.patches.patching import patched_methods
from spillway_connector.engine.patches.vllm_patches import V030

SEAMS = Seams(
    names={
        "vllm.v1.kv_offload.base": ("LookupResult", "Medium", "OffloadingWorker", "ScheduleEndContext", "TierFilter"),
        "vllm.v1.kv_offload.config": ("OffloadingConfig",),
        "vllm.v1.kv_offload.cpu.manager": ("CPUOffloadingManager",),
        "vllm.v1.kv_offload.cpu.policies.base": ("ChunkStatus",),
        "vllm.v1.kv_offload.tiering.base": ("JobResult", "SecondaryTierManager", "TransferJob"),
        "vllm.v1.kv_offload.tiering.factory": ("SecondaryTierFactory",),
        "vllm.v1.core.kv_cache_utils": ("_gen_lora_extra_hash_keys",),
        "vllm.distributed.kv_transfer.kv_connector.v1.base": ("KVConnectorTransferResults",),
        f"{OFFLOADING}.common": ("TransferJob", "TransferStats"),
        f"{OFFLOADING}.config": ("build_offloading_config", "get_offloading_group_ids"),
        f"{OFFLOADING}.metrics": ("OffloadingConnectorStats",),
        f"{OFFLOADING}.scheduler": ("GroupOffloadConfig", "_create_req_context"),
    },
    methods=(
        Methods(
            f"{OFFLOADING}.scheduler",
            "OffloadingConnectorScheduler",
            {
                "__init__": ("self", "spec", "vllm_config", "kv_cache_config"),
                "on_new_request": ("self", "request"),
                "get_num_new_matched_tokens": ("self", "request", "num_computed_tokens", "max_num_new_tokens"),
                "_lookup": ("self", "req_status", "max_num_new_tokens"),
                "_maximal_prefix_lookup": (
                    "self",
                    "keys",
                    "req_context",
                    "req",
                    "group_config",
                    "start_chunk_idx",
                ),
                "_build_partial_tail_store_jobs": ("self", "scheduler_output"),
                "update_state_after_alloc": ("self", "request", "blocks", "num_external_tokens"),
                "build_connector_meta": ("self", "scheduler_output"),
                "update_connector_output": ("self", "connector_output"),
                "request_finished": ("self", "request"),
                "has_pending_push_work": ("self",),
                "get_stats": ("self",),
                "reset_cache": ("self",),
            },
        ),
        Methods(
            "vllm.v1.core.sched.scheduler",
            "Scheduler",
            {"_preempt_request": ("self", "request", "timestamp", "drop_stale_output")},
        ),
        Methods(
            "vllm.v1.kv_offload.base",
            "OffloadingWorker",
            {
                "submit_store": ("self", "job_id", "src_spec", "dst_spec"),
                "submit_load": ("self", "job_id", "src_spec", "dst_spec"),
                "get_finished": ("self",),
                "wait": ("self", "job_ids"),
            },
            later={"submit_load": ("expedited",)},  # 0.33
        ),
        Methods(
            "vllm.v1.kv_offload.base",
            "OffloadingManager",
            {
                "lookup": ("self", "key", "req_context"),
                "prepare_load": ("self", "keys", "req_context"),
                "prepare_store": ("self", "keys", "req_context"),
                "complete_load": ("self", "keys", "req_context"),
                "complete_store": ("self", "keys", "req_context", "success"),
                "on_schedule_end": ("self", "context"),
                "has_pending_work": ("self",),
                "get_stats": ("self",),
            },
        ),
        *COMMON_METHODS,
        *patched_methods(V030),
    ),
)
