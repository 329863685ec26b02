"""Checks that this vLLM is one the connector supports; the only module that depends on its version.

Spillway plugs into vLLM 0.23's offloading interfaces. What it relies on is probed by feature, never by comparing
version strings, so that a patch release keeps working and a redesigned one is refused with a message.
"""

from __future__ import annotations

import importlib
import inspect

from spillway_connector.errors import UnsupportedEngine

# module -> names that must be there; the second column of each row is what 0.23 offers and later lines renamed.
_REQUIRED = (
    ("vllm.v1.kv_offload.tiering.base", ("JobMetadata", "JobResult", "SecondaryTierManager")),
    ("vllm.v1.kv_offload.tiering.manager", ("CPUPrimaryTierOffloadingManager", "TieringOffloadingManager")),
    ("vllm.v1.kv_offload.worker.worker", ("OffloadingHandler", "TransferResult")),
    ("vllm.v1.core.kv_cache_utils", ("_gen_lora_extra_hash_keys",)),
    ("vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler", ("OffloadingConnectorScheduler",)),
    ("vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker", ("OffloadingConnectorWorker",)),
)
# Overridden methods: upstream must still declare these parameters, or an override would have another contract.
_SIGNATURES = (
    (
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker",
        "OffloadingConnectorWorker",
        {
            "register_kv_caches": ["self", "kv_caches"],
            "start_kv_transfers": ["self", "metadata"],
            "prepare_store_kv": ["self", "metadata"],
            "handle_preemptions": ["self", "kv_connector_metadata"],
            "get_finished": ["self", "finished_req_ids"],
            "build_connector_worker_meta": ["self"],
        },
    ),
    (
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler",
        "OffloadingConnectorScheduler",
        {
            "_lookup": ["self", "req_status"],
            "_maximal_prefix_lookup": ["self", "keys", "req_context"],
            "_touch": ["self", "req_status"],
            "on_new_request": ["self", "request"],
            "reset_cache": ["self"],
        },
    ),
    (
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler",
        "RequestOffloadState",
        {"update_offload_keys": ["self"]},
    ),
    (
        "vllm.v1.core.sched.scheduler",
        "Scheduler",
        {
            "_update_requests_with_invalid_blocks": [
                "self",
                "requests",
                "invalid_block_ids",
                "num_scheduled_tokens",
                "evict_blocks",
            ],
        },
    ),
    (
        "vllm.distributed.kv_transfer.kv_connector.v1.base",
        "KVConnectorBase_V1",
        {"bind_gpu_block_pool": ["self", "gpu_block_pool"], "reset_cache": ["self"]},
    ),
    ("vllm.v1.core.block_pool", "BlockPool", {"get_num_free_blocks": ["self"]}),
    ("vllm.v1.request", "Request", {"get_skip_reading_prefix_cache": ["self"]}),
    (
        "vllm.v1.core.kv_cache_coordinator",
        "KVCacheCoordinator",
        {
            "allocate_new_computed_blocks": [
                "self",
                "request_id",
                "new_computed_blocks",
                "num_local_computed_tokens",
                "num_external_computed_tokens",
            ],
        },
    ),
    (
        "vllm.v1.engine.core",
        "EngineCore",
        {
            "collective_rpc": ["self", "method", "timeout", "args", "kwargs"],
            "add_lora": ["self", "lora_request"],
            "preprocess_add_request": ["self", "request"],
        },
    ),
    ("vllm.lora.worker_manager", "WorkerLoRAManager", {"_load_adapter": ["self", "lora_request"]}),
    (
        "vllm.v1.kv_offload.tiering.manager",
        "TieringOffloadingManager",
        {
            "lookup": ["self", "key", "req_context"],
            "complete_store": ["self", "keys", "req_context", "success"],
            "_flush_pending_promotions": ["self"],
            "_process_finished_jobs": ["self"],
            "prepare_store": ["self", "keys", "req_context"],
            "_initiate_promotion": ["self", "tier", "key", "req_context"],
        },
    ),
)


def require_supported_vllm() -> None:
    """Raises UnsupportedEngine naming what is missing, when this vLLM is not one Spillway can serve in."""
    for module_name, names in _REQUIRED:
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            raise _unsupported(f"{module_name} is missing") from error
        for name in names:
            if not hasattr(module, name):
                raise _unsupported(f"{module_name}.{name} is missing")
    for module_name, class_name, methods in _SIGNATURES:
        cls = getattr(importlib.import_module(module_name), class_name)
        for method, parameters in methods.items():
            found = list(inspect.signature(getattr(cls, method)).parameters)
            if found != parameters:
                raise _unsupported(f"{class_name}.{method} takes {found}, not {parameters}")


def _unsupported(what: str) -> UnsupportedEngine:
    import vllm

    return UnsupportedEngine(
        f"vLLM {vllm.__version__} is not supported: {what}; run Spillway with vLLM 0.23.0 (vllm-ascend 0.23.0.post1)"
    )
