"""The templates compute what Python computes: one table of cases, made from Python, in one render.

A render sizes the pods, so templates/_sizes.tpl and _memory.tpl read sizes and add up a pod's memory too, as
spillway_settings.byte_sizes and spillway_engine.memory_budget do.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import yaml
from chart.helm_binaries import helms
from chart.rendering import CHART, render
from size_cases import BYTES

from spillway_ctl.planned_tier import PlannedTier
from spillway_engine.drafters import with_drafter
from spillway_engine.machine import Machine
from spillway_engine.memory_budget import MemoryBudget, plan_memory
from spillway_engine.model_shape import ModelShape
from spillway_engine.settings import EngineSettings
from spillway_engine.settings_reader import read_settings
from spillway_settings.byte_sizes import parse_byte_count

SHAPES = yaml.safe_load((CHART / "files" / "model-shapes.yaml").read_text())
CASES = 150
# Beyond 8 PiB no pod is sized.
READ = {value: size for value, size in BYTES.items() if size <= 8 << 50}
# Of vLLM, with host memory of their own, as a person may write them.
ARGUMENTS = (
    *([] for _ in range(8)),
    ["--cpu-offload-gb=40"],
    ["--cpu_offload_gb", "2.5", "--cpu-offload-gb=1e1"],
    ["--offload-group-size=8", "--offload-num-in-group=2", "--cpu-offload-gb=4"],
    ["--offload-group-size", "3", "--offload-backend", "uva"],
    ["--offload-group-size=0", "--cpu-offload-gb=.5"],
    ["--enable-sleep-mode", "--enforce-eager"],
    ["--mm-processor-cache-gb=6"],
    ["--mm-processor-cache-type=shm"],
    ["--mm-processor-cache-gb=0", "--mm-processor-cache-type", "shm"],
    ["--mm-processor-cache-gb=-1"],
    ['--speculative-config={"method": "ngram", "num_speculative_tokens": 3}'],
    ["--speculative_config", '{"method": "eagle3", "model": "acme/drafter", "num_speculative_tokens": 3}'],
    ["-sc", '{"method": "qwen3_next_mtp", "num_speculative_tokens": 2}'],
    ["--speculative-config.model=acme/EAGLE-model", "--speculative-config.num_speculative_tokens=2"],
    ["--spec-method", "mtp", "--spec-tokens=1"],
    ["--spec-method=dspark", "--spec-tokens=5"],
    ["--spec-model", "acme/DSpark_qwen3"],
    ["--spec-method", "dflash", "--spec-model=acme/d"],
    ["--speculative-config=no JSON"],
    ["-sc", '{"method": "eagle"}', '--speculative-config={"method": "ngram"}'],
    ['--speculative-config={"method": "ngram"}', "-sc", '{"method": "eagle"}'],
    ["-sc.method=eagle3", "-sc.model", "acme/drafter"],
)
TEMPLATE = """\
{{- $_ := set $ "spillwayNames" ($.Files.Get "files/shared-names.json" | fromJson) }}
kind: Computed
sizes:{{ range .Values.sizes }}
- {{ include "spillway.bytes" . | quote }}{{ end }}
memory:{{ range .Values.memory }}
{{- $shape := dict }}{{ $out := dict }}
{{- include "spillway.shape" (dict "engine" .engine "path" "engine" "root" $ "out" $shape) }}
{{- include "spillway.memory" (dict "engine" .engine "path" "engine" "platform" .platform "shape" $shape
  "names" $.spillwayNames "out" $out) }}
- {{ toJson $out }}{{ end }}
"""


@dataclass(frozen=True)
class MemoryCase:
    """engine: as under `engine` in values.yaml, as far as the arithmetic reads it. bounded: sizes of the pod are given,
    which may be too small."""

    platform: str
    engine: dict[str, Any]
    shape: ModelShape
    bounded: bool

    def budget(self, memory_bytes: int, shared_memory_bytes: int) -> MemoryBudget:
        """Return the budget that the engine service computes in a pod of that size."""
        engine, offload = self.engine, self.engine["offload"]
        sizes = {key: offload[key] for key in ("numCpuBlocks", "cpuBytes") if key in offload}
        node = offload["nodeTier"]
        tree = {
            "model": {
                "path": "m",
                **{key: engine["model"][key] for key in ("dtype", "kvCacheDtype", "quantization", "maxLength")},
            },
            "deviceBlocks": engine["deviceBlocks"],
            "tensorParallelSize": engine["tensorParallelSize"],
            "pipelineParallelSize": engine["pipelineParallelSize"],
            "dataParallelSize": engine["dataParallelSize"],
            "nodesPerReplica": engine["nodesPerReplica"],
            "blockSize": engine["blockSize"],
            "extraArgs": engine["extraArgs"],
            "offload": {
                "enabled": offload["enabled"],
                "blocksPerChunk": offload["blocksPerChunk"],
                "windowChunks": offload["windowChunks"],
                "sharedTier": self.shared_tier(),
                **({"nodeTier": {key: node[key] for key in ("bytes", "fallback")}} if node["enabled"] else {}),
                **sizes,
            },
        }
        machine = Machine(
            self.platform, frozenset(), (0,), memory_bytes, "cgroup limit", shared_memory_bytes, shared_memory_bytes
        )
        return plan_memory(read_settings(EngineSettings, tree), self.shape, machine)

    def shared_tier(self) -> dict[str, Any]:
        """Return the shared tier as the chart writes it for the engine service, as far as the arithmetic reads it."""
        tier = self.engine["offload"]["sharedTier"]
        if tier["type"] != "nvme":
            return {"type": "none"}
        given, volume = tier["nvme"]["maxBytes"], tier["nvme"]["volume"]
        if given is None and volume["type"] == "perPodClaim":
            given = parse_byte_count(volume["size"]) * 9 // 10
        bound = {} if given is None else {"maxBytes": given}
        queues = {"loadQueueBytesMax": 1 << 50, "storeQueueBytesMax": 1 << 50}  # which the templates here do not check
        return {"type": "nvme", **queues, "nvme": {"path": "/kv", "mode": tier["nvme"]["mode"], **bound}}


def memory_cases() -> list[MemoryCase]:
    """Every known model, then shapes by hand; the same on every run."""
    chosen = random.Random(16)
    presets = [*SHAPES, *(None for _ in range(CASES - len(SHAPES)))]
    return [memory_case(chosen, preset) for preset in presets]


def memory_case(chosen: random.Random, preset: str | None) -> MemoryCase:
    shape = dict(SHAPES[preset]) if preset else any_shape(chosen)
    cpu_bytes = chosen.choice([f"{chosen.randrange(1, 3000)}GiB", "1.5TiB", "2000GB", "5MiB", "1Gi"])
    size = {"numCpuBlocks": chosen.randrange(1, 40_000)} if chosen.random() < 0.5 else {"cpuBytes": cpu_bytes}
    max_length = chosen.choice([1, 127, 128, 4096, 131_072])
    block_size = chosen.choice([16, 64, 128, 256])
    bounded = chosen.random() < 0.3
    engine = {
        "model": {
            "path": "acme/model",
            "shape": {"preset": preset} if preset else shape,
            "dtype": chosen.choice(["auto", "bfloat16", "float16", "float32"]),
            "kvCacheDtype": chosen.choice(["auto", "auto", "float16", "fp8", "int8_per_token_head"]),
            "quantization": chosen.choice([None, None, "awq"]),
            "maxLength": max_length,
        },
        "deviceBlocks": chosen.choice([None, None, max_length // block_size + chosen.randrange(2, 9)]),
        "tensorParallelSize": chosen.choice([1, 2, 3, 4, 8, 16]),
        "pipelineParallelSize": chosen.choice([1, 1, 2, 3, 4]),
        "dataParallelSize": chosen.choice([1, 1, 2, 3, 16]),
        "blockSize": block_size,
        "extraArgs": chosen.choice(ARGUMENTS),
        "offload": {
            **size,
            "enabled": chosen.random() < 0.9,
            "blocksPerChunk": chosen.randrange(1, 17),
            "windowChunks": chosen.choice(["last", "all"]),
            "nodeTier": {
                "enabled": chosen.random() < 0.3,
                "bytes": chosen.choice(["2TiB", "900GB"]),
                "fallback": chosen.choice(["private", "refuse"]),
            },
            "sharedTier": {
                "type": chosen.choice(["none", "nvme", "redis"]),
                "ioThreads": chosen.randrange(1, 33),
                "encryption": {"enabled": chosen.random() < 0.5},
                "below": {"type": chosen.choice(["none", "s3"]), "ioThreads": chosen.randrange(1, 33)},
                "nvme": {
                    "mode": chosen.choice(["auto", "slab", "files"]),
                    "maxBytes": chosen.choice([None, "8TB", "300GiB"]),
                    "volume": {"type": chosen.choice(["hostPath", "perPodClaim"]), "size": "500GiB"},
                },
            },
        },
        "memory": {
            "limit": f"{chosen.randrange(1, 2000)}Gi" if bounded else None,
            "sharedMemory": f"{chosen.randrange(1, 2000)}GiB" if bounded else None,
            "processPerRank": chosen.choice([None, "3GiB"]),
            "pageCache": "2GiB",
            "marginPercent": chosen.randrange(0, 31),
            "force": False,
        },
    }
    # Cores apart, one core in stages, or all in one pod.
    parts = engine["dataParallelSize"] if engine["dataParallelSize"] > 1 else engine["pipelineParallelSize"]
    engine["nodesPerReplica"] = chosen.choice([1, parts])
    model = ModelShape(
        layers=shape["layers"],
        kv_heads=shape.get("kvHeads", 1),
        head_dim=shape.get("headDim", 1),
        latent_dim=shape.get("latentDim"),
        dtype=shape["dtype"],
        max_length=None,
        weight_bytes=shape["weightBytes"],
        sliding_layers=shape.get("slidingLayers", 0),
        window_tokens=shape.get("slidingWindow", 0),
        state_layers=shape.get("stateLayers", 0),
        state_bytes=shape.get("stateBytes", 0),
        packed=shape.get("packed", ""),
    )
    # The chart is given how many layers a drafter has if it is a model of several.
    draft_layers = chosen.choice([None, None, 0, 3])
    engine["model"]["shape"]["draftLayers"] = draft_layers
    model = with_drafter(model, engine["extraArgs"], draft_layers)
    return MemoryCase(chosen.choice(["npu", "cpu", "cuda"]), engine, model, bounded)


def any_shape(chosen: random.Random) -> dict[str, Any]:
    heads = {"kvHeads": chosen.randrange(1, 65), "headDim": chosen.choice([1, 64, 80, 128, 255])}
    kind = {"latentDim": chosen.randrange(1, 1000)} if chosen.random() < 0.3 else heads
    dtype = chosen.choice(["bfloat16", "float16", "float32"])
    layers = chosen.randrange(1, 130)
    sliding = chosen.choice([0, chosen.randrange(0, layers + 1)])
    kind |= {"layers": layers, "slidingLayers": sliding}
    return {**kind, "dtype": dtype, "weightBytes": chosen.randrange(1, 10**12)}


@pytest.fixture(scope="module", params=helms(), ids=lambda helm: f"helm{helm.major}")
def computed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The templates' results for the whole table, from one run of Helm."""
    chart = tmp_path_factory.mktemp("arithmetic")
    (chart / "templates").mkdir()
    (chart / "files").mkdir()
    (chart / "Chart.yaml").write_text("{apiVersion: v2, name: arithmetic, version: 0.1.0}")
    rooms = ("_values", "_sizes", "_memory", "_tier", "_rules")
    for file in (*(f"templates/{room}.tpl" for room in rooms), "files/model-shapes.yaml", "files/shared-names.json"):
        (chart / file).write_text((CHART / file).read_text())
    (chart / "templates" / "computed.yaml").write_text(TEMPLATE)
    cases = [{"engine": case.engine, "platform": case.platform} for case in memory_cases()]
    sizes = [{"value": text, "path": "a"} for text in READ]
    return render(values={"sizes": sizes, "memory": cases}, chart=chart, helm=request.param).objects[0]


def test_sizes_are_read_alike(computed: dict[str, Any]) -> None:
    assert len(READ) > 40
    assert dict(zip(READ, computed["sizes"], strict=True)) == {value: str(size) for value, size in READ.items()}


def test_memory_is_the_same_sum(computed: dict[str, Any]) -> None:
    cases = memory_cases()
    compared = 0
    for case, figures in zip(cases, computed["memory"], strict=True):
        budget = case.budget(figures["memoryLimitBytes"], figures["sharedMemoryBytes"])
        expected = {
            "dtype": budget.dtype,
            "kvDtype": budget.kv_dtype,
            "bytesPerToken": budget.bytes_per_token,
            "bytesPerBlock": budget.bytes_per_block,
            "cpuChunks": budget.cpu_chunks,
            "cpuRowBytes": budget.cpu_row_bytes,
            "cpuTierBytes": budget.cpu_tier_bytes,
            "sharedMemoryNeededBytes": budget.shared_memory_needed_bytes,
            **({"kvGroups": budget.kv_groups} if budget.kv_groups > 1 else {"cpuTierTokens": budget.cpu_tier_tokens}),
            **({"tierIndexBytes": budget.tier_index_bytes} if budget.tier_index_bytes else {}),
            **({"nodeTierBytes": budget.node_tier_bytes} if budget.node_tier_bytes else {}),
        }
        if budget.kv_groups > 1:
            tier = PlannedTier.of(figures, case.engine["offload"])
            assert tier.held_tokens(case.engine["model"]["maxLength"]) == budget.cpu_tier_tokens, case
        if case.platform != "cpu" or figures["deviceBlocks"] == budget.device_blocks:
            # Where they would be more than a quarter of a pod the engine service alone takes fewer device blocks.
            compared += 1
            expected["engineNeedsBytes"] = budget.memory_needed_bytes
        assert {key: figures[key] for key in expected} == expected, case
        # A pod that the chart sizes holds what its engine needs.
        needed = figures["podNeedsBytes"], figures["sharedMemoryNeededBytes"]
        is_large = figures["memoryLimitBytes"] >= needed[0] and figures["sharedMemoryBytes"] >= needed[1]
        has_scales = case.shape.latent_dim is not None and budget.kv_dtype.endswith("_per_token_head")
        assert budget.fits or has_scales or not is_large or figures["cpuChunks"] == 0, (case, budget.problems)
    assert sum("tierIndexBytes" in figures for figures in computed["memory"]) > len(cases) // 10
    assert sum("nodeTierBytes" in figures for figures in computed["memory"]) > len(cases) // 10
    assert compared > len(cases) * 0.9
