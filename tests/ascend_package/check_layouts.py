"""KV caches as vllm-ascend's model runner itself allocates and shapes them, on the CPU: what the connector takes for a
block is that block in every view, and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
)
from vllm.v1.kv_offload import base as offload
from vllm_ascend.attention.attention_v1 import AscendAttentionBackend
from vllm_ascend.attention.mla_v1 import AscendMLABackend
from vllm_ascend.core.kv_cache_interface import AscendMLAAttentionSpec
from vllm_ascend.worker import model_runner_v1

from spillway_connector.engine.v023.ascend import canonical_kv_caches, has_ascend_layout
from spillway_connector.errors import ConfigError

BLOCKS = 5
TOKENS = 128
BF16 = torch.bfloat16


@dataclass
class Model:
    """groups: layer names and spec of each. shared: layers of one allocation; None: each layer has its own."""

    groups: Sequence[tuple[Sequence[str], KVCacheSpec]]
    backend: Any = AscendAttentionBackend
    shared: Sequence[Sequence[str]] | None = None
    runner: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> KVCacheConfig:
        page = {layer: spec.page_size_bytes for layers, spec in self.groups for layer in layers}
        shared = self.shared or [[layer] for layer in page]
        return KVCacheConfig(
            num_blocks=BLOCKS,
            kv_cache_tensors=[KVCacheTensor(size=page[one[0]] * BLOCKS, shared_by=list(one)) for one in shared],
            kv_cache_groups=[KVCacheGroupSpec(list(layers), spec) for layers, spec in self.groups],
        )


def attention(tokens: int = TOKENS) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=tokens, num_kv_heads=2, head_size=64, dtype=BF16)


def latent(**fields: Any) -> AscendMLAAttentionSpec:
    return AscendMLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=512 + 64, dtype=BF16, **fields)


def sparse(**fields: Any) -> AscendMLAAttentionSpec:
    given = {"sparse_head_dim": (512, 64, 128), "head_size": 512 + 64 + 128, **fields}
    return AscendMLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, dtype=BF16, **given)


def hybrid() -> Model:
    """A model like Qwen3-Next: the page of the attention is padded to hold the states of a linear layer too."""
    full = FullAttentionSpec(block_size=1024, num_kv_heads=2, head_size=64, dtype=BF16)
    states = MambaSpec(
        block_size=1024,
        shapes=((3, 512), (8, 64, 128)),
        dtypes=(BF16, BF16),
        page_size_padded=full.page_size_bytes,
    )
    conv = 3 * 512 * 2
    full = FullAttentionSpec(
        block_size=1024, num_kv_heads=2, head_size=64, dtype=BF16, page_size_padded=full.page_size_bytes + conv
    )
    states = MambaSpec(
        block_size=1024, shapes=states.shapes, dtypes=states.dtypes, page_size_padded=full.page_size_bytes
    )
    layers = [f"model.layers.{number}.self_attn.attn" for number in range(2)]
    linear = [f"model.layers.{number}.linear_attn" for number in range(2, 4)]
    pairs = [list(pair) for pair in zip(layers, linear, strict=True)]
    return Model([(layers, full), (linear, states)], shared=pairs, runner={"use_hybrid_blocks": True})


LAYERS = [f"model.layers.{number}.self_attn.attn" for number in range(3)]
MODELS = {
    "keys and values": Model([(LAYERS, attention())]),
    "blocks of two kernel blocks": Model([(LAYERS, attention(2 * TOKENS))], runner={"use_hybrid_blocks": True}),
    "latents": Model([(LAYERS, latent())], AscendMLABackend),
    "latents with an indexer": Model([(LAYERS, sparse())], AscendMLABackend, runner={"use_sparse": True}),
    "latents with an indexer in 8 bits": Model(
        [(LAYERS, sparse(cache_sparse_li_c8=True))], AscendMLABackend, runner={"use_sparse": True}
    ),
    "packed latents with an indexer": Model(
        [(LAYERS, sparse(cache_sparse_sfa_c8=True, sparse_head_dim=(656, 0, 128)))],
        AscendMLABackend,
        runner={"use_sparse": True},
    ),
    "attention beside linear layers": hybrid(),
}


@pytest.fixture
def caches_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    latents = object.__new__(model_runner_v1.MLAAttention)
    torch.nn.Module.__init__(latents)
    latents.kv_lora_rank, latents.qk_rope_head_dim = 512, 64
    monkeypatch.setattr(
        model_runner_v1, "get_layers_from_vllm_config", lambda config, kind, names: dict.fromkeys(names, latents)
    )

    def make(model: Model) -> dict[str, Any]:
        runner = object.__new__(model_runner_v1.NPUModelRunner)
        dtypes = next(spec for _, spec in model.groups)
        runner.__dict__.update(
            device=torch.device("cpu"),
            vllm_config=SimpleNamespace(kv_transfer_config=SimpleNamespace(is_kv_consumer=False), quant_config=None),
            model_config=SimpleNamespace(hf_text_config=SimpleNamespace(index_head_dim=128, model_type="tried")),
            runner_only_attn_layers=set(),
            use_sparse=False,
            use_compress=False,
            use_hybrid_blocks=False,
            c8_k_cache_dtype=getattr(dtypes, "c8_k_cache_dtype", None),
            c8_k_scale_cache_dtype=getattr(dtypes, "c8_k_scale_cache_dtype", None),
        )
        runner.__dict__.update(model.runner)
        groups = [
            SimpleNamespace(backend=model.backend, kv_cache_spec=spec, layer_names=list(layers))
            for layers, spec in model.groups
        ]
        runner._kv_cache_spec_attn_group_iterator = lambda: iter(groups)
        config = model.config
        return runner._reshape_kv_cache_tensors(config, runner._allocate_kv_cache_tensors(config))

    return make


def views_of(cache: Any) -> list[torch.Tensor]:
    return [cache] if isinstance(cache, torch.Tensor) else list(cache)


def block_of(view: torch.Tensor, block: int) -> torch.Tensor:
    """The entries of the first dimension that are one managed block."""
    factor = view.shape[0] // BLOCKS
    return view[block * factor : (block + 1) * factor]


def raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.int8).numpy()


@pytest.mark.parametrize("name", MODELS)
def test_a_block_is_exactly_its_bytes_in_every_view(name: str, caches_of: Any) -> None:
    model = MODELS[name]
    caches = caches_of(model)
    assert has_ascend_layout(caches)
    placed = canonical_kv_caches(caches, model.config)

    for group, (layers, _) in enumerate(model.groups):
        views = [view for layer in layers for view in views_of(caches[layer])]
        for block in range(BLOCKS):
            for view in views:
                view.zero_()
            for ref in placed.group_data_refs[group]:
                placed.tensors[ref.tensor_idx].tensor[block, : ref.page_size_bytes] = 0x5A
            for view in views:
                for other in range(BLOCKS):
                    assert (raw(block_of(view, other)) == (0x5A if other == block else 0)).all()


def test_a_row_holds_every_part_of_a_block_once(caches_of: Any) -> None:
    """The bytes of a row that a part takes follow from the specs; parts of one group never overlap."""
    for model in MODELS.values():
        placed = canonical_kv_caches(caches_of(model), model.config)
        for refs in placed.group_data_refs:
            spans = sorted((placed.row_offsets[ref.tensor_idx], ref.page_size_bytes) for ref in refs)
            assert all(start + size <= after for (start, size), (after, _) in pairwise(spans))


def test_an_indexer_that_ranks_replicate_is_refused(caches_of: Any) -> None:
    """One block of the indexer is several entries of the first dimension; one block of the latents is one entry."""
    model = Model([(LAYERS, sparse(sfa_dcp_replicated_indexer_size=2))], AscendMLABackend, runner={"use_sparse": True})
    caches = caches_of(model)
    assert len({view.shape[0] for view in caches[LAYERS[0]]}) == 2

    with pytest.raises(ConfigError, match="turn offload off for this model"):
        canonical_kv_caches(caches, model.config)


@pytest.fixture
def their_handler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """vllm-ascend's own copy handler, whose imports vLLM 0.23 has in another module."""
    names = ModuleType("vllm.v1.kv_offload.mediums")
    names.CPULoadStoreSpec = offload_specs().CPULoadStoreSpec
    names.GPULoadStoreSpec = offload.GPULoadStoreSpec
    monkeypatch.setattr("vllm.utils.platform_utils.is_pin_memory_available", lambda: False)
    monkeypatch.setitem(sys.modules, names.__name__, names)
    from vllm_ascend.kv_offload.cpu_npu import CpuNpuOffloadingHandler

    yield CpuNpuOffloadingHandler
    sys.modules.pop("vllm_ascend.kv_offload.cpu_npu", None)


def offload_specs() -> Any:
    from vllm.v1.kv_offload.cpu import common

    return common


def test_a_store_reads_what_their_own_handler_reads(
    caches_of: Any, their_handler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MODELS["keys and values"]
    caches = caches_of(model)
    asked: list[tuple[torch.Tensor, ...]] = []
    monkeypatch.setattr(
        torch.ops, "_C_ascend", SimpleNamespace(swap_blocks_batch=lambda *arguments: asked.append(arguments))
    )
    handler = their_handler(TOKENS, TOKENS, 8, caches, {})
    blocks = np.array([1, 4], dtype=np.int64)

    assert handler.transfer_async(
        1, (offload.GPULoadStoreSpec(blocks, [2], [0]), offload_specs().CPULoadStoreSpec(np.array([0, 1])))
    )

    [(sources, _, sizes, direction)] = asked
    assert direction == 1
    placed = canonical_kv_caches(caches, model.config)
    ours = set()
    for ref in placed.group_data_refs[0]:
        tensor = placed.tensors[ref.tensor_idx].tensor
        ours |= {(tensor[block].data_ptr(), ref.page_size_bytes) for block in blocks.tolist()}
    assert set(zip(sources.tolist(), sizes.tolist(), strict=True)) == ours
