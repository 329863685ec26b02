"""The check takes the values of the cluster lane, and a real engine would start with those of its cases.

The lane needs half an hour, and most of its cases do without the check: they would not see that it refuses them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart.rendering import Render, pod_spec, render
from cluster import real_engines
from cluster.helm import VERSION
from cluster.image_builder import images
from cluster.values import simulated, simulated_ascend, simulated_over_two_pods

from spillway_ctl.check.chart_facts import Cluster
from spillway_ctl.check.judgement import findings
from spillway_engine.machine import Machine
from spillway_engine.model_shape import ModelShape
from spillway_engine.platform_facts import fact_contradictions
from spillway_engine.resolve import ResolvedEngine, resolve_engine
from spillway_engine.settings import EngineSettings
from spillway_engine.settings_reader import load_engine_settings

MODEL = ModelShape(30, 3, 64, None, "bfloat16", 8192, 270_000_000)  # of values-cpu.yaml
REAL_ENGINES: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"Ascend, batchMemcpy {mode}": (lambda mode=mode: real_engines.ascend(mode)) for mode in ("auto", "on", "off")},
    "NVMe": lambda: real_engines.shared_tier("nvme", 2),
    "Redis": lambda: real_engines.shared_tier("redis", 2),
    "Redis, another password": lambda: real_engines.shared_tier("redis", 1, secrets_revision="2"),
}
OTHERS: dict[str, Callable[[], dict[str, Any]]] = {
    "two stages": real_engines.two_stages,
    "prefill and decode apart": real_engines.apart,
    "simulated": simulated,
    "simulated, Ascend": simulated_ascend,
    "simulated, over two pods": simulated_over_two_pods,
}


def in_its_pod(rendered: Render, folder: Path) -> tuple[EngineSettings, ResolvedEngine]:
    """The engine's settings, and what it makes of them with the memory that its pod may use."""
    file = folder / "engine.yaml"
    file.write_text(rendered.one("ConfigMap", "engine")["data"]["engine.yaml"])
    pod = pod_spec(rendered.one("StatefulSet", "engine"))
    limit = int(pod["containers"][0]["resources"]["limits"]["memory"].removesuffix("Mi")) << 20
    shared = next(
        volume["emptyDir"] for volume in pod["volumes"] if volume.get("emptyDir", {}).get("medium") == "Memory"
    )
    shared_bytes = int(shared["sizeLimit"].removesuffix("Mi")) << 20
    settings = load_engine_settings(file, [])
    flags = frozenset({"avx512_bf16"})
    machine = Machine(settings.platform, flags, (0, 1), limit, "cgroup limit", shared_bytes, shared_bytes)
    return settings, resolve_engine(settings, MODEL, machine)


@pytest.mark.parametrize("values", (REAL_ENGINES | OTHERS).values(), ids=REAL_ENGINES | OTHERS)
def test_the_check_takes_it(values):
    assert [found for found in findings(values(), Cluster()) if not found.is_note] == []


@pytest.mark.parametrize("name", REAL_ENGINES)
def test_a_real_engine_would_start(name: str, tmp_path: Path):
    """The engine is on a node without devices, where vLLM is the CPU build, and has the memory that its pod may use."""
    settings, engine = in_its_pod(render(values=REAL_ENGINES[name]()), tmp_path)

    chunk_tokens = settings.offload.blocks_per_chunk * engine.budget.block_tokens
    wrong = fact_contradictions(settings, MODEL, settings.platform, chunk_tokens, settings.names)
    assert (*wrong, *engine.budget.problems) == ()
    arguments = engine.public()["arguments"]
    assert "--enforce-eager" in arguments
    # Without a size, vLLM's CPU build demands most of the machine's memory.
    given = dict(pairwise(arguments)).get("--kv-cache-memory-bytes")
    space = int(settings.extra_env.get("VLLM_CPU_KVCACHE_SPACE", 0)) << 30
    assert engine.budget.device_bytes is not None
    assert int(given or space) >= engine.budget.device_bytes


def test_a_simulated_engine_on_pretended_devices_is_in_the_charts_ascend_image(tmp_path: Path):
    rendered = render(values=simulated_ascend())
    container = pod_spec(rendered.one("StatefulSet", "engine"))["containers"][0]

    assert container["image"] in images(VERSION)
    assert container["image"] == f"spillway-engine:{VERSION}-ascend"
    assert container["resources"]["limits"]["huawei.com/Ascend910"] == 1
    assert container["command"] == ["/bin/bash", "/etc/spillway/start-engine.sh"]
    _, engine = in_its_pod(rendered, tmp_path)
    assert engine.budget.problems == ()


def test_an_engine_on_pretended_devices_takes_the_emulated_transport():
    rendered = render(values=real_engines.ascend("on"))
    container = pod_spec(rendered.one("StatefulSet", "engine"))["containers"][0]

    assert container["resources"]["limits"]["huawei.com/Ascend910"] == 1
    assert {"mountPath": real_engines.TOOLKIT, "name": "emulator", "readOnly": True} in container["volumeMounts"]
    configuration = yaml.safe_load(rendered.one("ConfigMap", "engine")["data"]["engine.yaml"])
    assert (configuration["platform"], configuration["offload"]["transport"]) == ("npu", "npu")
