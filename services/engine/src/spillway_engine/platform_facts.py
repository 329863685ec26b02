"""Settings against what is known of the platform and the model, before vLLM starts. Pure.

`spillway check` says the same before a pod exists (services/ctl/src/spillway_ctl/check/model_rules.py);
tests/chart/mistakes.yaml ties the two.
"""

from __future__ import annotations

from spillway_engine.model_shape import ModelShape
from spillway_engine.settings import EngineSettings

# Platform -> what a block's tokens are a multiple of, by the attention kernels.
BLOCK_TOKENS_MULTIPLE = {"npu": 128, "cuda": 16, "cpu": 16}


def fact_problems(settings: EngineSettings, shape: ModelShape, platform: str) -> list[str]:
    """What cannot work on this platform with this model, each with what to change. `platform`: that of Machine."""
    names, offload, ranks = settings.names, settings.offload, settings.tensor_parallel_size
    problems = []
    step = BLOCK_TOKENS_MULTIPLE.get(platform, 16)
    if settings.block_size % step:
        problems.append(
            f"{names.given('blockSize', settings.block_size)}, a multiple of {step} needed on this platform "
            f"({platform}); set it to {-(-settings.block_size // step) * step}"
        )
    only = shape.only_block_size
    if only is not None and settings.block_size != only:
        problems.append(
            f"{names.given('blockSize', settings.block_size)}, but this model's kernels take blocks of {only} tokens "
            f"alone; set it to {only}"
        )
    if shape.latent_dim is None and not _share_evenly(shape.kv_heads, ranks):
        fitting = max(number for number in range(1, ranks + 1) if _share_evenly(shape.kv_heads, number))
        problems.append(
            f"{names.given('tensorParallelSize', ranks)} neither divides the model's {shape.kv_heads} KV heads nor is "
            f"a multiple of them; set it to {fitting}"
        )
    stages = settings.pipeline_parallel_size
    if stages > shape.layers:
        problems.append(
            f"{names.given('pipelineParallelSize', stages)} stages for the model's {shape.layers} layers, of which "
            f"every stage needs one; set it to {shape.layers} or less"
        )
    cores = settings.data_parallel_size
    if platform == "cpu" and cores > 1 and shape.experts:
        # CpuCommunicator of vLLM 0.23 and 0.32 has no all_gatherv: the first forward pass, at the start, would fail.
        problems.append(
            f"{names.given('dataParallelSize', cores)} ranks of a mixture of {shape.experts} experts need exchanges of "
            "tokens that vLLM's CPU platform does not have; set it to 1 and start more engines"
        )
    chunk_tokens, longest = offload.blocks_per_chunk * settings.block_size, settings.model.max_length
    if offload.enabled and chunk_tokens > longest:
        problems.append(
            f"{names.given('offload.blocksPerChunk', offload.blocks_per_chunk)} makes chunks of {chunk_tokens} tokens, "
            f"which no prompt of {names.given('model.maxLength', longest)} fills; "
            f"set it to {max(1, longest // settings.block_size)} or less"
        )
    return problems


def _share_evenly(heads: int, ranks: int) -> bool:
    """As vLLM has it: several whole heads for each rank, or one head for several ranks."""
    return not (heads % ranks if ranks < heads else ranks % heads)
