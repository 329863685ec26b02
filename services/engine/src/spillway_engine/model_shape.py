"""The cost of one token in KV cache, from a model's config.json."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spillway_connector.plan.kv_groups import KvGroup
from spillway_connector.setting_names import PLAIN_NAMES, SettingNames
from spillway_engine.errors import ModelShapeError
from spillway_settings.shared_names import PACKED_MODELS

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# Bytes of an element of the KV cache, by its dtype.
KV_DTYPE_BYTES = {
    **DTYPE_BYTES,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_per_token_head": 1,
    "int8_per_token_head": 1,
}
# Names that a config.json has for a layer's number of experts, as vLLM reads it
# (transformers_utils/model_arch_config_convertor.py).
EXPERT_NAMES = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
# What a config.json leaves out if it is transformers' default: the layers with a window, and Gemma 3's heads.
_LEFT_OUT: Mapping[str, Mapping[str, Any]] = {
    "gemma2": {"sliding_window_pattern": 2},
    "gemma3_text": {
        "sliding_window_pattern": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "vocab_size": 262208,
    },
    "cohere2": {"sliding_window_pattern": 4},
}
# Type and number of layers in config.json -> key of PACKED_MODELS.
_PACKED = {("deepseek_v4", 43): "deepseek-v4-flash"}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_LENGTH_INCLUDED = ("default", "su", "longrope", "llama3")  # kinds of scaling that the number of positions includes
HEAD_SCALE_BYTES = 4  # float32, one for K and one for V of each head and token (vllm/v1/kv_cache_interface.py)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The part of a model's architecture that decides the size of its KV cache, and how its ranks work together."""

    layers: int
    kv_heads: int
    head_dim: int
    # MLA: width of the latent plus its rope part; None: plain attention with K and V. Every rank holds all of it.
    latent_dim: int | None
    dtype: str  # of the checkpoint
    max_length: int | None  # tokens of a prompt and its answer that vLLM takes
    weight_bytes: int  # files on disk; 0 when they are not here
    vocabulary: int | None = None  # tokens; None: not in config.json
    experts: int = 0  # of a layer; 0: a dense model
    quantized: bool = False  # by the checkpoint itself
    sliding_layers: int = 0  # of `layers`: those that see a window of the prompt, where the others see all of it
    window_tokens: int = 0  # of that window; 0: not known, so every chunk of it counts
    state_layers: int = 0  # besides `layers`: those with a recurrent state
    state_bytes: int = 0  # of one such layer, of all tensor parallel ranks together
    packed: str = ""  # a key of PACKED_MODELS: vLLM packs layers of many sizes into blocks in its own way
    own_draft_layers: int = 1  # of the model itself for tokens ahead, if speculative decoding uses them
    speculates: bool = False  # vLLM drafts tokens, and computes the last chunk of a prompt once more for the drafter
    draft_layers: int = 0  # besides `layers`: those of a drafter, with full attention and of the same size

    def block_tokens(self, kv_dtype: str, tensor_parallel_size: int, block_size: int) -> int:
        """Tokens of a block of full attention. vLLM raises it until a layer's page holds a state."""
        if self.packed:
            return int(PACKED_MODELS[self.packed]["blockTokens"])
        if not self.state_layers:
            return block_size
        layer_bytes = self._layer_bytes_per_token(kv_dtype, tensor_parallel_size) * block_size
        return -(-(self.state_bytes // tensor_parallel_size) // layer_bytes) * block_size

    def block_bytes_of_rank(self, kv_dtype: str, tensor_parallel_size: int, stages: int, block_size: int) -> int:
        """Bytes of a block on one rank, in each KV group."""
        if self.packed:
            return int(PACKED_MODELS[self.packed]["blockBytes"])
        tokens = self.block_tokens(kv_dtype, tensor_parallel_size, block_size)
        return self.bytes_per_token_of_rank(kv_dtype, tensor_parallel_size, stages) * tokens

    def row_block_bytes_of_rank(self, kv_dtype: str, tensor_parallel_size: int, stages: int, block_size: int) -> int:
        """Return the bytes of a block for which a row of the CPU tier has room."""
        if self.packed:
            return int(PACKED_MODELS[self.packed]["rowBytes"])
        return self.block_bytes_of_rank(kv_dtype, tensor_parallel_size, stages, block_size)

    @property
    def ranks_hold_the_same(self) -> bool:
        """Whether a row holds the KV of a stage once for all its ranks: that of latents."""
        return self.latent_dim is not None or bool(self.packed)

    @property
    def layer_elements(self) -> int:
        """Numbers that a layer keeps of a token, all heads together."""
        return self.latent_dim or 2 * self.kv_heads * self.head_dim

    @property
    def only_block_size(self) -> int | None:
        """The one number of tokens of a block that the model's kernels take; None: they take several."""
        return int(PACKED_MODELS[self.packed]["blockTokens"]) if self.packed else None

    def groups(self, block_tokens: int, blocks_per_chunk: int) -> tuple[KvGroup, ...]:
        """The KV groups. block_tokens: of a block of full attention."""
        if self.packed:
            packed = PACKED_MODELS[self.packed]["groups"]
            return tuple(
                KvGroup(tokens * blocks_per_chunk, window) for number, window, tokens in packed for _ in range(number)
            )
        chunk_tokens = block_tokens * blocks_per_chunk
        whole, sliding, states = (-(-layers // self.group_layers) for layers in self._kinds)
        return (
            *[KvGroup(chunk_tokens)] * whole,
            *[KvGroup(chunk_tokens, self.window_tokens)] * sliding,
            *[KvGroup(chunk_tokens, has_states=True)] * states,
        )

    @property
    def group_layers(self) -> int:
        """Layers of one KV group: what a device block, and so a row of the CPU tier, holds.

        vLLM makes groups of one size out of layers of two kinds (v1/core/kv_cache_utils.py:
        _get_kv_cache_groups_uniform_page_size): of the smaller kind's, or of the larger's if it is less than half as
        large again.
        """
        kinds = [layers for layers in self._kinds if layers]
        return max(kinds) if max(kinds) < 1.5 * min(kinds) else min(kinds)

    @property
    def kv_groups(self) -> int:
        return len(self.groups(1, 1))

    @property
    def _kinds(self) -> tuple[int, int, int]:
        """Layers with full attention, with a window, with states."""
        return self.layers - self.sliding_layers + self.draft_layers, self.sliding_layers, self.state_layers

    def bytes_per_token_of_rank(self, kv_dtype: str, tensor_parallel_size: int, stages: int = 1) -> int:
        """KV bytes of one token on one rank, in one KV group. kv_dtype: a key of KV_DTYPE_BYTES.

        Heads are split over ranks until there is one per rank, then replicated; a latent is never split. If there are
        several pipeline stages, the one with the most layers counts: no other has more room in a row of the CPU tier.
        """
        layers = -(-self.group_layers // stages)
        return layers * self._layer_bytes_per_token(kv_dtype, tensor_parallel_size)

    def bytes_per_block(self, kv_dtype: str, tensor_parallel_size: int, stages: int, block_size: int) -> int:
        """KV bytes of a block of a replica in its tiers: of all groups and ranks; a latent once for each stage."""
        copies = 1 if self.ranks_hold_the_same else tensor_parallel_size
        of_rank = self.row_block_bytes_of_rank(kv_dtype, tensor_parallel_size, stages, block_size)
        return of_rank * self.kv_groups * copies * stages

    def _layer_bytes_per_token(self, kv_dtype: str, tensor_parallel_size: int) -> int:
        element_bytes = KV_DTYPE_BYTES[kv_dtype]
        if self.latent_dim is not None:
            return self.latent_dim * element_bytes
        heads_of_rank = max(1, self.kv_heads // tensor_parallel_size)
        scale_bytes = HEAD_SCALE_BYTES if kv_dtype.endswith("_per_token_head") else 0
        return 2 * heads_of_rank * (self.head_dim * element_bytes + scale_bytes)


def read_model_shape(config: Mapping[str, Any], weight_bytes: int = 0) -> ModelShape:
    """Parse a Hugging Face config (its text part for multimodal models).

    Raises ModelShapeError when a needed number is absent, or no layer keeps KV.
    """
    text = config.get("text_config") or config
    text = {**_LEFT_OUT.get(str(text.get("model_type")), {}), **text}
    layers = _needed(text, "num_hidden_layers", "n_layer")
    heads = _needed(text, "num_attention_heads", "n_head")
    latent_dim = None
    if text.get("kv_lora_rank"):
        latent_dim = int(text["kv_lora_rank"]) + int(text.get("qk_rope_head_dim", 0))
    head_dim = text.get("head_dim") or _needed(text, "hidden_size", "n_embd") // heads
    layer_types = _layer_types(text, layers)
    # Layers with a recurrent state hold no per-token KV.
    state_layers = sum(kind.startswith("linear") for kind in layer_types)
    kinds = Counter(kind for kind in layer_types if kind.endswith("attention") and not kind.startswith("linear"))
    layers = kinds.total()
    if not layers:
        raise ModelShapeError("config.json has no layer with attention; a model without KV cache has none to offload")
    dtype = str(
        text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    )
    return ModelShape(
        layers=layers,
        kv_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=int(head_dim),
        latent_dim=latent_dim,
        dtype=dtype,
        max_length=_max_length(text),
        weight_bytes=weight_bytes,
        vocabulary=vocabulary if isinstance(vocabulary := text.get("vocab_size"), int) and vocabulary > 1 else None,
        experts=_experts(text),
        quantized=bool(config.get("quantization_config") or text.get("quantization_config")),
        # vLLM puts all layers of other kinds into one group (chunked ones, whose windows it does not free by default),
        # or packs them its own way (compressed ones). A row then holds all layers.
        sliding_layers=kinds[_SLIDING] if set(kinds) == {_FULL, _SLIDING} else 0,
        window_tokens=int(text.get("sliding_window") or 0),
        state_layers=state_layers if (state_bytes := _state_bytes(text)) else 0,
        state_bytes=state_bytes,
        packed=_PACKED.get((str(text.get("model_type")), layers), ""),
        own_draft_layers=_own_draft_layers(text),
    )


def _own_draft_layers(text: Mapping[str, Any]) -> int:
    given = (text.get(name) for name in ("num_nextn_predict_layers", "mtp_num_hidden_layers", "n_mtp_layers"))
    return next((layers for layers in given if isinstance(layers, int) and layers > 0), 1)


def _max_length(text: Mapping[str, Any]) -> int | None:
    """The positions of config.json, and a scaling of them in the same file, as vLLM counts both."""
    positions = text.get("max_position_embeddings")
    scaling: Mapping[str, Any] = text.get("rope_scaling") or text.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if not positions or kind is None or kind in _LENGTH_INCLUDED or "gemma3" in str(text.get("model_type")):
        return int(positions) if positions else None
    if kind == "yarn":
        positions = scaling.get("original_max_position_embeddings") or positions
    return int(positions * (scaling.get("factor") or 1))


def _state_bytes(text: Mapping[str, Any]) -> int:
    """Return the bytes of convolution and matrices in a layer with a gated delta rule (Qwen3-Next, Qwen3.5); else 0."""
    names = ("key_head_dim", "num_key_heads", "value_head_dim", "num_value_heads", "conv_kernel_dim")
    sizes = [text.get(f"linear_{name}") for name in names]
    if not all(isinstance(size, int) for size in sizes):
        return 0
    key_dim, keys, value_dim, values, kernel = (int(size) for size in sizes if size is not None)
    # vLLM keeps both in the model's dtype, unless the file names another for the matrices.
    matrix_bytes = DTYPE_BYTES.get(str(text.get("mamba_ssm_dtype")), 2)
    convolution = (kernel - 1) * (2 * keys * key_dim + values * value_dim)
    return 2 * convolution + matrix_bytes * values * value_dim * key_dim


def load_model_shape(model_path: str, names: SettingNames = PLAIN_NAMES) -> ModelShape:
    """Read `config.json` of a folder, or of a hub name through the hub's own client and its cache.

    Raises ModelShapeError: no such folder or model, no config.json, config without the needed numbers.
    """
    folder = Path(model_path)
    if folder.is_dir():
        config_path = folder / "config.json"
        if not config_path.is_file():
            raise ModelShapeError(
                f"{names.given('model.path', model_path)} has no config.json; give a folder with a Hugging Face model"
            )
        weight_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    else:
        config_path = _config_from_hub(model_path, names)
        weight_bytes = 0
    try:
        config = json.loads(config_path.read_text())
    except (OSError, ValueError) as error:
        raise ModelShapeError(f"{config_path} cannot be read as JSON: {error}") from error
    return read_model_shape(config, weight_bytes)


def _config_from_hub(name: str, names: SettingNames) -> Path:
    if name.startswith(("/", ".")) or name.count("/") != 1:
        raise ModelShapeError(
            f"{names.given('model.path', name)} is no folder here and no hub name (owner/model); give one of the two"
        )
    # Imported here: only hub names need it, and the engine image has it through vLLM.
    from huggingface_hub import hf_hub_download  # noqa: PLC0415

    try:
        return Path(hf_hub_download(name, "config.json"))
    except Exception as error:
        raise ModelShapeError(
            f"{names.given('model.path', name)} could not be fetched from the model hub "
            f"({type(error).__name__}: {error}); check the name and the network, or give a folder"
        ) from error


def _layer_types(config: Mapping[str, Any], layers: int) -> list[str]:
    """Types of all layers. If a pattern of n stands for the list, every n-th layer sees all of the prompt."""
    if isinstance(listed := config.get("layer_types"), list) and listed:
        return [str(kind) for kind in listed[:layers]]  # what follows are a drafter's layers
    recurrent = config.get("linear_attn_config")
    if isinstance(recurrent, Mapping) and isinstance(whole := recurrent.get("full_attn_layers"), list):
        return [_FULL if layer + 1 in whole else "linear_attention" for layer in range(layers)]
    interval = config.get("full_attention_interval")
    if isinstance(interval, int) and interval > 0:
        return ["linear_attention" if (layer + 1) % interval else _FULL for layer in range(layers)]
    pattern = config.get("sliding_window_pattern")
    if not config.get("sliding_window") or not isinstance(pattern, int) or pattern < 1:
        return [_FULL] * layers
    return [_SLIDING if (layer + 1) % pattern else _FULL for layer in range(layers)]


def _experts(config: Mapping[str, Any]) -> int:
    for name in EXPERT_NAMES:
        number = config.get(name)
        if isinstance(number, list) and number:  # by layer, all equal
            number = number[0]
        if isinstance(number, int) and number > 0:
            return number
    return 0


def _needed(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if isinstance(config.get(name), int):
            return int(config[name])
    raise ModelShapeError(f"config.json has no {' or '.join(names)}; the size of the KV cache cannot be computed")
