"""Settings against what is known of the platform and the model, before vLLM starts. Pure.

The engine service and `spillway check` judge by the same rules, as in setting_rules.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from spillway_connector.setting_names import SettingNames
from spillway_engine.extra_arguments import argument_name
from spillway_engine.model_shape import ModelShape
from spillway_engine.setting_rules import Contradiction
from spillway_engine.settings import EngineSettings
from spillway_engine.tier_settings import SHARED_TIER
from spillway_settings.byte_sizes import format_byte_count, parse_byte_count
from spillway_settings.values.engine import Engine

# Platform -> what a block's tokens are a multiple of, by the attention kernels.
BLOCK_TOKENS_MULTIPLE = {"npu": 128, "cuda": 16, "cpu": 16}
_OTHER_CONFIG = {"--hf-overrides", "--hf-config-path"}  # than the one in the model's folder


def fact_contradictions(
    engine: EngineSettings | Engine, shape: ModelShape, platform: str, chunk_tokens: int, names: SettingNames
) -> Iterator[Contradiction]:
    """Yield what cannot work on this platform with this model.

    Args:
        engine: the settings.
        shape: the shape of the model's KV cache.
        platform: cpu, cuda or npu.
        chunk_tokens: the tokens of a chunk, in blocks as vLLM makes them for this model.
        names: what other settings are called in the sentences.
    """
    yield from _blocks(engine, shape, platform)
    yield from _ranks(engine, shape, platform)
    longest, block = engine.model.max_length, engine.block_size
    if engine.offload.enabled and chunk_tokens > longest:
        remedy = f"set it to {longest // block} or less"
        if longest < block:
            remedy = f"raise {names.name('model.maxLength')} to {block} or more, or lower {names.name('blockSize')}"
        yield Contradiction(
            "offload.blocksPerChunk",
            engine.offload.blocks_per_chunk,
            f"blocks of {block} tokens are a chunk of {chunk_tokens}, which no prompt of "
            f"{names.given('model.maxLength', longest)} fills, so nothing would ever be spilled",
            remedy,
        )


def memory_contradictions(
    engine: EngineSettings | Engine, shape: ModelShape, row_bytes: int, names: SettingNames
) -> Iterator[Contradiction]:
    """Yield what contradicts the sizes of blocks and rows. row_bytes: of a row of the CPU tier. `names`: as above."""
    length, blocks = engine.model.max_length, engine.device_blocks
    if shape.max_length and length > shape.max_length and not _is_stretched(engine):
        yield Contradiction(
            "model.maxLength",
            length,
            f"tokens, the model's config.json allows {shape.max_length}",
            f"set {names.name('model.maxLength')} <= {shape.max_length}, or stretch the model by --hf-overrides in "
            f"{names.name('extraArgs')}",
        )
    least = least_device_blocks(engine)
    if blocks is not None and blocks < least:
        yield Contradiction(
            "deviceBlocks",
            blocks,
            f"of {engine.block_size} tokens hold no prompt of {names.given('model.maxLength', length)}",
            f"set {names.name('deviceBlocks')} >= {least} or {names.name('model.maxLength')} <= "
            f"{(blocks - 1) * engine.block_size}",
        )
    kv_dtype = engine.model.kv_cache_dtype
    if shape.latent_dim and kv_dtype.endswith("_per_token_head"):
        yield Contradiction(
            "model.kvCacheDtype",
            kv_dtype,
            "keeps a scale for each head, and this model's latent cache (MLA) has no heads",
            "set it to auto or fp8",
        )
    yield from _tier_bounds(engine, row_bytes, names)


def _is_stretched(engine: EngineSettings | Engine) -> bool:
    """Whether vLLM is given other positions than the model's, or is to go beyond them."""
    allows = str(engine.extra_env.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "")).strip().lower()
    return allows in ("1", "true") or not _OTHER_CONFIG.isdisjoint(map(argument_name, engine.extra_args))


def least_device_blocks(engine: EngineSettings | Engine) -> int:
    """One block more than the longest prompt: vLLM keeps block 0 for itself."""
    return -(-engine.model.max_length // engine.block_size) + 1


def _blocks(engine: EngineSettings | Engine, shape: ModelShape, platform: str) -> Iterator[Contradiction]:
    step, only = BLOCK_TOKENS_MULTIPLE.get(platform, 16), shape.only_block_size
    if engine.block_size % step:
        yield Contradiction(
            "blockSize",
            engine.block_size,
            f"given, a multiple of {step} needed by the kernels of platform {platform}",
            f"set it to {-(-engine.block_size // step) * step}",
        )
    if only is not None and engine.block_size != only:
        yield Contradiction(
            "blockSize",
            engine.block_size,
            f"given, but this model's kernels take blocks of {only} tokens alone",
            f"set it to {only}",
        )


def _ranks(engine: EngineSettings | Engine, shape: ModelShape, platform: str) -> Iterator[Contradiction]:
    ranks, heads = engine.tensor_parallel_size, shape.kv_heads
    if heads and not shape.latent_dim and not _share_evenly(heads, ranks):
        fitting = max(number for number in range(1, ranks + 1) if _share_evenly(heads, number))
        yield Contradiction(
            "tensorParallelSize",
            ranks,
            f"neither divides the model's {heads} KV heads nor is a multiple of them",
            f"set it to {fitting}",
        )
    stages = engine.pipeline_parallel_size
    if stages > shape.layers:
        yield Contradiction(
            "pipelineParallelSize",
            stages,
            f"stages for the model's {shape.layers} layers, of which every stage needs one",
            f"set it to {shape.layers} or less",
        )
    cores = engine.data_parallel_size
    if platform == "cpu" and cores > 1 and shape.experts:
        # CpuCommunicator of vLLM 0.23 and 0.32 has no all_gatherv: the first forward pass, at the start, would fail.
        yield Contradiction(
            "dataParallelSize",
            cores,
            f"ranks of a mixture of {shape.experts} experts need exchanges of tokens that vLLM's CPU platform does not "
            "have",
            "set it to 1 and run more engines (replicas)",
        )


def _tier_bounds(engine: EngineSettings | Engine, row_bytes: int, names: SettingNames) -> Iterator[Contradiction]:
    """A bound below one chunk lets nothing through, which would show only as dropped stores."""
    tier = engine.offload.shared_tier
    if not engine.offload.enabled or tier.type == "none":
        return
    types = (tier.type, tier.below.type)
    bounds: dict[str, str | float | None] = {
        "loadQueueBytesMax": tier.load_queue_bytes_max,
        "storeQueueBytesMax": tier.store_queue_bytes_max,
    }
    if tier.below.type != "none":
        bounds["below.loadQueueBytesMax"] = tier.below.load_queue_bytes_max
        bounds["below.storeQueueBytesMax"] = tier.below.store_queue_bytes_max
    if "nvme" in types:
        bounds |= {"nvme.maxBytes": tier.nvme.max_bytes, "nvme.tenantMaxBytes": tier.nvme.tenant_max_bytes}
    if "redis" in types:
        bounds["redis.tenantMaxBytes"] = tier.redis.tenant_max_bytes
    for key, bound in bounds.items():
        if bound is not None and parse_byte_count(bound) < row_bytes:
            yield Contradiction(
                SHARED_TIER + key,
                format_byte_count(parse_byte_count(bound)),
                f"holds no chunk of {format_byte_count(row_bytes)}",
                f"set it to {row_bytes} or more, or lower {names.name('offload.blocksPerChunk')}",
            )


def _share_evenly(heads: int, ranks: int) -> bool:
    """vLLM gives each rank several whole heads, or several ranks one head."""
    return not (heads % ranks if ranks < heads else ranks % heads)
