"""vLLM's own classes against what the connector relies on; a later vLLM breaks a test that names what has changed."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob as CopyJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    GroupOffloadConfig,
    OffloadingConnectorScheduler,
)
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    PrepareStoreOutput,
    ReqContext,
    ScheduleEndContext,
    TransferResult,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

from spillway_connector.engine.generation import Methods, Seams, require
from spillway_connector.engine.v030.connector import SpillwayConnector
from spillway_connector.engine.v030.cpu_tier import ArcCpuTier, LruCpuTier
from spillway_connector.engine.v030.offload_worker import CopyWorker
from spillway_connector.engine.v030.scheduler import RequestState, SpillwayConnectorScheduler
from spillway_connector.engine.v030.seams import SEAMS
from spillway_connector.engine.v030.spec import SpillwayOffloadingSpec
from spillway_connector.engine.v030.tier_adapter import SharedTierAdapter
from spillway_connector.engine.v030.tiering import SpillwayTieringManager
from spillway_connector.engine.v030.worker import SpillwayConnectorWorker
from spillway_connector.errors import UnsupportedEngine

OURS = (
    ArcCpuTier,
    CopyWorker,
    LruCpuTier,
    RequestState,
    SharedTierAdapter,
    SpillwayConnector,
    SpillwayConnectorScheduler,
    SpillwayConnectorWorker,
    SpillwayOffloadingSpec,
    SpillwayTieringManager,
)
# What the connector reads from, or gives to, vLLM's structs.
FIELDS: dict[type, tuple[str, ...]] = {
    CopyJob: ("req_id", "src_spec", "dst_spec"),
    GroupOffloadConfig: (
        "group_idx",
        "hashes_per_chunk",
        "is_eagle_group",
        "kv_cache_spec",
        "sliding_window_size_in_chunks",
        "tokens_per_chunk",
    ),
    JobResult: ("job_id", "success"),
    KVConnectorTransferResults: ("finished_recving", "failed_recving"),
    OffloadingConfig: ("engine_id", "parallel", "worker_kv_bytes_per_block"),
    OffloadingConnectorMetadata: ("load_jobs", "store_jobs", "jobs_to_flush"),
    OffloadingEvent: ("keys", "medium", "removed"),
    OffloadingWorkerMetadata: ("completed_jobs", "transfer_stats"),
    PrepareStoreOutput: ("keys_to_store", "store_spec", "evicted_keys"),
    ReqContext: ("req_id", "kv_transfer_params", "load_tier_filter"),
    ScheduleEndContext: ("new_req_ids", "preempted_req_ids"),
    TransferJob: ("job_id", "keys", "chunk_ids", "is_promotion", "req_context"),
    TransferResult: ("job_id", "success", "transfer_size", "transfer_time"),
}


def seam_names() -> Iterator[Any]:
    for module, names in SEAMS.names.items():
        yield from (pytest.param(module, name, id=f"{module.removeprefix('vllm.')}.{name}") for name in names)


def seam_methods() -> Iterator[Any]:
    for module, cls, methods, later in SEAMS.methods:
        for method, parameters in methods.items():
            yield pytest.param(Methods(module, cls, {method: parameters}, later), id=f"{cls}.{method}")


def overrides() -> Iterator[Any]:
    """Each method of ours that a class of vLLM declares too."""
    for cls in OURS:
        for name, ours in inspect.getmembers(cls, inspect.isfunction):
            theirs = next((vars(base)[name] for base in cls.__mro__ if _is_vllms(base) and name in vars(base)), None)
            if not ours.__module__.startswith("vllm.") and name != "__init__" and inspect.isfunction(theirs):
                yield pytest.param(ours, theirs, id=f"{cls.__name__}.{name}")


def _is_vllms(cls: type) -> bool:
    return cls.__module__.startswith("vllm.")


@pytest.mark.parametrize(("module", "name"), list(seam_names()))
def test_a_name_is_there(module: str, name: str) -> None:
    require(Seams(names={module: (name,)}, methods=()))


@pytest.mark.parametrize("methods", list(seam_methods()))
def test_a_method_takes_what_it_did(methods: Methods) -> None:
    require(Seams(names={}, methods=(methods,)))


@pytest.mark.parametrize(("ours", "theirs"), list(overrides()))
def test_an_override_takes_what_vllm_passes(ours: Any, theirs: Any) -> None:
    """An override takes the same arguments by position and by name; its additional parameters have defaults."""
    takes, passed = inspect.signature(ours).parameters.values(), list(inspect.signature(theirs).parameters.values())
    named = {one.name: one for one in takes}
    if any(one.kind is one.VAR_KEYWORD for one in takes):
        return
    assert [one.name for one in takes][: len(passed)] == [one.name for one in passed]
    for one in passed:
        assert one.default is one.empty or named[one.name].default is not one.empty, f"{one.name} is optional in vLLM"
    for name in named.keys() - {one.name for one in passed}:
        assert named[name].default is not inspect.Parameter.empty, f"vLLM does not pass {name}"


@pytest.mark.parametrize("cls", OURS, ids=lambda cls: cls.__name__)
def test_nothing_is_left_abstract(cls: type) -> None:
    assert not getattr(cls, "__abstractmethods__", frozenset())


@pytest.mark.parametrize(("struct", "fields"), list(FIELDS.items()), ids=lambda value: getattr(value, "__name__", ""))
def test_a_struct_has_the_fields(struct: type, fields: tuple[str, ...]) -> None:
    declared = {field.name for field in dataclasses.fields(struct)} if dataclasses.is_dataclass(struct) else set()
    declared |= set(getattr(struct, "_fields", ())) | set(inspect.signature(struct).parameters)
    assert set(fields) <= declared


def test_a_lookup_has_the_answers_that_are_translated() -> None:
    assert {member.name for member in LookupResult} == {"HIT", "HIT_PENDING", "MISS", "RETRY"}


def test_a_device_spec_names_its_blocks_by_group() -> None:
    spec = GPULoadStoreSpec([3, 4, 5], group_sizes=(1, 2), block_indices=(0, 1))
    assert spec.block_ids.tolist() == [3, 4, 5]
    assert (tuple(spec.group_sizes), tuple(spec.block_indices)) == ((1, 2), (0, 1))


def test_this_vllm_is_supported() -> None:
    require(SEAMS)


def test_a_method_that_changed_its_duty_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OffloadingConnectorScheduler, "_lookup", lambda self, key: None)
    with pytest.raises(UnsupportedEngine, match=r"OffloadingConnectorScheduler\._lookup takes"):
        require(SEAMS)


def test_every_module_with_a_seam_is_vllms() -> None:
    modules = {*SEAMS.names, *(methods.module for methods in SEAMS.methods)}
    assert all(importlib.import_module(module).__name__.startswith("vllm.") for module in modules)
