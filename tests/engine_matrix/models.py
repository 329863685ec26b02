"""The models of the matrix: tiny, of the real architecture, with random weights large enough for attention to matter.

Each is built by transformers from a configuration alone and saved as a few megabytes of safetensors, always the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

VOCABULARY = 512
BLOCK_TOKENS = 32
_MAX_BLOCKS = 16  # of a prompt and its answer
_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_GEMMA3 = _SIZES | {
    "num_hidden_layers": 6,
    "sliding_window": 96,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "query_pre_attn_scalar": 32,
}
# Without the sizes of heads and latents, which the kernels of a GPU do not leave free.
_DEEPSEEK = _SIZES | {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "first_k_dense_replace": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
}
_CPU_LATENTS = {  # the width of DeepSeek's own: the CPU kernels of vLLM 0.32 know no other
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "head_dim": 64,
}
_QWEN3_NEXT = _SIZES | {
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "mlp_only_layers": [0, 1, 2],  # vLLM wants one layer with experts
}
_QWEN3_EXPERTS = _SIZES | {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
_FALCON_H1 = _SIZES | {
    "mamba_d_ssm": 128,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
}
_LFM2 = _SIZES | {
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "block_auto_adjust_ff_dim": False,
    "conv_dim": 128,
    "block_dim": 128,
    "block_ff_dim": 256,
    "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0,
}


@dataclass(frozen=True, slots=True)
class Model:
    """One row: which configuration, and what the engine needs besides."""

    name: str
    layout: str  # what its KV cache is like, for the table
    model_type: str  # transformers' name
    settings: dict[str, Any]
    max_length: int = _MAX_BLOCKS * BLOCK_TOKENS  # tokens
    device_blocks: int = 20  # a prompt and a half: asking for another prompt evicts
    cpu_blocks: int = 64
    small_cpu_blocks: int = 30  # fewer than two prompts need, so that a third comes from the files
    engine: dict[str, Any] = field(default_factory=dict)
    more_cases: tuple[str, ...] = ()
    leaves_out: tuple[str, ...] = ()
    refuses: str | None = None  # vLLM's error where it cannot run this model on a CPU at all
    torch_mla: bool = False  # install engine_matrix.torch_mla first where vLLM's CPU platform has no MLA kernels
    cpu_experts: bool = False  # install engine_matrix.cpu_experts first: vLLM's CPU platform lacks a part of them
    platform: str = "cpu"  # or "cuda"
    other_size: str | None = None  # the row of the same model with another number of ranks, for the case `nvme-other`


CPU_MODELS = (
    Model("llama", "grouped-query attention, one KV group", "llama", _SIZES),
    Model("qwen3", "grouped-query attention with query and key norms", "qwen3", _SIZES),
    Model(
        "qwen3-moe",
        "as qwen3, with two of four experts in every layer",
        "qwen3_moe",
        _QWEN3_EXPERTS,
        cpu_experts=True,
    ),
    Model(
        "mistral-window",
        "sliding window in every layer, one KV group",
        "mistral",
        _SIZES | {"sliding_window": 96},
        leaves_out=("nvme",),  # the last three blocks of a prompt are all it needs, and the CPU tier keeps those
    ),
    Model(
        "gemma3-window",
        "sliding window (96 tokens) and full attention, several KV groups",
        "gemma3_text",
        _GEMMA3,
        device_blocks=56,
        cpu_blocks=200,  # a block of each group takes a row: 36 rows a prompt
        small_cpu_blocks=80,
        more_cases=("npu", "npu-off"),
    ),
    Model(
        "deepseek-v2",
        "multi-head latent attention, one latent of 576 numbers a token and layer",
        "deepseek_v2",
        _DEEPSEEK | _CPU_LATENTS,
        more_cases=("npu", "npu-off"),
        torch_mla=True,
        other_size="deepseek-v2-two-ranks",
    ),
    Model(
        "deepseek-v2-two-ranks",
        "multi-head latent attention, the same latents on two ranks, stored once",
        "deepseek_v2",
        _DEEPSEEK | _CPU_LATENTS,
        engine={"tensor_parallel_size": 2},
        more_cases=("device",),
        torch_mla=True,
        other_size="deepseek-v2",
    ),
    Model(
        "qwen3-next",
        "gated delta net states beside full attention, two kinds of KV group",
        "qwen3_next",
        _QWEN3_NEXT,
        engine={"dtype": "bfloat16"},  # "CPU GDN attention requires BF16."
        refuses="Input tensor dtype mismatch",
    ),
    Model(
        "falcon-h1",
        "Mamba-2 states beside grouped-query attention",
        "falcon_h1",
        _FALCON_H1,
        refuses="module 'triton' has no attribute 'next_power_of_2'",  # its Mamba kernels are Triton's
    ),
    Model(
        "lfm2",
        "short convolutions beside grouped-query attention",
        "lfm2",
        _LFM2,
        refuses="module 'triton' has no attribute 'next_power_of_2'",
    ),
    Model(
        "llama-fp8",
        "grouped-query attention, KV cache in fp8",
        "llama",
        _SIZES,
        engine={"kv_cache_dtype": "fp8"},
    ),
    Model(
        "llama-tp2",
        "grouped-query attention, two ranks",
        "llama",
        _SIZES,
        engine={"tensor_parallel_size": 2},
    ),
    Model(
        "llama-pp2",
        "grouped-query attention, two pipeline stages of three layers and of two",
        "llama",
        _SIZES | {"num_hidden_layers": 5},
        engine={"pipeline_parallel_size": 2},
    ),
)


_GPU_HEADS = {"head_dim": 64, "hidden_size": 256}
_GPU_LATENTS = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 64,
}
_STATES = {"device_blocks": 40, "cpu_blocks": 128, "small_cpu_blocks": 28}

# On a GPU nothing is replaced: vLLM's own kernels, its default back end for each, bfloat16.
CUDA_MODELS = tuple(
    replace(row, name=f"cuda-{row.name}", platform="cuda")
    for row in (
        Model("llama", "grouped-query attention, one KV group", "llama", _SIZES | _GPU_HEADS),
        Model(
            "llama-compiled",
            "the same, compiled and in CUDA graphs: vLLM's default",
            "llama",
            _SIZES | _GPU_HEADS,
            engine={"enforce_eager": False, "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8]}},
        ),
        Model(
            "llama-fp8",
            "grouped-query attention, KV cache in fp8",
            "llama",
            _SIZES | _GPU_HEADS,
            engine={"kv_cache_dtype": "fp8"},
        ),
        Model(
            "llama-tp2",
            "grouped-query attention, two ranks",
            "llama",
            _SIZES | _GPU_HEADS,
            engine={"tensor_parallel_size": 2},
        ),
        Model("qwen3", "grouped-query attention with query and key norms", "qwen3", _SIZES | _GPU_HEADS),
        Model(
            "gemma3-window",
            "sliding window (96 tokens) and full attention, several KV groups",
            "gemma3_text",
            _GEMMA3 | _GPU_HEADS | {"query_pre_attn_scalar": 64},
            device_blocks=56,
            cpu_blocks=200,
            small_cpu_blocks=80,
        ),
        Model(
            "deepseek-v2",
            "multi-head latent attention, one latent of 576 numbers a token and layer",
            "deepseek_v2",
            _DEEPSEEK | _GPU_LATENTS,
            max_length=_MAX_BLOCKS * 64,
            engine={"block_size": 64},
        ),
        Model(
            "deepseek-v2-tp2",
            "multi-head latent attention, the same latents on two ranks",
            "deepseek_v2",
            _DEEPSEEK | _GPU_LATENTS,
            max_length=_MAX_BLOCKS * 64,
            engine={"block_size": 64, "tensor_parallel_size": 2},
        ),
        Model(
            "qwen3-next",
            "gated delta net states beside full attention",
            "qwen3_next",
            _QWEN3_NEXT | _GPU_HEADS,
            engine={"gdn_prefill_backend": "triton"},  # the default compiles FlashInfer's kernel first
            **_STATES | {"small_cpu_blocks": 44},  # three groups of states: as many more rows a prompt
        ),
        Model(
            "falcon-h1",
            "Mamba-2 states beside grouped-query attention",
            "falcon_h1",
            _FALCON_H1 | _GPU_HEADS | {"max_position_embeddings": 4096},
            max_length=4096,
            **_STATES,
        ),
        Model(
            "lfm2",
            "short convolutions beside grouped-query attention",
            "lfm2",
            _LFM2 | _GPU_HEADS | {"conv_dim": 256, "block_dim": 256, "block_ff_dim": 512},
            **_STATES,
        ),
    )
)
MODELS = CPU_MODELS + CUDA_MODELS


def model(name: str) -> Model:
    """Raises KeyError with the existing names."""
    for candidate in MODELS:
        if candidate.name == name:
            return candidate
    raise KeyError(f"{name!r} is none of {', '.join(candidate.name for candidate in MODELS)}")


def build(wanted: Model, folder: Path) -> Path:
    """Write config.json and random weights to a folder of the model's name; one that is there is taken as it is."""
    target = folder / wanted.name
    if (target / "model.safetensors").exists():
        return target
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    config = AutoConfig.for_model(wanted.model_type, **wanted.settings)
    built = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    built.save_pretrained(target, safe_serialization=True)
    return target


def engine_settings(wanted: Model, folder: Path) -> dict[str, Any]:
    """vLLM's settings of an engine on the CPU with this model, whose cached blocks are known by the prompts alone."""
    return {
        "model": str(build(wanted, folder)),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": BLOCK_TOKENS,
        "max_model_len": wanted.max_length,
        "max_num_seqs": 4,
        "num_gpu_blocks_override": wanted.device_blocks,
        "enable_prefix_caching": True,
        "prefix_caching_hash_algo": "sha256_cbor",
        "disable_log_stats": True,
    }
