"""Multi-head latent attention in plain PyTorch, so that vLLM's CPU engine can run DeepSeek's latent KV cache.

vLLM's CPU platform refuses such models ("MLA is not supported on CPU."). The layer, the cache (one tensor of
(num_blocks, block, latent + rope) a layer), the scheduler and everything the connector meets stay vLLM's own; only the
kernels are replaced: queries are absorbed into the latent space and attend to the cache as one key-value head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.attention import mla_attention
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata, SparseMLAAttentionImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import AttentionSpec


@dataclass
class TorchMlaMetadata:
    num_actual_tokens: int
    query_starts: list[int]
    lengths: list[int]  # of each request, this step's tokens included
    block_table: torch.Tensor


class TorchMlaBuilder(AttentionMetadataBuilder[TorchMlaMetadata]):
    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> TorchMlaMetadata:
        common = common_attn_metadata
        return TorchMlaMetadata(
            common.num_actual_tokens,
            common.query_start_loc[: common.num_reqs + 1].tolist(),
            common.seq_lens[: common.num_reqs].tolist(),
            common.block_table_tensor,
        )


class TorchMlaImpl(SparseMLAAttentionImpl[TorchMlaMetadata]):
    """ "Sparse" only in that vLLM then sends every token, prefill or decode, to `forward_mqa`."""

    def __init__(self, num_heads: int, head_size: int, scale: float, *args: Any, kv_lora_rank: int, **kwargs: Any):
        self.num_heads, self.head_size, self.scale, self.kv_lora_rank = num_heads, head_size, scale, kv_lora_rank
        self.supports_quant_query_input = False

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        if not kv_cache.numel() or slot_mapping is None:
            return
        slots = slot_mapping.flatten()
        count, used = len(slots), slots >= 0
        tokens = torch.cat((kv_c_normed[:count], k_pe[:count].reshape(count, -1)), dim=-1)
        kv_cache.view(-1, self.head_size)[slots[used]] = tokens[used]

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: TorchMlaMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, None]:
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q  # (tokens, heads, latent + rope)
        answer = query.new_empty(query.shape[0], self.num_heads, self.kv_lora_rank)
        starts = attn_metadata.query_starts
        block_tokens = kv_c_and_k_pe_cache.shape[1]
        for request, length in enumerate(attn_metadata.lengths):
            here = query[starts[request] : starts[request + 1]]
            blocks = attn_metadata.block_table[request, : -(-length // block_tokens)].long()
            keys = kv_c_and_k_pe_cache[blocks].reshape(-1, self.head_size)[:length]
            scores = torch.einsum("thd,kd->htk", here, keys) * self.scale
            first = length - here.shape[0]
            ahead = torch.arange(length)[None, :] > torch.arange(first, length)[:, None]
            weights = scores.masked_fill(ahead, float("-inf")).softmax(dim=-1)
            mixed = torch.einsum("htk,kd->thd", weights, keys[:, : self.kv_lora_rank])
            answer[starts[request] : starts[request + 1]] = mixed
        return answer, None


class TorchMlaBackend(mla_attention.MLACommonBackend):
    accept_output_buffer: ClassVar[bool] = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TorchMlaImpl]:
        return TorchMlaImpl

    @staticmethod
    def get_builder_cls() -> type[TorchMlaBuilder]:
        return TorchMlaBuilder


class _NoPrefillKernels:
    """Every token goes to `forward_mqa`."""

    def __init__(self, **kwargs: Any) -> None:
        pass


def install() -> None:
    """Install the backend for every engine of this process from now on."""
    path = f"{TorchMlaBackend.__module__}.{TorchMlaBackend.__qualname__}"
    register_backend(AttentionBackendEnum.CUSTOM, path)
    stock = CpuPlatform.get_attn_backend_cls.__func__

    def choose(cls: type, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None) -> str:
        return path if attn_selector_config.use_mla else stock(cls, selected_backend, attn_selector_config, num_heads)

    def prefill_backend(vllm_config: VllmConfig) -> type[_NoPrefillKernels]:
        return _NoPrefillKernels

    pack = utils.dispatch_cpu_unquantized_gemm

    def pack_and_keep(layer: torch.nn.Module, remove_weight: bool) -> None:
        """vLLM packs weights for the CPU and drops them; latent attention needs those of one projection once more."""
        pack(layer, remove_weight=False)

    utils.dispatch_cpu_unquantized_gemm = pack_and_keep
    CpuPlatform.get_attn_backend_cls = classmethod(choose)
    mla_attention.get_mla_prefill_backend = prefill_backend
