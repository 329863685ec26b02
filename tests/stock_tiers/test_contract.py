"""vLLM's contract of a secondary tier, read from its sources: in this environment, and in the folders that
SPILLWAY_VLLM_SOURCES names (unpacked wheels, separated by ":"), whose engines need not run here.

A later vLLM that changes what the tiers rely on fails a test of its name here.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
from pathlib import Path
from typing import Any

import pytest

from spillway_connector.engine.stock.tiers import SpillwayNvmeTier, SpillwayRedisTier, StockTier

KV_OFFLOAD = "v1/kv_offload"
SCHEDULER = "distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py"


def sources() -> list[Path]:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    more = [Path(folder) for folder in os.environ.get("SPILLWAY_VLLM_SOURCES", "").split(":") if folder]
    return [Path(spec.origin).parent, *(folder / "vllm" for folder in more)]


@pytest.fixture(params=sources(), ids=lambda folder: folder.parent.name)
def source(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.param
    return folder


def class_of(source: Path, module: str, name: str) -> ast.ClassDef:
    tree = ast.parse((source / module).read_text())
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    return found


def methods_of(cls: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in cls.body if isinstance(node, ast.FunctionDef)}


def parameters_of(method: ast.FunctionDef) -> list[str]:
    arguments = method.args
    assert arguments.vararg is None and arguments.kwarg is None
    return [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def fields_of(cls: ast.ClassDef) -> list[str]:
    return [
        node.target.id for node in cls.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]


@pytest.mark.parametrize("tier", [SpillwayNvmeTier, SpillwayRedisTier])
def test_every_method_takes_what_vllm_passes(source: Path, tier: type[StockTier]) -> None:
    methods = methods_of(class_of(source, f"{KV_OFFLOAD}/tiering/base.py", "SecondaryTierManager"))
    for name, method in methods.items():
        if name.startswith("_") or any(
            isinstance(mark, ast.Name) and mark.id == "property" for mark in method.decorator_list
        ):
            continue
        own: Any = inspect.getattr_static(tier, name, None)
        if own is None:
            assert not abstract(method), f"{name} is new, and every tier has to have it"
            continue
        function = own.__func__ if isinstance(own, classmethod) else own
        assert list(inspect.signature(function).parameters) == parameters_of(method), name


def abstract(method: ast.FunctionDef) -> bool:
    return any(isinstance(mark, ast.Name) and mark.id == "abstractmethod" for mark in method.decorator_list)


def test_the_constructor_takes_what_vllms_does(source: Path) -> None:
    theirs = methods_of(class_of(source, f"{KV_OFFLOAD}/tiering/base.py", "SecondaryTierManager"))["__init__"]
    ours = list(inspect.signature(StockTier.__init__).parameters)
    assert parameters_of(theirs) == ours[: len(parameters_of(theirs))]


def test_the_values_that_are_exchanged(source: Path) -> None:
    base = f"{KV_OFFLOAD}/tiering/base.py"
    assert {"job_id", "keys", "chunk_ids", "req_context"} <= set(fields_of(class_of(source, base, "TransferJob")))
    result = fields_of(class_of(source, base, "JobResult"))
    assert {"job_id", "success", "successful_keys", "transfer_time"} <= set(result)
    answers = class_of(source, f"{KV_OFFLOAD}/base.py", "LookupResult")
    names = [node.targets[0].id for node in answers.body if isinstance(node, ast.Assign)]  # type: ignore[attr-defined]
    assert {"HIT", "MISS", "RETRY"} <= set(names)


def test_what_the_namespace_is_read_from(source: Path) -> None:
    config = class_of(source, f"{KV_OFFLOAD}/config.py", "OffloadingConfig")
    known = {
        "groups",
        "worker_kv_bytes_per_block",
        "enable_kv_cache_events",
        "extra_config",
        "engine_id",
        "model",
        "cache",
        "parallel",
        "replicated_layout",
        "canonical_layout",
        "kv_cache_layout",
        "max_model_len",
    }
    assert set(fields_of(config)) <= known, "a new field may decide what bytes mean: see engine/stock/namespace.py"


def test_where_the_engine_is_found(source: Path) -> None:
    """The calls that lead to a tier hold the engine's configuration, and the scheduler half its requests."""
    half = methods_of(class_of(source, SCHEDULER, "OffloadingConnectorScheduler"))
    assert parameters_of(half["__init__"]) == ["self", "spec", "vllm_config", "kv_cache_config"]
    body = ast.unparse(half["__init__"])
    assert "spec.get_manager()" in body and "self._req_status" in body
    assert "req: Request" in ast.unparse(class_of(source, SCHEDULER, "RequestOffloadState"))
    offloading = ast.parse((source / SCHEDULER).with_name("config.py").read_text())
    assert "extra_config = kv_transfer_config.kv_connector_extra_config" in ast.unparse(offloading)


def test_the_factory_passes_the_entrys_other_keys(source: Path) -> None:
    factory = methods_of(class_of(source, f"{KV_OFFLOAD}/tiering/factory.py", "SecondaryTierFactory"))
    assert parameters_of(factory["register_tier"]) == ["cls", "tier_type", "module_path", "class_name"]
    created = ast.unparse(factory["create_secondary_tier"])
    for passed in ("offloading_spec=", "primary_kv_view=", "tier_type=", "**config", "config.pop('module_path', None)"):
        assert passed in created


def test_the_rows_that_a_tier_is_given_are_one_file(source: Path) -> None:
    """vLLM 0.33 splits the region of its spec without tiers into segments; beneath tiers it does not, and a tier asks
    for one run of bytes anyway."""
    tree = ast.parse((source / KV_OFFLOAD / "tiering" / "spec.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    regions = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "SharedOffloadRegion"]
    assert regions and all("num_segments" not in {given.arg for given in call.keywords} for call in regions)
