"""Two engines share blocks exactly when nothing that a block's bytes depend on differs between them."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from vllm import envs
from vllm.config import VllmConfig
from vllm.config.compilation import PassConfig
from vllm.config.kernel import IrOpPriorityConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)

from spillway_connector.engine.namespace import fields as namespace_fields
from spillway_connector.engine.namespace.config_fields import (
    CONFIG_FIELDS,
    ENVIRONMENT,
    ENVIRONMENT_ADDED,
    ENVIRONMENT_LEFT_OUT,
    ENVIRONMENT_LEFT_OUT_ADDED,
    FIRST,
)
from spillway_connector.engine.namespace.fields import (
    environment_facts,
    json_value,
    namespace_facts,
    require_shareable_scales,
)
from spillway_connector.errors import ConfigError
from spillway_connector.namespace import Namespace, explain_difference
from spillway_connector.plan.geometry import ChunkGeometry
from spillway_connector.testing.models import write_tiny_llama

BLOCK_TOKENS, NUM_BLOCKS = 32, 20
SINCE_0_30 = "layers" in {field.name for field in dataclasses.fields(KVCacheTensor)}
NEEDS_FP8_CACHE = pytest.mark.skipif(
    not set(Path("/proc/cpuinfo").read_text().split()) & {"avx512f", "amx_tile"},
    reason="vLLM's CPU attention has an fp8 KV cache with AVX-512 or AMX alone",
)
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 16,
    "long_factor": [2.0] * 16,
    "original_max_position_embeddings": 1024,
}
Settings = dict[str, Any]
Layouts = list[dict[str, Any]]
NHD = {"dtype": "torch.bfloat16", "shape": ["blocks", 2, 32, 2, 32], "stride_bytes": [8192, 4096, 128, 64, 2]}
HND = NHD | {"stride_bytes": [8192, 4096, 64, 2048, 2]}


def layouts(backend: str = "FLASH_ATTN", chip: str = "NVIDIA H200", **tensor: Any) -> Layouts:
    return [{"chip": chip, "layers": [{"backend": backend, "tensors": [NHD | tensor], "names": ["layers.0"]}]}]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "model")


def engine(folder: Path, settings: Settings | None = None) -> VllmConfig:
    """The configuration that `vllm serve` resolves from such settings."""
    given = {"max_model_len": 512, "block_size": BLOCK_TOKENS, "prefix_caching_hash_algo": "sha256_cbor"}
    arguments = EngineArgs(model=str(folder), skip_tokenizer_init=True, **given | (settings or {}))
    return arguments.create_engine_config()


def kv_cache(config: VllmConfig, num_blocks: int = NUM_BLOCKS) -> KVCacheConfig:
    dtype = config.model_config.dtype
    assert isinstance(dtype, torch.dtype)
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=32, dtype=dtype)
    page, layers = spec.page_size_bytes, ["layers.0"]
    if SINCE_0_30:
        tensor = KVCacheTensor(size=page * num_blocks, layers=layers, layer_stride=page * num_blocks, block_stride=page)
    else:
        tensor = KVCacheTensor(size=page * num_blocks, shared_by=layers)
    tensors = [tensor]
    return KVCacheConfig(num_blocks, tensors, [KVCacheGroupSpec(["layers.0"], spec)])


def facts_of(config: VllmConfig, layout: Layouts | None = None, **other: Any) -> Settings:
    geometry = ChunkGeometry(rank_block_bytes=8192, blocks_per_chunk=1, num_ranks=1)
    given = {"hash_block_size": BLOCK_TOKENS, "layouts": layout or layouts()}
    return namespace_facts(config, kv_cache(config), geometry, **given, **other)


def namespace(config: VllmConfig, layout: Layouts | None = None, **other: Any) -> Namespace:
    return Namespace.of(facts_of(config, layout, **other))


def of_ranks(model: Path, num_ranks: int, *, one_cell: bool, settings: Settings | None = None) -> Namespace:
    config = engine(model, {"tensor_parallel_size": num_ranks, "distributed_executor_backend": "mp"} | (settings or {}))
    geometry = ChunkGeometry(rank_block_bytes=8192, blocks_per_chunk=1, num_ranks=num_ranks, one_cell=one_cell)
    facts = namespace_facts(config, kv_cache(config), geometry, hash_block_size=BLOCK_TOKENS, layouts=layouts())
    return Namespace.of(facts)


def test_a_row_that_holds_the_kv_of_all_ranks_once_is_that_of_one_rank(model: Path):
    """Engines with any number of ranks share blocks, except those that another number of ranks computes otherwise."""
    alone = of_ranks(model, 1, one_cell=False)
    for num_ranks in (2, 4):
        once = of_ranks(model, num_ranks, one_cell=True)
        assert once.hex == alone.hex, explain_difference(once.document, alone.document)
    assert of_ranks(model, 2, one_cell=True, settings={"dtype": "float32"}).hex != alone.hex


def test_a_row_with_a_cell_for_each_rank_is_of_that_number_of_ranks(model: Path):
    """No engine loads rows of another length, or with another rank's heads where its own should be."""
    by_rank = [of_ranks(model, num_ranks, one_cell=False).hex for num_ranks in (1, 2, 4)]
    assert len({*by_rank, of_ranks(model, 2, one_cell=True).hex}) == 3


def test_only_chunks_that_can_lack_blocks_have_rows_of_another_version(model: Path):
    config = engine(model)
    caches = kv_cache(config)
    (group,) = caches.kv_cache_groups
    heads: Settings = {"block_size": BLOCK_TOKENS, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}

    def versions() -> list[int]:
        facts = {"hash_block_size": BLOCK_TOKENS, "layouts": layouts()}
        sizes = [ChunkGeometry(rank_block_bytes=8192, blocks_per_chunk=count, num_ranks=1) for count in (1, 2)]
        return [namespace_facts(config, caches, geometry, **facts)["layout_version"] for geometry in sizes]

    assert versions() == [1, 1]
    caches.kv_cache_groups.append(KVCacheGroupSpec(["layers.1"], SlidingWindowSpec(sliding_window=96, **heads)))
    assert versions() == [1, 2]
    caches.kv_cache_groups.pop()
    group.kv_cache_spec = ChunkedLocalAttentionSpec(attention_chunk_size=64, **heads)
    assert versions() == [1, 2]


# --- what must distinguish engines ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"hf_overrides": {"attention_bias": True}}, "hf_config.attention_bias"),
        ({"hf_overrides": {"rms_norm_eps": 0.1}}, "hf_config.rms_norm_eps"),
        ({"hf_overrides": {"sliding_window": 64}}, "hf_config.sliding_window"),
        ({"hf_overrides": {"attention_chunk_size": 64}}, "hf_config.attention_chunk_size"),
        ({"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}}, "rope_theta"),
        ({"dtype": "float32"}, "dtype"),
        pytest.param({"kv_cache_dtype": "fp8_e5m2"}, "cache_dtype", marks=NEEDS_FP8_CACHE),
        *([] if SINCE_0_30 else [({"calculate_kv_scales": True}, "calculate_kv_scales")]),
        ({"block_size": 64}, "block_size"),
        ({"prefix_caching_hash_algo": "sha256"}, "hash_algorithm"),
        ({"enable_lora": True}, "lora_config"),
        ({"additional_config": {"enable_kv_nz": True}}, "additional_config.enable_kv_nz"),
        ({"trust_remote_code": True}, "trust_remote_code"),
        ({"disable_sliding_window": True}, "disable_sliding_window"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_setting_is_another_namespace(model: Path, settings: Settings, path: str):
    ours, theirs = namespace(engine(model)), namespace(engine(model, settings))
    assert ours.hex != theirs.hex
    assert path in explain_difference(ours.document, theirs.document)


# Settings that need more processors or another platform than a test has: set on the resolved configuration.
@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("parallel_config", "cp_kv_cache_interleave_size", 16),
        ("parallel_config", "dcp_kv_cache_interleave_size", 16),
        ("parallel_config", "decode_context_parallel_size", 2),
        ("parallel_config", "prefill_context_parallel_size", 2),
        ("parallel_config", "tensor_parallel_size", 2),
        ("parallel_config", "pipeline_parallel_size", 2),
        ("parallel_config", "worker_cls", "vllm_ascend.worker.NPUWorker"),
        ("cache_config", "mamba_ssm_cache_dtype", "float16"),
        ("cache_config", "kv_cache_dtype_skip_layers", ["0"]),
        ("cache_config", "sliding_window", 64),
        ("model_config", "quantization", "fp8"),
        ("model_config", "model_impl", "transformers"),
        ("model_config", "code_revision", "abc"),
        ("kernel_config", "moe_backend", "triton"),
        ("attention_config", "use_non_causal", True),
    ],
)
def test_another_resolved_field_is_another_namespace(model: Path, part: str, field: str, value: Any):
    ours, config = namespace(engine(model)), engine(model)
    object.__setattr__(getattr(config, part), field, value)
    theirs = namespace(config)
    assert ours.hex != theirs.hex
    assert f"{part}.{field}" in explain_difference(ours.document, theirs.document)


@pytest.mark.parametrize(
    "other",
    [
        layouts(backend="FLEX_ATTENTION"),
        layouts(**HND),
        layouts(chip="Ascend910_9391"),
        layouts(format="29"),  # FRACTAL_NZ
        layouts(dtype="torch.float8_e4m3fn"),
        layouts() + layouts(**HND),  # of two ranks
        [layouts()[0] | {"layers": [layouts()[0]["layers"][0] | {"key_scale": 0.5}]}],
    ],
)
def test_another_registered_layout_is_another_namespace(model: Path, other: Layouts):
    config = engine(model)
    assert namespace(config, layouts()).hex != namespace(config, other).hex


def test_a_longrope_model_with_another_length_is_another_model(tmp_path: Path):
    folder = write_tiny_llama(tmp_path / "longrope", rope_parameters=LONGROPE)
    short, long = engine(folder, {"max_model_len": 512}), engine(folder, {"max_model_len": 2048})
    assert namespace(short).hex != namespace(long).hex


def test_a_llama4_with_another_length_is_another_model(model: Path, monkeypatch: pytest.MonkeyPatch):
    """vLLM's Llama 4 scales its queries beyond 32,768 tokens, and with them all that later layers compute."""
    monkeypatch.setattr(namespace_fields, "ARCHITECTURES_BY_LENGTH", frozenset({"LlamaForCausalLM"}))
    short, long = engine(model, {"max_model_len": 512}), engine(model, {"max_model_len": 2048})
    assert namespace(short).hex != namespace(long).hex


def test_a_multimodal_model_may_fit_its_media_to_the_length():
    class Model:
        max_model_len, multimodal_config = 512, object()

        class hf_text_config:
            rope_parameters = None

    assert namespace_fields.context_length_facts(Model) == {"max_model_len": 512}


def test_an_unknown_rotation_counts_as_one_that_depends_on_the_length():
    class Model:
        max_model_len = 512
        architectures = ("LlamaForCausalLM",)

        class hf_text_config:
            rope_parameters = {"full": {"rope_type": "default"}, "sliding": {"rope_type": "brand_new"}}  # noqa: RUF012

    assert namespace_fields.context_length_facts(Model) == {"max_model_len": 512}
    Model.hf_text_config.rope_parameters = {"rope_type": "default"}
    assert namespace_fields.context_length_facts(Model) == {}


def test_another_vllm_or_torch_or_plugin_is_another_namespace(model: Path, monkeypatch: pytest.MonkeyPatch):
    config = engine(model)
    # vLLM's builds for CUDA list plugins of their own, and thereby the version of the installed package.
    monkeypatch.setattr(namespace_fields.importlib.metadata, "entry_points", lambda group: ())
    seen = {namespace(config).hex}
    with monkeypatch.context() as patched:
        patched.setattr(vllm, "__version__", "0.23.1")
        seen.add(namespace(config).hex)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "__version__", "9.9")
        seen.add(namespace(config).hex)
    found = namespace_fields.version_facts()
    monkeypatch.setattr(namespace_fields, "version_facts", lambda: found | {"vllm_ascend": "0.23.0.post1"})
    seen.add(namespace(config).hex)
    assert len(seen) == 4


def test_another_transformers_is_another_namespace(model: Path, monkeypatch: pytest.MonkeyPatch):
    """Transformers computes models without vLLM's own code, and its processors turn media into a model's input."""
    installed = namespace_fields.importlib.metadata.version
    config = engine(model)
    seen = {namespace(config).hex}
    for name in ("transformers", "pillow"):  # no media here
        monkeypatch.setattr(
            namespace_fields.importlib.metadata, "version", lambda of, name=name: "9" if of == name else installed(of)
        )
        seen.add(namespace(config).hex)
    assert len(seen) == 2
    assert namespace_fields.media_versions()["pillow"] == "9"


def test_weights_that_differ_in_one_byte(tmp_path: Path, model: Path):
    other = write_tiny_llama(tmp_path / "other", weights=b"\1" * 63 + b"\2")
    assert namespace(engine(model)).hex != namespace(engine(other)).hex


def test_a_named_version_of_the_weights(tmp_path: Path, model: Path):
    config = engine(model)
    seen = {namespace(config).hex}
    seen |= {namespace(config, weights_version=version).hex for version in ("1", "2")}
    assert len(seen) == 3


def test_variables_that_choose_kernels_or_layout_count(model: Path, monkeypatch: pytest.MonkeyPatch):
    config = engine(model)
    ours = namespace(config)
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "HND")
    assert namespace(config).hex != ours.hex
    others = {"VLLM_API_KEY": "x", "HOME": "/", "VLLM_PORT": "1", "VLLM_ASCEND_RPC_PORT": "2"}
    assert environment_facts({"VLLM_ASCEND_ENABLE_NZ": "1"} | others) == {"VLLM_ASCEND_ENABLE_NZ": "1"}


# --- what must not ---------------------------------------------------------------------------------------------------


def test_the_same_weights_in_another_place_are_shared(tmp_path: Path, model: Path):
    copy = write_tiny_llama(tmp_path / "copy on another node")
    assert namespace(engine(copy)).hex == namespace(engine(model)).hex


@pytest.mark.parametrize(
    "settings",
    [
        {"max_model_len": 1024},
        {"max_num_seqs": 3},
        {"max_num_batched_tokens": 600},
        {"gpu_memory_utilization": 0.5},
        {"num_gpu_blocks_override": 17},
        {"served_model_name": "other"},
        {"seed": 3},
        {"disable_log_stats": True},
        {"revision": "other"},
        {"generation_config": "vllm"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_what_changes_no_byte_splits_nothing(model: Path, settings: Settings):
    ours, theirs = namespace(engine(model)), namespace(engine(model, settings))
    assert explain_difference(ours.document, theirs.document) == "the documents say the same"
    assert ours.hex == theirs.hex


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("parallel_config", "rank", 3),
        ("parallel_config", "data_parallel_rank", 1),
        ("parallel_config", "data_parallel_size", 4),
        ("parallel_config", "master_addr", "10.0.0.7"),
        ("parallel_config", "master_port", 1234),
        ("cache_config", "num_gpu_blocks", 77),
        # What the worker of one rank writes into the configuration that it alone shares with the scheduler.
        ("cache_config", "hash_block_size", 16),
        *([("cache_config", "cache_hit_alignment_tokens", 16)] if SINCE_0_30 else []),
        ("cache_config", "kv_cache_memory_bytes", 1 << 30),
        ("load_config", "download_dir", "/elsewhere"),
        ("compilation_config", "cache_dir", "/elsewhere"),
        ("compilation_config", "compilation_time", 3.0),
    ],
)
def test_what_differs_between_pods_of_a_deployment_splits_nothing(model: Path, part: str, field: str, value: Any):
    ours, config = namespace(engine(model)), engine(model)
    object.__setattr__(getattr(config, part), field, value)
    assert namespace(config).hex == ours.hex


def test_the_order_in_which_settings_are_written_splits_nothing(tmp_path: Path, model: Path):
    turned = write_tiny_llama(tmp_path / "turned")
    (turned / "config.json").write_text((model / "config.json").read_text())
    ours = facts_of(engine(model, {"additional_config": {"a": 1, "b": 2}}))
    assert Namespace.of(ours).hex == namespace(engine(turned, {"additional_config": {"b": 2, "a": 1}})).hex


# --- whatever the next vLLM brings -----------------------------------------------------------------------------------

CLASSES = {name: getattr(vllm.config, name) for name in CONFIG_FIELDS if hasattr(vllm.config, name)} | {
    "PassConfig": PassConfig,
    "IrOpPriorityConfig": IrOpPriorityConfig,
}


@pytest.mark.parametrize("name", sorted(CONFIG_FIELDS))
def test_every_field_of_vllm_s_configuration_is_in_or_out_for_a_reason(name: str):
    listed, there = CONFIG_FIELDS[name], {field.name for field in dataclasses.fields(CLASSES[name])}
    reasons = [names for names in listed.outside.values()]
    assert sum(map(len, reasons)) == len(listed.left_out), "a field is left out for two reasons"
    assert not listed.inside & listed.left_out
    assert there - listed.inside - listed.left_out == set(), "classify each: do a block's bytes depend on it?"
    if not SINCE_0_30:
        assert (FIRST[name].inside | FIRST[name].left_out) - there == set(), "vLLM 0.23 has no such field"


def test_every_configuration_inside_another_is_listed(model: Path):
    """A class that is not classified would be taken whole, its places and sizes with it."""
    settings = {"enable_lora": True, "speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}
    unlisted = set()

    def visit(value: object) -> None:
        if dataclasses.is_dataclass(value) and type(value).__module__.startswith("vllm.config"):
            listed = CONFIG_FIELDS.get(type(value).__name__)
            if listed is None:
                unlisted.add(type(value).__name__)
                return
            for name in listed.inside:
                visit(getattr(value, name, None))  # of one generation

    visit(engine(model, settings))
    assert unlisted == set()


def test_every_variable_of_vllm_is_in_or_out():
    known = set(envs.compile_factors())
    counted, left_out = ENVIRONMENT | ENVIRONMENT_ADDED, ENVIRONMENT_LEFT_OUT | ENVIRONMENT_LEFT_OUT_ADDED
    assert not counted & left_out
    assert known - counted - left_out == set()
    if not SINCE_0_30:
        assert (ENVIRONMENT | ENVIRONMENT_LEFT_OUT) - known == set()


def test_vllm_reads_max_model_len_where_somebody_has_looked():
    """Layers and models that read it may compute other bytes for another length."""
    root = Path(vllm.__file__).parent
    found = {
        path.relative_to(root).as_posix().removeprefix("model_executor/")
        for part in ("model_executor/layers", "model_executor/models", "models")
        for path in (root / part).rglob("*.py")
        if re.search(r"config\.max_model_len|config\(\)\.model_config\.max_model_len", path.read_text())
    }
    if SINCE_0_30:
        assert found - set(LENGTH_READERS) - set(LENGTH_READERS_ADDED) == set()
    else:
        assert found == set(LENGTH_READERS)


LENGTH_READERS = {
    "layers/attention/mla_attention.py": "the size of a workspace",
    "layers/attention/static_sink_attention.py": "a number of blocks",
    "layers/rotary_embedding/phi3_long_rope_scaled_rope.py": "the factors of the rotation: longrope is in by its type",
    "models/config.py": "the size of a state's block, which is in; the rotation of encoders",
    "models/deepseek_v2.py": "the size of a buffer",
    "models/deepseek_v4/attention.py": "the size of a buffer",
    "models/deepseek_v4/compressor.py": "the size of a buffer",
    "models/deepseek_v4/sparse_mla.py": "the size of a buffer",
    "models/internvl.py": "multimodal: in",
    "models/llama4.py": "a temperature beyond 32,768 tokens: in by its architecture",
    "models/minimax_m2.py": "the longest position of the rotation: dynamic is in by its type",
    "models/minimax_text_01.py": "as minimax_m2",
    "models/nano_nemotron_vl.py": "multimodal: in",
    "models/plamo2.py": "as minimax_m2",
    "models/plamo3.py": "as minimax_m2",
    "models/qwen2_5_vl.py": "multimodal: in",
    "models/qwen2_vl.py": "multimodal: in",
    "models/qwen3_vl.py": "multimodal: in",
    "models/step3_vl.py": "multimodal: in",
    "models/voxtral.py": "multimodal: in",
}
LENGTH_READERS_ADDED = {  # by 0.30 and later
    "layers/attention/sparse_mla_attention.py": "the size of a workspace",
    "layers/quantization/modelopt_block_quant.py": "the size of a buffer",
    "layers/rocm_paged_mxfp4_indexer.py": "the size of a buffer",
    "models/cohere_compass.py": "multimodal: in",
    "models/deepseek_ocr.py": "multimodal: in",
    "models/deepseek_v32/attention.py": "the size of a buffer",
    "models/deepseek_v4/amd/mono_decode.py": "the size of a buffer",
    "models/deepseek_v4/common/ops/cache_utils.py": "the size of a block table",
    "models/deepseek_v41/attention.py": "the size of a buffer",
    "models/deepseek_v41/common/vl_cudagraph.py": "multimodal: in",
    "models/deepseek_v41/compressor.py": "the size of a buffer",
    "models/deepseek_vl2.py": "multimodal: in",
    "models/dots3_note/common/processor.py": "multimodal: in",
    "models/embedding_gemma2.py": "as minimax_m2",
    "models/ernie45_vl.py": "multimodal: in",
    "models/gemma3_mm.py": "multimodal: in",
    "models/gemma4_mm.py": "multimodal: in",
    "models/glm4_1v.py": "multimodal: in",
    "models/glm5next/common/attention.py": "the size of a buffer",
    "models/glm5next/nvidia/attention.py": "the size of a buffer",
    "models/hy_v4/nvidia/attention.py": "the size of a buffer",
    "models/idefics3.py": "multimodal: in",
    "models/inkling/amd/attention.py": "a bound for how a sum is split",
    "models/inkling/nvidia/attention.py": "a bound for how a sum is split",
    "models/inkling/nvidia/ops/fa4_rel_attention.py": "a bound for how a sum is split",
    "models/kimi_k25.py": "multimodal: in",
    "models/kimi_k3/nvidia/model.py": "multimodal: in",
    "models/kimi_k3/nvidia/specialized_decode/runtime/__init__.py": "the size of a buffer",
    "models/kimi_vl.py": "multimodal: in",
    "models/lfm2_vl.py": "multimodal: in",
    "models/minicpmv.py": "multimodal: in",
    "models/minimax_m3/amd/indexer_aiter.py": "the size of a block table",
    "models/minimax_m3/amd/indexer_context_parallel.py": "the size of a block table",
    "models/minimax_m3/amd/indexer_msa.py": "the size of a block table",
    "models/minimax_m3/amd/sparse_attention_msa.py": "the size of a block table",
    "models/minimax_m3/common/encoder_cudagraph.py": "multimodal: in",
    "models/mllama4.py": "multimodal: in",
    "models/muse_spark/amd/model.py": "as minimax_m2",
    "models/muse_spark/nvidia/model.py": "as minimax_m2",
    "models/step5/nvidia/model.py": "as minimax_m2",
    "models/transformers/utils.py": "whether a rotation is computed again: dynamic and longrope are in by their types",
    "models/voxtral_realtime.py": "multimodal: in",
}


# --- values and refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"), [({1: "a"}, {"1": "a"}), (1, True), (torch.float16, torch.bfloat16), ([1], {"a": 1})]
)
def test_different_values_never_look_alike(one: object, other: object):
    assert json.dumps(json_value(one, "x")) != json.dumps(json_value(other, "x"))


def test_a_value_that_cannot_be_compared_is_refused():
    with pytest.raises(ConfigError, match=r"additional_config\.hook: a generator cannot be compared"):
        json_value({"hook": (_ for _ in ())}, "additional_config")


def test_credentials_are_neither_written_down_nor_part_of_it(model: Path):
    """A loader's settings may hold those of the store that the weights come from."""
    config = engine(model)
    documents = set()
    for secret in ("one", "other"):
        given = {"s3_secret_access_key": secret, "auth_token": secret, "password": secret, "bos_token_id": 1}
        config.load_config.model_loader_extra_config = given
        documents.add(namespace(config).document)
    (document,) = documents
    assert b"bos_token_id" in document
    assert not {b"s3_secret_access_key", b"auth_token", b"password"} & set(re.findall(rb'"(\w+)":', document))


def test_a_set_has_no_order():
    assert json_value({"b", "a", "c"}, "x") == ["a", "b", "c"]


@pytest.mark.skipif(SINCE_0_30, reason="vLLM 0.30 has no scales that are taken from a request")
def test_scales_taken_from_the_first_request_are_refused(model: Path):
    require_shareable_scales(engine(model, {"calculate_kv_scales": True}))  # bfloat16: there are no scales
    with pytest.raises(ConfigError, match="calculate_kv_scales with kv_cache_dtype 'fp8"):
        require_shareable_scales(engine(model, {"calculate_kv_scales": True, "kv_cache_dtype": "fp8_e5m2"}))


def test_weights_that_cannot_be_identified_are_refused(model: Path, monkeypatch: pytest.MonkeyPatch):
    config = engine(model)
    monkeypatch.setattr(config.model_config, "model", "unknown/model")
    with pytest.raises(ConfigError, match="name the weights' version"):
        namespace(config)
    assert namespace(config, weights_version="7").hex != namespace(config, weights_version="8").hex
