import dataclasses
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from spillway_connector.tiers.disk.slab.layout import copies_bytes
from spillway_engine.machine import Machine
from spillway_engine.memory_budget import MemoryBudget, choose_dtype, plan_memory
from spillway_engine.model_shape import ModelShape
from spillway_engine.settings import EngineSettings
from spillway_engine.settings_reader import read_settings

SMOLLM2 = ModelShape(30, 3, 64, None, "bfloat16", 8192, 269_060_552)
AVX512 = Machine("cpu", frozenset({"avx512f", "avx512_bf16"}), (0, 1), 12 << 30, "MemAvailable", 6 << 30, 6 << 30)
AVX2 = dataclasses.replace(AVX512, cpu_flags=frozenset({"avx2"}))
H200 = dataclasses.replace(AVX512, platform="cuda")


def settings(**offload: Any) -> EngineSettings:
    return read_settings(
        EngineSettings, {"model": {"path": "/m"}, "deviceBlocks": 80, "offload": offload or {"numCpuBlocks": 96}}
    )


def test_of_the_tier_of_a_node_an_engine_has_page_tables_alone() -> None:
    def needed(**node: Any) -> MemoryBudget:
        return plan_memory(settings(numCpuBlocks=96, nodeTier={"bytes": "64GiB", **node}), SMOLLM2, AVX512)

    alone, private, refuse = plan_memory(settings(), SMOLLM2, AVX512), needed(), needed(fallback="refuse")
    tables = (64 << 30) // 512 * 2  # of the scheduler's process and the rank's
    assert private.memory_needed_bytes == alone.memory_needed_bytes + tables
    assert refuse.memory_needed_bytes == private.memory_needed_bytes - alone.cpu_tier_bytes
    assert (refuse.cpu_chunks, refuse.node_tier_chunks) == (0, (64 << 30) // 2_949_120)
    assert refuse.fits
    assert refuse.warnings == ()
    (problem,) = needed(bytes=4096).problems
    assert problem.startswith("offload.nodeTier.bytes: 4.0 KiB holds no chunk of 2.8 MiB") or "4,096 B" in problem
    (warning,) = needed(bytes="8MiB").warnings
    assert "offload.nodeTier.bytes >= " in warning


def test_smollm2_in_bfloat16() -> None:
    budget = plan_memory(settings(), SMOLLM2, AVX512)

    assert budget.bytes_per_token == 23_040
    assert budget.bytes_per_block == 2_949_120
    assert budget.cpu_row_bytes == 2_949_120  # a multiple of 4096 already
    assert budget.cpu_tier_bytes == 96 * 2_949_120
    assert budget.device_bytes == 80 * 2_949_120
    assert budget.cpu_tier_tokens == 12_288
    assert budget.fits


def test_smollm2_in_float32_where_the_cores_lack_bfloat16() -> None:
    budget = plan_memory(settings(), SMOLLM2, AVX2)

    assert budget.dtype == "float32"
    assert budget.bytes_per_token == 46_080
    assert budget.cpu_tier_bytes == 96 * 5_898_240


def test_a_kv_cache_of_its_own_dtype_halves_every_tier() -> None:
    given = structs.replace(settings(), model=structs.replace(settings().model, kv_cache_dtype="fp8"))
    budget = plan_memory(given, SMOLLM2, AVX512)

    assert (budget.dtype, budget.kv_dtype, budget.bytes_per_token) == ("bfloat16", "fp8", 11_520)
    assert budget.cpu_tier_bytes * 2 == plan_memory(settings(), SMOLLM2, AVX512).cpu_tier_bytes


def test_quantised_weights_are_counted_as_the_files_have_them() -> None:
    quantised = structs.replace(settings(), model=structs.replace(settings().model, quantization="awq"))
    plain, kept = (plan_memory(given, SMOLLM2, AVX2) for given in (settings(), quantised))

    assert plain.dtype == kept.dtype == "float32"
    assert plain.memory_needed_bytes - kept.memory_needed_bytes == SMOLLM2.weight_bytes


def test_scales_of_heads_need_heads() -> None:
    given = structs.replace(settings(), model=structs.replace(settings().model, kv_cache_dtype="fp8_per_token_head"))
    latent = dataclasses.replace(SMOLLM2, latent_dim=576)

    (problem,) = [text for text in plan_memory(given, latent, H200).problems if "MLA" in text]
    assert problem.startswith("model.kvCacheDtype: fp8_per_token_head keeps a scale for each head")
    assert problem.endswith("set it to auto or fp8")


@pytest.mark.parametrize(
    ("machine", "asked", "dtype"),
    [
        (AVX512, "auto", "bfloat16"),
        (AVX2, "auto", "float32"),
        (AVX2, "bfloat16", "bfloat16"),  # what is asked for by name is done
        (dataclasses.replace(AVX2, cpu_flags=frozenset({"amx_bf16"})), "auto", "bfloat16"),
        (H200, "auto", "bfloat16"),
    ],
)
def test_dtype_follows_the_cores(machine: Machine, asked: str, dtype: str) -> None:
    given = read_settings(EngineSettings, {"model": {"path": "/m", "dtype": asked}})

    assert choose_dtype(given, SMOLLM2, machine) == dtype


def test_too_many_chunks_for_shared_memory_says_how_many_fit() -> None:
    machine = dataclasses.replace(AVX512, shared_memory_free_bytes=1 << 30)

    (problem,) = plan_memory(settings(numCpuBlocks=2000), SMOLLM2, machine).problems

    assert problem.startswith(
        "offload.numCpuBlocks: 2000 needs 5.6 GiB of /dev/shm, 1.0 GiB is free; set offload.numCpuBlocks <= "
    )
    assert problem.endswith("or enlarge /dev/shm")


def test_the_advised_number_of_chunks_fits() -> None:
    machine = dataclasses.replace(AVX512, shared_memory_free_bytes=1 << 30)
    (problem,) = plan_memory(settings(numCpuBlocks=2000), SMOLLM2, machine).problems
    advised = int(problem.split("<= ")[1].split()[0])

    assert plan_memory(settings(numCpuBlocks=advised), SMOLLM2, machine).fits
    assert not plan_memory(settings(numCpuBlocks=advised + 1), SMOLLM2, machine).fits


def test_bytes_become_whole_chunks() -> None:
    budget = plan_memory(settings(cpuBytes="512MiB"), SMOLLM2, AVX512)

    assert budget.cpu_chunks == (512 << 20) // 2_949_120


def test_bytes_for_less_than_one_chunk_are_refused() -> None:
    (problem,) = plan_memory(settings(cpuBytes="1MiB"), SMOLLM2, AVX512).problems

    assert "holds no chunk of 2.8 MiB; set offload.cpuBytes >= 2949120" in problem


def test_every_core_holds_the_index_of_slabs() -> None:
    def needed(nvme: dict[str, Any]) -> MemoryBudget:
        given = settings(numCpuBlocks=96, sharedTier={"type": "nvme", "nvme": {"path": "/kv", **nvme}})
        return plan_memory(given, SMOLLM2, AVX512)

    slabs, files = needed({"maxBytes": "1TiB"}), needed({"maxBytes": "1TiB", "mode": "files"})
    unbounded = needed({})
    assert slabs.tier_index_bytes == copies_bytes(slabs.cpu_row_bytes, 1 << 40)
    assert slabs.memory_needed_bytes - files.memory_needed_bytes == slabs.tier_index_bytes
    assert files.tier_index_bytes == unbounded.tier_index_bytes == 0  # the file system's size is not known here


@pytest.mark.parametrize(
    ("tier", "keys"),
    [
        ({"type": "nvme", "storeQueueBytesMax": "2MiB"}, ["storeQueueBytesMax"]),
        ({"type": "nvme", "nvme": {"maxBytes": "2MiB", "tenantMaxBytes": "1MiB"}}, ["maxBytes", "tenantMaxBytes"]),
        ({"type": "redis", "loadQueueBytesMax": 1, "redis": {"tenantMaxBytes": 1}}, ["loadQueue", "tenantMaxBytes"]),
        ({"type": "redis", "nvme": {"maxBytes": 1}}, []),  # of a tier that is not in use
        ({"type": "nvme", "storeQueueBytesMax": 2_949_120}, []),
    ],
)
def test_a_bound_that_lets_no_chunk_through_is_refused(tier: dict[str, Any], keys: list[str]) -> None:
    problems = plan_memory(settings(numCpuBlocks=96, sharedTier=tier), SMOLLM2, AVX512).problems

    assert len(problems) == len(keys)
    for key, problem in zip(keys, problems, strict=True):
        assert key in problem and "holds no chunk of 2.8 MiB; set it to 2949120 or more" in problem


def test_an_engine_too_large_for_memory_is_refused_with_the_source_of_the_limit() -> None:
    machine = dataclasses.replace(AVX512, memory_available_bytes=3 << 30, memory_limit_source="cgroup limit")

    (problem,) = plan_memory(settings(numCpuBlocks=1000), SMOLLM2, machine).problems

    assert "is available (cgroup limit); set offload.numCpuBlocks <= " in problem


def test_a_device_cache_below_one_longest_prompt_is_refused() -> None:
    given = read_settings(
        EngineSettings, {"model": {"path": "/m"}, "deviceBlocks": 40, "offload": {"numCpuBlocks": 96}}
    )

    (problem,) = plan_memory(given, SMOLLM2, AVX512).problems

    assert "set deviceBlocks >= 65 or model.maxLength <= 4992" in problem


def test_a_longer_context_than_the_model_has_is_refused() -> None:
    given = read_settings(EngineSettings, {"model": {"path": "/m", "maxLength": 9000}, "offload": {"enabled": False}})

    assert "set model.maxLength <= 8192" in plan_memory(given, SMOLLM2, AVX512).problems[0]


def test_a_cpu_tier_below_one_longest_prompt_is_a_warning() -> None:
    budget = plan_memory(settings(numCpuBlocks=32), SMOLLM2, AVX512)

    assert budget.fits
    assert "holds 4,096 tokens (32 chunks of 128)" in budget.warnings[0]
    assert "set offload.numCpuBlocks >= 64" in budget.warnings[0]


def test_an_engine_without_offload_needs_no_tier() -> None:
    budget = plan_memory(settings(enabled=False), SMOLLM2, AVX512)

    assert (budget.cpu_chunks, budget.cpu_tier_bytes, budget.warnings) == (0, 0, ())


def test_only_a_cpu_engine_gets_a_device_cache_chosen() -> None:
    given = read_settings(EngineSettings, {"model": {"path": "/m"}, "offload": {"enabled": False}})

    assert plan_memory(given, SMOLLM2, H200).device_blocks is None
    assert plan_memory(given, SMOLLM2, AVX512).device_blocks == 4 * 64 + 1


def test_the_report_is_plain_and_says_whether_it_fits() -> None:
    report = plan_memory(settings(), SMOLLM2, AVX512).report()

    assert report["fits"] is True
    assert set(report) == {field.name for field in dataclasses.fields(MemoryBudget)} | {"fits"}


shapes = st.builds(
    ModelShape,
    layers=st.integers(1, 100),
    kv_heads=st.sampled_from([1, 2, 3, 8, 32]),
    head_dim=st.sampled_from([64, 96, 128]),
    latent_dim=st.none() | st.just(576),
    dtype=st.just("bfloat16"),
    max_length=st.none(),
    weight_bytes=st.integers(0, 1 << 30),
    sliding_layers=st.integers(0, 1),  # of at least one layer
)
machines = st.builds(
    Machine,
    platform=st.sampled_from(["cpu", "cuda", "npu"]),
    cpu_flags=st.sampled_from([frozenset[str](), frozenset({"avx512_bf16"})]),
    cores=st.just((0, 1)),
    memory_available_bytes=st.integers(1 << 30, 1 << 41),
    memory_limit_source=st.just("MemAvailable"),
    shared_memory_free_bytes=st.integers(0, 1 << 40),
    shared_memory_total_bytes=st.just(1 << 40),
)


@given(
    shape=shapes,
    machine=machines,
    chunks=st.integers(1, 100_000),
    ranks=st.sampled_from([1, 2, 4, 8]),
    stages=st.integers(1, 4),
    per_chunk=st.integers(1, 16),
)
def test_rows_hold_their_chunks_and_are_whole_pages(
    shape: ModelShape, machine: Machine, chunks: int, ranks: int, stages: int, per_chunk: int
) -> None:
    given = read_settings(
        EngineSettings,
        {
            "model": {"path": "/m"},
            "tensorParallelSize": ranks,
            "pipelineParallelSize": stages,
            "offload": {"numCpuBlocks": chunks, "blocksPerChunk": per_chunk},
        },
    )
    budget = plan_memory(given, shape, machine)

    assert budget.cpu_row_bytes % 4096 == 0
    assert budget.bytes_per_block % budget.kv_groups == 0
    assert 0 <= budget.cpu_row_bytes - budget.bytes_per_block // budget.kv_groups * per_chunk < 4096
    assert budget.cpu_tier_tokens == chunks // budget.kv_groups * per_chunk * given.block_size
    assert budget.cpu_tier_bytes == chunks * budget.cpu_row_bytes
    assert budget.shared_memory_needed_bytes > budget.cpu_tier_bytes
    assert budget.memory_needed_bytes > budget.shared_memory_needed_bytes
    if budget.fits:
        assert budget.memory_needed_bytes <= machine.memory_available_bytes
        assert budget.shared_memory_needed_bytes <= machine.shared_memory_free_bytes


@given(shape=shapes, machine=machines, cores=st.integers(2, 8), ranks=st.sampled_from([1, 2]))
def test_every_data_parallel_rank_needs_what_an_engine_needs(
    shape: ModelShape, machine: Machine, cores: int, ranks: int
) -> None:
    tree = {"model": {"path": "/m"}, "deviceBlocks": 65, "tensorParallelSize": ranks, "offload": {"numCpuBlocks": 9}}
    one, several = (
        plan_memory(read_settings(EngineSettings, {**tree, "dataParallelSize": size}), shape, machine)
        for size in (1, cores)
    )

    assert (several.device_blocks, several.cpu_chunks, several.cpu_row_bytes) == (65, 9, one.cpu_row_bytes)
    assert (several.bytes_per_token, several.cpu_tier_tokens) == (one.bytes_per_token, one.cpu_tier_tokens)
    assert several.cpu_tier_bytes == cores * one.cpu_tier_bytes
    assert several.shared_memory_needed_bytes == cores * one.shared_memory_needed_bytes
    assert several.memory_needed_bytes == cores * one.memory_needed_bytes


# With room for some chunks and not for all, else nothing is advised.
@given(
    shape=shapes,
    machine=st.builds(
        dataclasses.replace,
        machines,
        memory_available_bytes=st.integers(1 << 36, 1 << 41),
        shared_memory_free_bytes=st.integers(1 << 34, 1 << 40),
    ),
    chunks=st.integers(1 << 16, 1 << 28),
    cores=st.integers(1, 4),
)
def test_following_the_advice_ends_in_a_start(shape: ModelShape, machine: Machine, chunks: int, cores: int) -> None:
    """An engine that follows the advice about the CPU tier gets no further complaint about the CPU tier."""
    given = read_settings(
        EngineSettings,
        {
            "model": {"path": "/m"},
            "deviceBlocks": 65,
            "dataParallelSize": cores,
            "offload": {"numCpuBlocks": chunks},
        },
    )
    complaints = [problem for problem in plan_memory(given, shape, machine).problems if "numCpuBlocks" in problem]
    advised = [re.search(r"set offload\.numCpuBlocks <= (\d+)", problem) for problem in complaints]
    numbers = [int(match[1]) for match in advised if match is not None]
    # Where not even one chunk fits, the advice is about the machine and not about the tier.
    if len(numbers) < len(complaints) or not numbers:
        return
    lowered = structs.replace(given, offload=structs.replace(given.offload, num_cpu_blocks=min(numbers)))

    assert not any("numCpuBlocks" in problem for problem in plan_memory(lowered, shape, machine).problems)


@given(shape=shapes, machine=machines, fewer=st.integers(1, 1000), more=st.integers(1, 1000))
def test_what_fits_also_fits_smaller(shape: ModelShape, machine: Machine, fewer: int, more: int) -> None:
    larger = plan_memory(settings(numCpuBlocks=fewer + more), shape, machine)

    assert plan_memory(settings(numCpuBlocks=fewer), shape, machine).fits or not larger.fits
