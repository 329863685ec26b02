"""A pod's memory by the chart: figures worked out by hand, and what of them reaches the pod."""

import json
from itertools import islice

import pytest
import yaml
from chart.helm_binaries import helms
from chart.rendering import CHART, pod_spec, quantity_bytes, render

from spillway_ctl.command import main as spillway
from spillway_engine.machine import Machine
from spillway_engine.memory_budget import plan_memory
from spillway_engine.model_shape import ModelShape
from spillway_engine.setting_rules import check_settings
from spillway_engine.settings import EngineSettings
from spillway_engine.settings_reader import read_settings

SHAPES = yaml.safe_load((CHART / "files" / "model-shapes.yaml").read_text())


def shape_of(preset: str) -> ModelShape:
    known = SHAPES[preset]
    return ModelShape(
        layers=known["layers"],
        kv_heads=known.get("kvHeads", 1),
        head_dim=known.get("headDim", 1),
        latent_dim=known.get("latentDim"),
        dtype=known["dtype"],
        max_length=None,
        weight_bytes=known["weightBytes"],
        sliding_layers=known.get("slidingLayers", 0),
        window_tokens=known.get("slidingWindow", 0),
        state_layers=known.get("stateLayers", 0),
        state_bytes=known.get("stateBytes", 0),
        packed=known.get("packed", ""),
    )


def machine(platform: str, memory_bytes: int, shared_bytes: int) -> Machine:
    return Machine(
        platform=platform,
        cpu_flags=frozenset(),
        cores=(0,),
        memory_available_bytes=memory_bytes,
        memory_limit_source="cgroup limit",
        shared_memory_free_bytes=shared_bytes,
        shared_memory_total_bytes=shared_bytes,
    )


def test_a_rendered_pod_is_as_large_as_the_arithmetic_says():
    """The figures themselves are compared in test_template_arithmetic.py; here they reach the pod and its engine."""
    sizes = ({"numCpuBlocks": 700}, {"cpuBytes": "90GiB"})
    engines = {
        f"m{key}": {
            "model": {
                "shape": {"preset": preset} | ({"weightBytes": "1GB"} if key else {}),
                "servedName": f"m{key}",
                "maxLength": 4096,
            },
            "offload": {**sizes[key % 2], "blocksPerChunk": 1 + key % 3},
            "accelerator": {"preset": "cpu" if key == 0 else "cce"},
            "tensorParallelSize": 1 if key == 0 else 4,
        }
        for key, preset in enumerate(("smollm2-135m", "qwen3-14b", "deepseek-v3", "llama-3.1-70b"))
    }
    rendered = render(values={"engines": engines, "gateway": {"resources": {"limits": {"memory": None}}}})
    for key, values in engines.items():
        name = f"chat-spillway-engine-{key}"
        files = rendered.named("ConfigMap", name)["data"]
        chart, resolved = json.loads(files["memory.json"]), yaml.safe_load(files["engine.yaml"])
        pod = pod_spec(rendered.named("StatefulSet", name))
        shared = next(volume for volume in pod["volumes"] if volume["name"] == "shared-memory")["emptyDir"]["sizeLimit"]
        limit = quantity_bytes(pod["containers"][0]["resources"]["limits"]["memory"])
        budget = plan_memory(
            check_settings(read_settings(EngineSettings, resolved)),
            shape_of(values["model"]["shape"]["preset"]),
            machine(resolved["platform"], limit, quantity_bytes(shared)),
        )

        assert 0 <= limit - chart["memoryLimitBytes"] < 1 << 20
        assert 0 <= quantity_bytes(shared) - chart["sharedMemoryBytes"] < 1 << 20
        assert (chart["cpuTierBytes"], chart["engineNeedsBytes"]) == (budget.cpu_tier_bytes, budget.memory_needed_bytes)
        assert budget.fits, budget.problems


@pytest.mark.parametrize(
    ("preset", "ranks", "blocks", "gibibytes"),
    [
        ("qwen3-14b", 4, 1000, 19.53),
        ("qwen3-32b", 8, 1000, 31.25),
        ("llama-3.1-8b", 1, 1000, 15.63),
        ("deepseek-v3", 16, 1000, 8.38),
    ],
)
def test_worked_examples(preset, ranks, blocks, gibibytes):
    values = {"model": {"shape": {"preset": preset}}, "tensorParallelSize": ranks, "offload": {"numCpuBlocks": blocks}}

    memory = json.loads(render(values={"engine": values}).one("ConfigMap", "engine")["data"]["memory.json"])

    assert memory["cpuTierBytes"] / 2**30 == pytest.approx(gibibytes, abs=0.06)


@pytest.mark.parametrize(
    ("path", "preset"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3.1-70B-Instruct", "llama-3.1-70b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", "deepseek-r1-distill-qwen-32b"),
        ("deepseek-ai/DeepSeek-V2-Lite-Chat", "deepseek-v2-lite"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m"),
        ("Qwen/Qwen3-32B-AWQ", "qwen3-32b"),
        ("unsloth/Qwen3-8B-unsloth-bnb-4bit", "qwen3-8b"),
        ("/models/Qwen3-8B_fp8", "qwen3-8b"),
        ("example/Qwen3-30B-A3B.w8a8", "qwen3-30b-a3b"),
        ("vllm-ascend/Qwen3-235B-A22B-w8a8-QuaRot", "qwen3-235b-a22b"),
        ("RedHatAI/Llama-3.1-8B-Instruct-NVFP4A16", "llama-3.1-8b"),
        ("google/gemma-3-12b-pt", "gemma-3-12b"),
        ("google/gemma-3-27b-it-qat-q4_0-unquantized", "gemma-3-27b"),
        ("ISTA-DASLab/gemma-3-27b-it-GPTQ-4b-128g", "gemma-3-27b"),
        ("OPEA/Qwen2.5-72B-Instruct-int4-sym-inc", "qwen2.5-72b"),
        ("Qwen/Qwen3-8B-FP8", "qwen3-8b"),
        ("Qwen/Qwen3-4B-Thinking-2507-FP8", "qwen3-4b"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "qwen2.5-7b"),
        ("RedHatAI/Llama-3.1-8B-Instruct-quantized.w8a8", "llama-3.1-8b"),
        ("RedHatAI/Qwen3-14B-FP8-dynamic", "qwen3-14b"),
        ("vllm-ascend/Qwen3-14B-W8A8", "qwen3-14b"),
        ("openai/gpt-oss-20b", "gpt-oss-20b"),
        ("google/gemma-3-4b-it", "gemma-3-4b"),
        ("RedHatAI/gemma-3-27b-it-quantized.w4a16", "gemma-3-27b"),
        ("zai-org/GLM-4.5-Air-FP8", "glm-4.5-air"),
        ("mistralai/Mistral-Small-3.2-24B-Instruct-2506", "mistral-small-3.2-24b"),
        ("Qwen/Qwen2.5-VL-7B-Instruct-AWQ", "qwen2.5-vl-7b"),
    ],
)
def test_models_are_recognised_by_their_path(path, preset):
    values = {"model": {"path": path, "maxLength": 4096, "shape": {"weightBytes": "1GB"}}}
    rendered = render(values={"engine": values})
    memory = json.loads(rendered.one("ConfigMap", "engine")["data"]["memory.json"])

    assert memory["bytesPerBlock"] == shape_of(preset).bytes_per_block("bfloat16", 1, 1, 128)


@pytest.mark.parametrize(
    ("path", "gigabytes"),
    [("Qwen/Qwen3-8B", 2 * 16.382), ("Qwen/Qwen3-8B-FP8", 16.382 * 5 / 8), ("Qwen/Qwen3-8B-AWQ", 16.382 * 3 / 8)],
)
def test_quantised_weights_are_smaller_and_stay_so(path, gigabytes):
    """A CPU computes in float32, which doubles weights of 16 bits."""
    values = {"model": {"path": path, "maxLength": 4096}, "offload": {"enabled": False}}
    values |= {"accelerator": {"preset": "cpu"}, "memory": {"marginPercent": 0}}
    rendered = render(values={"engine": values})
    without = render(values={"engine": {**values, "model": {**values["model"], "shape": {"weightBytes": 1}}}})
    needs = [
        json.loads(one.one("ConfigMap", "engine")["data"]["memory.json"])["podNeedsBytes"]
        for one in (rendered, without)
    ]

    assert (needs[0] - needs[1]) / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_numbers_by_hand_win_over_a_preset():
    shape = {"layers": 10, "kvHeads": 2, "headDim": 64}

    memory = json.loads(
        render(values={"engine": {"model": {"path": "acme/new-model", "shape": shape}}}).one("ConfigMap", "engine")[
            "data"
        ]["memory.json"]
    )

    assert memory["bytesPerToken"] == 2 * 10 * 2 * 64 * 2
    assert list(islice(memory, 1)) == ["bytesPerBlock"]


def test_a_row_holds_one_kv_group_of_a_model_with_two_kinds_of_layers():
    """Three groups of two layers: an engine with such a model has rows of 32,768 bytes (tests/engine_matrix)."""
    shape = {"layers": 6, "slidingLayers": 4, "kvHeads": 2, "headDim": 32, "dtype": "float32"}
    model = {"path": "a/b", "shape": {**shape, "weightBytes": "1MB"}, "dtype": "float32", "maxLength": 2048}
    engine = {"model": model, "blockSize": 32, "accelerator": {"preset": "cpu"}}
    rendered = render(values={"engine": {**engine, "offload": {"numCpuBlocks": 120}}})

    memory = json.loads(rendered.one("ConfigMap", "engine")["data"]["memory.json"])

    assert (memory["cpuRowBytes"], memory["kvGroups"]) == (32768, 3)
    assert memory["cpuTierBytes"] == 120 * 32768
    assert memory["groups"] == [[1, 0], [2, 0], [0, -1]]  # the window is not known


@pytest.mark.parametrize("preset", ["deepseek-v4-flash", "qwen3-next-80b-a3b", "gemma-3-27b"])
def test_a_shape_with_other_layers_has_none_of_its_presets_groups(preset):
    shape = {"preset": preset, "layers": 8, "kvHeads": 2, "headDim": 64}
    engine = {"model": {"path": "a/b", "shape": shape}, "accelerator": {"preset": "cuda"}}

    memory = json.loads(render(values={"engine": engine}).one("ConfigMap", "engine")["data"]["memory.json"])

    assert (memory["bytesPerToken"], memory["cpuRowBytes"]) == (2 * 8 * 2 * 64 * 2, 128 * 2 * 8 * 2 * 64 * 2)
    assert "groups" not in memory and "kvGroups" not in memory


@pytest.mark.parametrize(
    ("tier", "chunks"),
    [
        ({"type": "none"}, 0),
        ({"type": "redis", "redis": {"url": "redis://r"}}, 8 * 2),
        ({"type": "redis", "ioThreads": 10, "redis": {"url": "redis://r", "connections": 3}}, 10 * 2),
        (
            {
                "type": "redis",
                "ioThreads": 10,
                "redis": {"url": "redis://r"},
                "encryption": {"enabled": True, "keyId": "a", "keySecretName": "k"},
            },
            10 * 3,
        ),
    ],
)
def test_threads_of_the_shared_tier_have_their_buffers(tier, chunks):
    """Two chunks each, three where they are sealed on the way; queues hold references, no bytes."""
    memory, without = (
        json.loads(
            render(values={"engine": {"memory": {"marginPercent": 0}, "offload": {"sharedTier": shared}}}).one(
                "ConfigMap", "engine"
            )["data"]["memory.json"]
        )
        for shared in (tier, {"type": "none"})
    )

    assert memory["podNeedsBytes"] - without["podNeedsBytes"] == chunks * memory["cpuRowBytes"]


def test_the_plan_of_a_release_that_needs_operators_asks_no_cluster_for_them(tmp_path, capsys):
    values = {
        "engine": {"autoscaling": {"enabled": True, "trigger": "gateway", "minReplicas": 0}},
        "gateway": {"httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]}},
        "monitoring": {kind: {"enabled": True} for kind in ("podMonitor", "serviceMonitor", "alerts")},
    }
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))

    code = spillway(
        ["plan", "--chart", str(CHART), "--helm", str(helms()[0].path), "-f", str(tmp_path / "values.yaml")]
    )

    assert (code, "Qwen3-8B" in capsys.readouterr().out) == (0, True)
