"""The generation of vLLM's offloading interfaces that this vLLM has; chosen by feature, never by its version string.

Each generation has a room of its own beside this module, which holds all that touches that generation's classes and a
`seams.py` with what it relies on. Nothing else depends on the version of vLLM.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

from spillway_connector.errors import UnsupportedEngine

SUPPORTED = "vLLM 0.23.0 (vllm-ascend 0.23.0.post1), 0.30.0, 0.32.0 or 0.33.0"


OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"


class Generation(Enum):
    """The generations of vLLM, each by the name of its room."""

    V023 = "v023"  # 0.23
    V030 = "v030"  # 0.30 to 0.33


class Methods(NamedTuple):
    """Methods that Spillway overrides or patches: vLLM must still declare these parameters, or an override would have
    another contract."""

    module: str
    cls: str
    parameters: Mapping[str, Sequence[str]]  # by method
    later: Mapping[str, Sequence[str]] = MappingProxyType({})  # by method: parameters that later versions add


_QUEUE_METHODS = {
    "peek_request": ("self",),
    "pop_request": ("self",),
    "add_request": ("self", "request"),
    "prepend_request": ("self", "request"),
    "prepend_requests": ("self", "requests"),
    "remove_request": ("self", "request"),
    "remove_requests": ("self", "requests"),
}

COMMON_METHODS = (  # equal in all generations
    # vLLM's queues of waiting requests, whose order engine/features/queue_order.py changes.
    Methods("vllm.v1.core.sched.request_queue", "FCFSRequestQueue", _QUEUE_METHODS),
    Methods("vllm.v1.core.sched.request_queue", "PriorityRequestQueue", _QUEUE_METHODS),
    Methods(
        f"{OFFLOADING}.worker",
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
    Methods(f"{OFFLOADING}.scheduler", "RequestOffloadState", {"update_offload_keys": ("self",)}),
    Methods(
        "vllm.distributed.kv_transfer.kv_connector.v1.base",
        "KVConnectorBase_V1",
        {
            "reset_cache": ("self",),
            "start_load_kv": ("self", "forward_context", "kwargs"),
            "wait_for_layer_load": ("self", "layer_name"),
        },
    ),
    Methods("vllm.v1.core.sched.scheduler", "Scheduler", {"_inflight_prefill_reserved_blocks": ("self",)}),
    Methods(
        "vllm.v1.core.block_pool",
        "BlockPool",
        {
            "get_cached_block": ("self", "block_hash", "kv_cache_group_ids"),
            "get_num_free_blocks": ("self",),
            "touch": ("self", "blocks"),
            "evict_blocks": ("self", "block_ids"),
        },
    ),
)


class Seams(NamedTuple):
    """The names and signatures of vLLM on which a generation's room relies."""

    names: Mapping[str, Sequence[str]]  # by module
    methods: Sequence[Methods]


@cache
def generation() -> Generation:
    """The generation of the vLLM in this process. Raises UnsupportedEngine if it has none of the known interfaces."""
    if _has_module("vllm.v1.kv_offload.worker.worker"):  # handlers by direction
        return Generation.V023
    if _has_module("vllm.v1.kv_offload.config"):  # specs made of an OffloadingConfig, one worker for both directions
        return Generation.V030
    raise unsupported("its offloading interfaces (vllm.v1.kv_offload) are of no known generation")


def require(seams: Seams) -> None:
    """Raises UnsupportedEngine naming what is missing or has changed."""
    for module_name, names in seams.names.items():
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            raise unsupported(f"{module_name} is missing") from error
        for name in names:
            if not hasattr(module, name):
                raise unsupported(f"{module_name}.{name} is missing")
    for module_name, class_name, methods, later in seams.methods:
        cls = own_class(module_name, class_name)
        for method, parameters in methods.items():
            found = list(inspect.signature(getattr(cls, method)).parameters)
            if found not in (list(parameters), [*parameters, *later.get(method, ())]):
                raise unsupported(f"{class_name}.{method} takes {found}, not {list(parameters)}")


def own_class(module: str, name: str) -> Any:
    """vLLM's own class of this name, which a platform may have replaced by a subclass.

    vllm-ascend does so with the scheduler: vLLM's method is still called, but by one that takes more parameters, and
    vLLM's other schedulers do not inherit from the replacement.
    """
    found = getattr(importlib.import_module(module), name)
    return next((cls for cls in found.__mro__ if (cls.__module__, cls.__qualname__) == (module, name)), found)


def unsupported(what: str) -> UnsupportedEngine:
    import vllm

    return UnsupportedEngine(f"vLLM {vllm.__version__} is not supported: {what}; run Spillway with {SUPPORTED}")


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # one of the packages above it
        return False
