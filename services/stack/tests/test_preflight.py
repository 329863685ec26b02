import dataclasses
import json
from pathlib import Path

import pytest

from spillway_engine.machine import Machine
from spillway_engine.memory_budget import plan_memory
from spillway_engine.model_shape import ModelShape
from spillway_engine.settings_reader import engine_settings
from spillway_stack.bundled_model import PreparedModel
from spillway_stack.components import engine_configuration
from spillway_stack.preflight import check_machine, disk_problems, memory_problems, pipeline_problems
from spillway_stack.settings import StackSettings
from spillway_stack.state_folder import StateFolder

SHAPE = ModelShape(30, 3, 64, None, "bfloat16", 8192, 269_060_552)
MACHINE = Machine("cpu", frozenset({"avx512_bf16"}), (0, 1), 12 << 30, "MemAvailable", 6 << 30, 6 << 30)
MODEL = PreparedModel("/models/m", "m", bundled=False, tokenizer=None)


def problems(settings: StackSettings, machine: Machine) -> list[str]:
    tree = engine_configuration(settings, MODEL, StateFolder(Path("/state")), 0)
    budget = plan_memory(engine_settings(tree), SHAPE, machine)
    return memory_problems(settings, machine, budget)


def test_twelve_free_gigabytes_take_the_default_stack_in_either_dtype() -> None:
    assert problems(StackSettings(), MACHINE) == []
    assert problems(StackSettings(), dataclasses.replace(MACHINE, cpu_flags=frozenset())) == []


def test_all_engines_count_together() -> None:
    (problem,) = problems(StackSettings(engines=5), MACHINE)

    assert problem.startswith("5 engines, gateway and tiers need ")
    assert "12.0 GiB is available (MemAvailable); end other programs, or lower ENGINES" in problem


def test_shared_memory_counts_together_too() -> None:
    (problem,) = problems(StackSettings(), dataclasses.replace(MACHINE, shared_memory_free_bytes=600 << 20))

    assert problem.startswith("2 engines need ")
    assert "of /dev/shm, 600.0 MiB is free; lower NUM_CPU_BLOCKS or ENGINES" in problem


def test_a_full_disk_is_reported(tmp_path: Path) -> None:
    (problem,) = disk_problems(tmp_path, needed_bytes=1 << 60)

    assert "free, the stack's logs and NVMe tier need" in problem
    assert disk_problems(tmp_path, needed_bytes=0) == []


def test_a_whole_check_on_this_machine(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 64, "max_position_embeddings": 64})
    )
    model = PreparedModel(str(tmp_path), "m", bundled=False, tokenizer=None)
    settings = StackSettings(engines=1, max_length=1024, offload=False)

    (problem,) = check_machine(settings, model, StateFolder(tmp_path), [])
    assert problem == (
        "MAX_LENGTH=1024 tokens, the model's config.json allows 64; set MAX_LENGTH <= 64, or stretch the model by "
        "--hf-overrides in ENGINE_ARGS"
    )
    assert check_machine(dataclasses.replace(settings, max_length=64), model, StateFolder(tmp_path), []) == []


def test_what_overrides_ask_for_is_what_is_checked(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 64, "max_position_embeddings": 8192}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = PreparedModel(str(tmp_path), "m", bundled=False, tokenizer=None)
    settings = StackSettings(engines=1, offload=False, engine_overrides=("blockSize=64",))

    (problem,) = check_machine(settings, model, StateFolder(tmp_path), [])
    assert problem.startswith(
        "DEVICE_BLOCKS=80 of 64 tokens hold no prompt of MAX_LENGTH=8192; set DEVICE_BLOCKS >= 129"
    )


@pytest.mark.parametrize(
    ("stages", "versions", "platform", "refused"),
    [
        (2, ("0.32",), "cpu", True),
        (2, ("0.23", "0.30"), "cpu", True),
        (2, ("0.23",), "cpu", False),
        (1, ("0.32",), "cpu", False),
        (2, ("0.32",), "cuda", False),
    ],
)
def test_pipelines_of_a_vllm_that_has_none_on_cpus(
    stages: int, versions: tuple[str, ...], platform: str, refused: bool
) -> None:
    settings = StackSettings(vllm=versions, engine_overrides=(f"pipelineParallelSize={stages}",))
    tree = engine_configuration(settings, MODEL, StateFolder(Path("/state")), 0)
    engine = engine_settings(tree, settings.engine_overrides)
    found = pipeline_problems(engine, versions, platform)

    assert bool(found) is refused
    if refused:
        assert found[0].startswith(
            f"ENGINE_SET=pipelineParallelSize=2 needs vLLM 0.23 on CPUs, but VLLM={','.join(versions)} given"
        )
        assert found[0].endswith("set VLLM=0.23 or ENGINE_SET=pipelineParallelSize=1")
