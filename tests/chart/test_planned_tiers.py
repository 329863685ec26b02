"""Sizes that the chart and `spillway plan` count for models with several KV groups follow from vLLM's own groups."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from chart.rendering import render

from spillway_ctl.command import main as spillway

ROOT = Path(__file__).parents[2]
PRESETS = {
    "gemma-3-27b": "Gemma 3 27B",
    "gpt-oss-20b": "gpt-oss 20B",
    "qwen3-next-80b-a3b": "Qwen3-Next 80B",
    "deepseek-v4-flash": "DeepSeek V4 Flash",
}
TOKENS = 32_768


@pytest.fixture(scope="module")
def kv_rows() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kv_rows", ROOT / "bench/kv_rows.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def planned(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], **engine: Any) -> dict[str, Any]:
    rendered = render(values={"engine": engine})
    document = rendered.one("ConfigMap", "engine")
    monkeypatch.setattr("sys.stdin", io.StringIO(yaml.safe_dump(document)))
    assert spillway(["plan", "--rendered", "-", "--json", "--prompt-tokens", str(TOKENS)]) == 0
    [found] = json.loads(capsys.readouterr().out)["engines"]
    return dict(found)


@pytest.mark.parametrize("window_chunks", ["last", "all"])
@pytest.mark.parametrize("block_tokens", [16, 128])
@pytest.mark.parametrize("preset", PRESETS)
def test_the_plan_counts_what_vllm_groups_make(
    preset: str,
    block_tokens: int,
    window_chunks: str,
    kv_rows: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected = kv_rows.measured(preset, kv_rows.MODELS[PRESETS[preset]](block_tokens), TOKENS)

    found = planned(
        monkeypatch,
        capsys,
        model={"path": "a/b", "shape": {"preset": preset}, "maxLength": TOKENS},
        blockSize=block_tokens,
        offload={"numCpuBlocks": 40_000, "windowChunks": window_chunks},
        accelerator={"preset": "cuda"},
        memory={"force": True},
    )

    memory, [prompt] = found["memory"], found["prompts"]
    assert memory["cpuRowBytes"] == expected["row_bytes"]
    assert memory["kvGroups"] == len(expected["groups"])
    assert memory["chunkTokens"] == max(group["chunk_tokens"] for group in expected["groups"])
    assert prompt["stored_bytes_per_token"] == expected[f"rows_{window_chunks}_bytes_per_token"]
    rows = sum(group[f"chunks_{window_chunks}"] for group in expected["groups"])
    assert prompt["cpu_tier_tokens"] == pytest.approx(40_000 * TOKENS / rows, rel=0.06)  # in whole chunks
