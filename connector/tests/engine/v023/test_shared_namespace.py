"""Both halves of the connector as vLLM builds them, over a real directory: which namespace their blocks go to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.kv_offload.base import ReqContext

from spillway_connector import metrics
from spillway_connector.engine.ipc.samples import sample_key
from spillway_connector.testing.models import write_tiny_llama

BLOCK_TOKENS, NUM_BLOCKS = 16, 6
SPEC = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=32, dtype=torch.float32)
SHAPE = (NUM_BLOCKS, 2, BLOCK_TOKENS, 2, 32)  # FlashAttention's


def namespace_of(root: Path, model: Path, cache: torch.Tensor, **settings: Any) -> tuple[str, dict[str, Any]]:
    """Start an engine's connector with caches like these on this directory; name and document of what it writes to."""
    with started(model, cache, {"type": "nvme", "path": str(root), "max_bytes": 1 << 26}, **settings) as manager:
        namespace = manager.secondary_tiers[0]._offloading_spec.namespace
        return namespace.hex, json.loads(namespace.document)


@contextmanager
def started(model: Path, cache: torch.Tensor, tier: dict[str, Any], **settings: Any) -> Iterator[Any]:
    """The manager of an engine's connector with caches like these and this shared tier."""
    config = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=BLOCK_TOKENS,
        max_model_len=256,
        prefix_caching_hash_algo="sha256_cbor",
        kv_transfer_config={
            "kv_connector": "SpillwayConnector",
            "kv_connector_module_path": "spillway_connector.engine.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "spec_name": "SpillwayOffloadingSpec",
                "spec_module_path": "spillway_connector.engine.spec",
                "num_cpu_blocks": 3,
                "secondary_tiers": [tier],
            },
        },
        **settings,
    ).create_engine_config()
    kv_config = KVCacheConfig(
        NUM_BLOCKS,
        [KVCacheTensor(size=SPEC.page_size_bytes * NUM_BLOCKS, shared_by=["layers.0"])],
        [KVCacheGroupSpec(["layers.0"], SPEC)],
    )
    worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, kv_config)
    worker.register_kv_caches({"layers.0": cache})
    scheduler: Any = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, kv_config)
    yield scheduler.connector_scheduler.manager
    scheduler.shutdown()
    worker.shutdown()


def in_memory(order: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros([SHAPE[dim] for dim in order]).permute([order.index(dim) for dim in range(len(SHAPE))])


def test_two_engines_share_exactly_when_their_caches_lie_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    model, tokens_first, heads_first = write_tiny_llama(tmp_path / "model"), (0, 1, 2, 3, 4), (0, 1, 3, 2, 4)
    name, document = namespace_of(tmp_path / "kv", model, in_memory(tokens_first))
    again, _ = namespace_of(tmp_path / "kv", model, in_memory(tokens_first), max_num_seqs=3)
    other, _ = namespace_of(tmp_path / "kv", model, in_memory(heads_first))
    assert name == again
    assert name != other
    (tensor,) = document["layout"][0]["layers"][0]["tensors"]
    assert tensor["shape"] == ["blocks", 2, BLOCK_TOKENS, 2, 32]
    assert document["weights"].startswith("weights:")


def test_a_tier_below_another_is_driven_by_the_same_manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    # No server answers there; the tier above serves nevertheless.
    below = {"type": "redis", "url": "redis://127.0.0.1:1/0", "idle_seconds": 1}
    tier = {"type": "nvme", "path": str(tmp_path / "kv"), "max_bytes": 1 << 26, "below": below}
    with started(write_tiny_llama(tmp_path / "model"), in_memory((0, 1, 2, 3, 4)), tier) as manager:
        assert manager.settings()["shared_tiers"] == "nvme>redis"
        (driven,) = manager.secondary_tiers
        assert driven.open and driven.lookup_prefix([b"key" * 12], ReqContext(req_id="r")).found
        manager.prefill_rate.add(1000.0, 1.0, 0.0)
        assert manager._gates[driven].pays(manager.prefill_rate)
        samples = manager.take_samples().samples()
        ready = {sample_key(metrics.TIER_READY, name) for name in ("nvme", "redis")}
        assert ready | {sample_key(metrics.TIER_DEMOTIONS, "redis", "forgotten")} <= samples.keys()
