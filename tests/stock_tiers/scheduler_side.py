"""The scheduler's side of one vLLM engine with vLLM's own tiering, without workers and without an engine.

Configuration, scheduler half, tiering spec, manager and tier factory are vLLM's, built as its engine builds them, so a
tier finds its surroundings as it does there. Rows of the CPU tier are written and read here in place of a worker.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

BLOCK_TOKENS, LAYERS, HEADS, HEAD_SIZE = 16, 2, 2, 32
DEVICE_BLOCKS = 32
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2 * HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_SIZE,
    "num_hidden_layers": LAYERS,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
    "rms_norm_eps": 1e-5,
}


def build_model(folder: Path, content: bytes = b"weights of this test") -> Path:
    """A model's folder: enough for vLLM's configuration and for the identity of its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_MODEL))
    (folder / "model.safetensors").write_bytes(content)
    return folder


def engine_config(model: Path, extra: Mapping[str, Any], **settings: Any) -> Any:
    """vLLM's own configuration of an engine whose connector has these extra settings."""
    config = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=512,
        block_size=BLOCK_TOKENS,
        enforce_eager=True,
        enable_prefix_caching=True,
        kv_transfer_config={
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", **extra},
        },
        **settings,
    ).create_engine_config()
    config.cache_config.kv_cache_layout = "LBHNC"  # what an engine's core resolves with its workers
    return config


def cache_config(device_blocks: int = DEVICE_BLOCKS, heads: int = HEADS) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=heads, head_size=HEAD_SIZE, dtype=torch.float32)
    names = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
    page = spec.page_size_bytes
    tensor = KVCacheTensor(
        size=page * LAYERS * device_blocks, layers=names, layer_stride=page * device_blocks, block_stride=page
    )
    return KVCacheConfig(
        num_blocks=device_blocks,
        kv_cache_tensors=[tensor],
        kv_cache_groups=[KVCacheGroupSpec(layer_names=names, kv_cache_spec=spec)],
        kv_cache_layout="LBHNC",
    )


def key(number: int) -> OffloadKey:
    return make_offload_key(number.to_bytes(32, "big"), 0)


def row_bytes_of(number: int, size: int) -> bytes:
    return torch.arange(size, dtype=torch.int64).mul_(number + 7).to(torch.uint8).numpy().tobytes()


@dataclass
class SchedulerSide:
    half: OffloadingConnectorScheduler
    _requests: dict[str, ReqContext] = field(default_factory=dict)

    @classmethod
    def open(
        cls, model: Path, tiers: Sequence[Mapping[str, Any]], rows: int = 8, caches: KVCacheConfig | None = None,
        extra: Mapping[str, Any] | None = None, **settings: Any,
    ) -> SchedulerSide:  # fmt: skip
        caches = caches or cache_config()
        page = caches.kv_cache_groups[0].kv_cache_spec.page_size_bytes
        row_bytes = -(-page * LAYERS // 4096) * 4096
        config = engine_config(
            model,
            {"cpu_bytes_to_use": rows * row_bytes, "secondary_tiers": [dict(tier) for tier in tiers], **(extra or {})},
            **settings,
        )
        spec = OffloadingSpecFactory.create_spec(build_offloading_config(config, caches))
        return cls(OffloadingConnectorScheduler(spec, config, caches))

    @property
    def manager(self) -> Any:
        return self.half.manager

    @property
    def tiers(self) -> list[Any]:
        return self.manager.secondary_tiers

    @property
    def rows(self) -> memoryview:
        view: memoryview = self.manager.primary_tier.get_kv_memoryview()
        return view

    @property
    def row_bytes(self) -> int:
        assert self.rows.strides is not None
        return self.rows.strides[0]

    def request(self, name: str, cache_salt: str | None = None) -> ReqContext:
        """A request that the scheduler half follows, as if it had been added."""
        context = ReqContext(req_id=name)
        self.manager.on_new_request(context)
        followed: Any = SimpleNamespace(req=SimpleNamespace(cache_salt=cache_salt))
        self.half._req_status[name] = followed
        self._requests[name] = context
        return context

    def finish(self, name: str) -> None:
        self.manager.on_request_finished(self._requests.pop(name))
        del self.half._req_status[name]

    def step(self) -> None:
        """The end of a scheduler step."""
        self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=[], preempted_req_ids=[]))

    def store(self, name: str, numbers: Iterable[int], cache_salt: str | None = None) -> None:
        """Store chunks like a request that computed them: rows are prepared, filled and completed."""
        context = self.request(name, cache_salt)
        keys = [key(number) for number in numbers]
        prepared = self.manager.prepare_store(keys, context)
        assert prepared is not None, "the CPU tier has no row that is not in use"
        flat = self.rows.cast("B")
        for stored, row in zip(prepared.keys_to_store, prepared.store_spec.chunk_ids.tolist(), strict=True):
            number = int.from_bytes(stored[:32], "big")
            flat[row * self.row_bytes : (row + 1) * self.row_bytes] = row_bytes_of(number, self.row_bytes)
        flat.release()
        self.manager.complete_store(prepared.keys_to_store, context, True)
        self.finish(name)

    def row_of(self, number: int, context: ReqContext) -> bytes:
        """The bytes that a load of this chunk would copy to the device. Only for a chunk that is a hit."""
        spec = self.manager.prepare_load([key(number)], context)
        (row,) = spec.chunk_ids.tolist()
        found = bytes(self.rows.cast("B")[row * self.row_bytes : (row + 1) * self.row_bytes])
        self.manager.complete_load([key(number)], context)
        return found

    def in_cpu_tier(self, number: int) -> bool:
        context = ReqContext(req_id="peek")
        return self.manager.primary_tier.lookup(key(number), context) is LookupResult.HIT

    def close(self) -> None:
        self.half.shutdown()
