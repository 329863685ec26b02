"""Engines with vLLM's own worker that share blocks, and those that are refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from spillway_connector.engine.namespace.fields import namespace_facts
from spillway_connector.engine.stock import namespace
from spillway_connector.engine.stock.engine_objects import EngineObjects, engine_objects
from spillway_connector.engine.stock.namespace import row_facts, stock_namespace
from spillway_connector.engine.stock.tiers import SpillwayNvmeTier
from spillway_connector.errors import ConfigError
from spillway_connector.namespace import explain_difference
from spillway_connector.plan.geometry import ChunkGeometry
from stock_tiers.scheduler_side import HEADS, LAYERS, build_model, cache_config, engine_config

EXTRA = {"cpu_bytes_to_use": 1 << 20}
TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


class Parts:
    """vLLM's objects of one engine."""

    def __init__(
        self,
        model: Path,
        extra: Mapping[str, Any] = EXTRA,
        device_blocks: int = 32,
        heads: int = HEADS,
        **settings: Any,
    ) -> None:
        self.vllm_config = engine_config(model, extra, **settings)
        self.caches = cache_config(device_blocks, heads)
        self.offloading = build_offloading_config(self.vllm_config, self.caches)

    def document(self, **changed: Any) -> bytes:
        spec = OffloadingSpecFactory.create_spec(dataclasses.replace(self.offloading, **changed))
        engine = EngineObjects(self.vllm_config, self.caches, None)
        return stock_namespace(spec, engine, spec.kv_bytes_per_chunk).document


@pytest.fixture(scope="module")
def parts(model: Path) -> Parts:
    return Parts(model)


def test_capacities_and_names_of_engines_are_not_in_it(model: Path, parts: Parts) -> None:
    other = Parts(model, EXTRA | {"cpu_bytes_to_use": 1 << 21}, device_blocks=99, max_num_seqs=3, seed=0)
    assert other.offloading.engine_id != parts.offloading.engine_id
    assert other.document() == parts.document(), explain_difference(parts.document(), other.document())


@pytest.mark.parametrize(
    "changed",
    [
        {"kv_cache_layout": "BLHNC"},
        {"canonical_layout": True},
        {"replicated_layout": True},
        {"worker_kv_bytes_per_block": 8192},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_how_rows_are_filled_is_in_it(parts: Parts, changed: dict[str, Any]) -> None:
    assert parts.document(**changed) != parts.document()


def test_canonical_rows_are_those_of_any_number_of_ranks(model: Path) -> None:
    """One rank with two heads and two with a head each: vLLM writes their rows alike then, and only then."""
    for canonical in (True, False):
        extra = EXTRA | ({"canonical_layout": True} if canonical else {})
        one, two = Parts(model, extra), Parts(model, extra, heads=HEADS // 2, **TWO_RANKS)
        assert two.offloading.canonical_layout == canonical
        assert (one.document() == two.document()) == canonical, explain_difference(one.document(), two.document())


def test_ranks_that_hold_the_same_heads_have_rows_of_their_own_size(model: Path) -> None:
    """Two each of four ranks hold the same head, and vLLM's row keeps room for all four."""
    extra = EXTRA | {"canonical_layout": True}
    four = Parts(model, extra, heads=1, **TWO_RANKS | {"tensor_parallel_size": 4})
    assert four.offloading.parallel.is_parallelism_agnostic
    assert four.document() not in (Parts(model, extra).document(), Parts(model, extra, heads=1, **TWO_RANKS).document())


@pytest.mark.parametrize("part", ["model", "cache", "parallel"])
def test_the_parts_of_vllms_offloading_configuration_are_in_it(parts: Parts, part: str) -> None:
    altered = {"model": {"dtype": "float16"}, "cache": {"blocks_per_chunk": 2}, "parallel": {"world_size": 2}}
    changed = dataclasses.replace(getattr(parts.offloading, part), **altered[part])
    assert parts.document(**{part: changed}) != parts.document()


def test_weights_versions_and_kernels_are_in_it(
    parts: Parts, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = {
        parts.document(),
        Parts(build_model(tmp_path / "other", b"other weights")).document(),
        Parts(model, EXTRA | {"weights_version": "2026-11"}).document(),
    }
    monkeypatch.setattr(namespace, "kernel_versions", lambda: {"flashinfer-python": "9"})
    assert len(documents | {parts.document()}) == 4


def test_the_spec_that_fills_the_rows_is_in_it(parts: Parts) -> None:
    assert b"vllm.v1.kv_offload.tiering.spec.TieringOffloadingSpec" in parts.document()


def test_no_engine_with_spillways_connector_has_it(parts: Parts) -> None:
    """Spillway's worker writes what it registered into the same field, and never who fills a row of vLLM's."""
    spec = OffloadingSpecFactory.create_spec(parts.offloading)
    assert "filled_by" in row_facts(spec, 4096)
    page = parts.offloading.worker_kv_bytes_per_block
    facts = namespace_facts(
        parts.vllm_config,
        parts.caches,
        ChunkGeometry(page, 1, 1),
        hash_block_size=parts.offloading.cache.tokens_per_hash,
        layouts=[{"layers": ["as registered"] * LAYERS}],
    )
    ours = json.loads(parts.document())
    assert {name for name in facts if facts[name] != ours[name]} == {"layout"}


def test_an_unknown_layout_is_refused(parts: Parts) -> None:
    with pytest.raises(ConfigError, match="kv_cache_layout"):
        parts.document(kv_cache_layout=None)


def test_chunks_of_several_blocks_are_refused_if_blocks_of_one_can_be_lost(model: Path) -> None:
    parts = Parts(model)
    several = dataclasses.replace(parts.offloading.cache, blocks_per_chunk=2)
    assert parts.document(cache=several)
    (group,) = parts.caches.kv_cache_groups
    full = group.kv_cache_spec
    group.kv_cache_spec = SlidingWindowSpec(
        block_size=full.block_size, num_kv_heads=HEADS, head_size=full.head_size, dtype=full.dtype, sliding_window=64
    )
    assert parts.document()
    with pytest.raises(ConfigError, match="blocks_per_chunk: of a chunk that has lost blocks"):
        parts.document(cache=several)


def test_keys_that_are_not_reproducible_are_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="prefix_caching_hash_algo: 'xxhash'"):
        Parts(model, prefix_caching_hash_algo="xxhash").document()


def test_adapters_need_a_version_of_the_weights(model: Path) -> None:
    with pytest.raises(ConfigError, match="weights_version"):
        Parts(model, enable_lora=True).document()
    named = Parts(model, EXTRA | {"weights_version": "1"}, enable_lora=True)
    with pytest.raises(ConfigError, match="enable_lora on a CPU"):  # which computes the base model's own wrongly
        named.document()
    named.vllm_config.device_config.device_type = "npu"
    assert named.document()
    with pytest.raises(ConfigError, match="weights_version: 1 is not a text"):
        Parts(model, EXTRA | {"weights_version": 1}).document()


def test_the_engine_is_found_in_the_calls_that_build_the_tier(parts: Parts) -> None:
    spec = OffloadingSpecFactory.create_spec(parts.offloading)

    def constructor(vllm_config: Any, kv_cache_config: Any) -> EngineObjects:
        return engine_objects(spec)

    found = constructor(parts.vllm_config, parts.caches)
    assert found.vllm_config is parts.vllm_config and found.kv_cache_config is parts.caches
    assert found.salt_of("any") is None


def test_another_engine_of_the_same_process_is_not_taken_for_it(model: Path, parts: Parts) -> None:
    spec = OffloadingSpecFactory.create_spec(parts.offloading)

    def constructor(call: Callable[[], Any], vllm_config: Any, kv_cache_config: Any) -> Any:
        return call()

    with pytest.raises(ConfigError, match="not within reach"):
        constructor(lambda: engine_objects(spec), Parts(model).vllm_config, cache_config())


def test_a_tier_that_nothing_connects_with_an_engine_is_refused(tmp_path: Path) -> None:
    spec: Any = SimpleNamespace(extra_config={})
    rows = memoryview(bytearray(4 * 4096)).cast("B", [4, 4096])
    with pytest.raises(ConfigError, match="not within reach"):
        SpillwayNvmeTier(spec, rows, "spillway-nvme", path=str(tmp_path))
