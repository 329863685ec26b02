import json
from pathlib import Path
from typing import Any

import pytest

from spillway_connector.plan.kv_groups import KvGroup
from spillway_engine.errors import ModelShapeError
from spillway_engine.model_shape import load_model_shape, read_model_shape

SMOLLM2 = {
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "hidden_size": 576,
    "dtype": "bfloat16", "max_position_embeddings": 8192,
}  # fmt: skip
LLAMA_8B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
QWEN3_14B = {
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 5120,
}
DEEPSEEK_V3 = {
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "hidden_size": 7168,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "dtype", "ranks", "bytes_per_token"),
    [
        (SMOLLM2, "bfloat16", 1, 23_040),
        (SMOLLM2, "float32", 1, 46_080),
        (LLAMA_8B, "bfloat16", 1, 131_072),
        (QWEN3_14B, "bfloat16", 1, 163_840),
        (QWEN3_14B, "bfloat16", 4, 163_840),  # heads are split, the replica's total stays
        (QWEN3_14B, "bfloat16", 16, 327_680),  # one head per rank, each held twice
        (DEEPSEEK_V3, "bfloat16", 1, 70_272),
        (DEEPSEEK_V3, "bfloat16", 8, 70_272),  # every rank keeps the whole latent, and a tier holds it once
        (QWEN3_14B, "fp8", 4, 81_920),
        (DEEPSEEK_V3, "fp8_e4m3", 1, 35_136),
        # 40 layers x 8 heads x (128 + 4 of the scale) for K and V.
        (QWEN3_14B, "int8_per_token_head", 1, 84_480),
    ],
)
def test_bytes_per_token_of_known_models(config: dict[str, Any], dtype: str, ranks: int, bytes_per_token: int) -> None:
    assert read_model_shape(config).bytes_per_block(dtype, ranks, 1, 1) == bytes_per_token


GPT_OSS_20B = {
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_size": 2880,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}
# What the file on the hub has: the rest is transformers' default.
GEMMA_3_4B = {
    "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
}
QWEN3_NEXT_80B = {
    "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "hidden_size": 2048,
    "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_value_head_dim": 128,
}  # fmt: skip
DEEPSEEK_V4_FLASH = {
    "model_type": "deepseek_v4", "num_hidden_layers": 43, "num_attention_heads": 64, "num_key_value_heads": 1,
    "head_dim": 512, "sliding_window": 128,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "layers", "groups", "bytes_per_token"),
    [
        (QWEN3_14B, 40, 1, 163_840),
        (GPT_OSS_20B, 12, 2, 49_152),
        (GEMMA_3_4B, 5, 7, 143_360),  # 5 layers that see all, and 29 with a window in 6 groups, one of 4 layers
        (QWEN3_14B | {"layer_types": ["sliding_attention"] * 40}, 40, 1, 163_840),
        (QWEN3_14B | {"sliding_window": 4096, "sliding_window_pattern": 4}, 10, 4, 163_840),
        (QWEN3_14B | {"sliding_window": None, "sliding_window_pattern": 4}, 40, 1, 163_840),
        (QWEN3_14B | {"layer_types": ["full_attention"] * 13 + ["sliding_attention"] * 12}, 13, 2, 106_496),
        # vLLM lays them into one group, and packs compressed ones its own way: a row is reckoned for all layers.
        (QWEN3_14B | {"layer_types": ["chunked_attention"] * 30 + ["full_attention"] * 10}, 40, 1, 163_840),
        (QWEN3_14B | {"layer_types": ["compressed_attention"] * 39 + ["sliding_attention"]}, 40, 1, 163_840),
        # The last ones are a drafter's.
        (QWEN3_14B | {"layer_types": ["sliding_attention", "full_attention"] * 21}, 20, 2, 163_840),
    ],
)
def test_layers_of_two_kinds_are_groups_with_a_row_each(
    config: dict[str, Any], layers: int, groups: int, bytes_per_token: int
) -> None:
    shape = read_model_shape(config)
    assert (shape.group_layers, shape.kv_groups) == (layers, groups)
    assert shape.bytes_per_block("bfloat16", 1, 1, 1) == bytes_per_token
    assert shape.bytes_per_token_of_rank("bfloat16", 1) * groups == bytes_per_token


def test_the_kinds_of_groups_are_read_from_the_file() -> None:
    window = KvGroup(128, 128)
    assert read_model_shape(GPT_OSS_20B).groups(128, 1) == (KvGroup(128), window)
    assert read_model_shape(GPT_OSS_20B).groups(128, 2) == (KvGroup(256), KvGroup(256, 128))
    assert read_model_shape(GEMMA_3_4B).groups(16, 1) == (KvGroup(16), *[KvGroup(16, 1024)] * 6)


@pytest.mark.parametrize(("tensor_ranks", "block_tokens"), [(1, 640), (2, 640), (4, 384)])
def test_a_block_is_raised_until_it_holds_a_state(tensor_ranks: int, block_tokens: int) -> None:
    """Each of four ranks has a quarter of a state, and one of the two heads."""
    shape = read_model_shape(QWEN3_NEXT_80B)

    assert (shape.layers, shape.state_layers, shape.state_bytes) == (12, 36, 3 * 8192 * 2 + 32 * 128 * 128 * 2)
    assert shape.block_tokens("bfloat16", tensor_ranks, 128) == block_tokens
    assert shape.groups(block_tokens, 1) == (KvGroup(block_tokens), *[KvGroup(block_tokens, has_states=True)] * 3)
    larger = read_model_shape(QWEN3_NEXT_80B | {"mamba_ssm_dtype": "float32"})
    assert larger.block_tokens("bfloat16", 1, 16) == 1056


def test_a_model_whose_layers_vllm_packs_is_known() -> None:
    shape = read_model_shape(DEEPSEEK_V4_FLASH)

    assert shape.block_tokens("fp8", 2, 128) == 256
    assert shape.block_bytes_of_rank("fp8", 2, 1, 128) == 1_039_680
    assert [group.chunk_tokens for group in shape.groups(256, 1)] == [256, 64, 64, 4, 8]
    assert read_model_shape(DEEPSEEK_V4_FLASH | {"num_hidden_layers": 61}).packed == ""


def test_the_text_part_of_a_multimodal_config_counts() -> None:
    assert read_model_shape({"text_config": QWEN3_14B, "vision_config": {}}).layers == 40
    assert read_model_shape({"text_config": None, **QWEN3_14B}).layers == 40


@pytest.mark.parametrize(
    "kinds",
    [
        {"layer_types": ["linear_attention"] * 30 + ["full_attention"] * 10},
        {"full_attention_interval": 4},
        {"linear_attn_config": {"full_attn_layers": list(range(4, 41, 4))}},
    ],
)
def test_recurrent_layers_hold_no_kv(kinds: dict[str, Any]) -> None:
    assert read_model_shape(QWEN3_14B | kinds).layers == 10


@pytest.mark.parametrize("without", [{"layer_types": ["mamba"] * 40}, {"num_hidden_layers": 0}])
def test_a_model_without_kv_is_refused_in_a_sentence(without: dict[str, Any]) -> None:
    with pytest.raises(ModelShapeError, match="no layer with attention"):
        read_model_shape(QWEN3_14B | without)


@pytest.mark.parametrize(
    ("given", "experts"),
    [
        ({}, 0),
        ({"num_experts": 128}, 128),
        ({"n_routed_experts": 256}, 256),
        ({"num_local_experts": 8}, 8),
        ({"moe_num_experts": [64, 64]}, 64),
        ({"num_experts": None}, 0),
        ({"num_experts": []}, 0),
    ],
)
def test_experts_by_every_name_that_vllm_reads(given: dict[str, Any], experts: int) -> None:
    assert read_model_shape(QWEN3_14B | given).experts == experts


@pytest.mark.parametrize(
    ("given", "length"),
    [
        ({}, 40960),
        ({"rope_scaling": None}, 40960),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}, 131072),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}, 131072),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, 81920),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 40960),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20]}}, 40960),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": None}}, 40960),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0}}}, 40960),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "model_type": "gemma3_text"}, 40960),
        ({"max_position_embeddings": None, "rope_scaling": {"rope_type": "linear", "factor": 2}}, None),
    ],
)
def test_a_scaling_in_the_same_file_stretches_the_model(given: dict[str, Any], length: int | None) -> None:
    assert read_model_shape(QWEN3_14B | {"max_position_embeddings": 40960} | given).max_length == length


def test_a_folder_is_read_with_its_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)

    shape = load_model_shape(str(tmp_path))

    assert (shape.weight_bytes, shape.dtype, shape.max_length) == (1000, "bfloat16", 8192)


def test_what_cannot_be_computed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelShapeError, match=r"has no config\.json"):
        load_model_shape(str(tmp_path))
    with pytest.raises(ModelShapeError, match="no num_hidden_layers"):
        read_model_shape({"hidden_size": 1})
    with pytest.raises(ModelShapeError, match="no folder here and no hub name"):
        load_model_shape("/no/such/folder")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelShapeError, match="cannot be read as JSON"):
        load_model_shape(str(tmp_path))
