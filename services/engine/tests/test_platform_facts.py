from dataclasses import replace

import pytest

from spillway_engine.model_shape import ModelShape
from spillway_engine.platform_facts import fact_contradictions, memory_contradictions
from spillway_engine.settings import EngineSettings
from spillway_engine.settings_reader import read_settings

SHAPE = ModelShape(36, 8, 128, None, "bfloat16", 40960, 0)


def problems(shape: ModelShape = SHAPE, platform: str = "npu", **tree: object) -> list[str]:
    base = {"model": {"path": "/m", "maxLength": 2048}, "offload": {"numCpuBlocks": 8}}
    given = read_settings(EngineSettings, base | tree)
    chunk_tokens = given.block_size * given.offload.blocks_per_chunk
    found = fact_contradictions(given, shape, platform, chunk_tokens, given.names)
    return [each.sentence(given.names) for each in found]


@pytest.mark.parametrize(("platform", "size", "fits"), [("npu", 128, True), ("npu", 64, False), ("cpu", 64, True)])
def test_blocks_fit_the_platforms_kernels(platform: str, size: int, fits: bool) -> None:
    found = problems(platform=platform, blockSize=size)

    assert found == (
        [] if fits else ["blockSize: 64 given, a multiple of 128 needed by the kernels of platform npu; set it to 128"]
    )


@pytest.mark.parametrize(("size", "fits"), [(256, True), (128, False), (512, False)])
def test_packed_layers_have_one_size_of_blocks(size: int, fits: bool) -> None:
    found = problems(replace(SHAPE, packed="deepseek-v4-flash"), blockSize=size)

    text = f"blockSize: {size} given, but this model's kernels take blocks of 256 tokens alone; set it to 256"
    assert found == ([] if fits else [text])


@pytest.mark.parametrize(("ranks", "better"), [(1, None), (4, None), (8, None), (16, None), (3, 2), (6, 4), (12, 8)])
def test_ranks_share_kv_heads_evenly(ranks: int, better: int | None) -> None:
    found = problems(tensorParallelSize=ranks)

    assert [text.rpartition("set it to ")[2] for text in found] == ([] if better is None else [str(better)])


@pytest.mark.parametrize(("stages", "fits"), [(1, True), (36, True), (37, False)])
def test_every_stage_has_a_layer(stages: int, fits: bool) -> None:
    layers = "37 stages for the model's 36 layers, of which every stage needs one; set it to 36 or less"

    assert problems(pipelineParallelSize=stages) == ([] if fits else [f"pipelineParallelSize: {layers}"])


@pytest.mark.parametrize(
    ("platform", "ranks", "experts"), [("cpu", 2, 0), ("cpu", 1, 8), ("npu", 2, 8), ("cuda", 2, 8)]
)
def test_data_parallel_ranks_of_experts_have_what_they_need(platform: str, ranks: int, experts: int) -> None:
    assert problems(replace(SHAPE, experts=experts), platform, dataParallelSize=ranks) == []


def test_no_data_parallel_ranks_of_experts_on_a_cpu() -> None:
    assert problems(replace(SHAPE, experts=8), "cpu", dataParallelSize=2) == [
        "dataParallelSize: 2 ranks of a mixture of 8 experts need exchanges of tokens that vLLM's CPU platform does "
        "not have; set it to 1 and run more engines (replicas)"
    ]


def test_a_latent_is_on_every_rank() -> None:
    assert problems(replace(SHAPE, kv_heads=128, latent_dim=576), tensorParallelSize=3) == []


@pytest.mark.parametrize(("blocks", "fits"), [(16, True), (17, False)])
def test_some_prompt_fills_a_chunk(blocks: int, fits: bool) -> None:
    offload = {"numCpuBlocks": 8, "blocksPerChunk": blocks}

    assert bool(problems(offload=offload)) is not fits
    assert problems(offload=offload | {"enabled": False}) == []


@pytest.mark.parametrize(
    ("length", "given", "fits"),
    [
        (40960, {}, True),
        (65536, {}, False),
        (65536, {"extraArgs": ["--hf_overrides.max_position_embeddings=65536"]}, True),
        (65536, {"extraArgs": ['--hf-overrides={"max_position_embeddings": 65536}']}, True),
        (65536, {"extraArgs": ["--hf-config-path", "/other"]}, True),
        (65536, {"extraArgs": ["--rope-scaling={}"]}, False),
        (65536, {"extraEnv": {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}}, True),
        (65536, {"extraEnv": {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": " True"}}, True),
        (65536, {"extraEnv": {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "0"}}, False),
    ],
)
def test_no_prompt_is_longer_than_the_model_unless_vllm_is_given_a_longer_one(
    length: int, given: dict[str, object], fits: bool
) -> None:
    settings = read_settings(
        EngineSettings, {"model": {"path": "/m", "maxLength": length}, "offload": {"numCpuBlocks": 8}} | given
    )
    found = [each.sentence(settings.names) for each in memory_contradictions(settings, SHAPE, 1, settings.names)]
    problem = "model.maxLength: 65536 tokens, the model's config.json allows 40960; set model.maxLength <= 40960, or "
    assert found == ([] if fits else [problem + "stretch the model by --hf-overrides in extraArgs"])
