"""The acceptance script from its command to its JSON file: vLLM's CPU engines, the bundled model, the ACL emulator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from acl_emulator import build

from spillway_engine.ascend_acceptance.report import NOTE_OF_EMULATOR
from spillway_stack.bundled_model import prepare

RUN_SECONDS_MAX = 1500.0
# What makes the CPU engine's KV caches count as device memory, as in the cluster lane.
ANNOUNCER = Path(__file__).resolve().parents[1] / "cluster" / "ascend"


@pytest.mark.skipif("TEST_ASCEND_ACCEPTANCE" not in os.environ, reason="by hand: make test-ascend-acceptance")
@pytest.mark.timeout(RUN_SECONDS_MAX + 60)
def test_the_whole_script_passes_on_the_emulator_and_says_that_it_is_one(tmp_path: Path) -> None:
    (tmp_path / "libascendcl.so").symlink_to(build.library())
    tree = {
        "model": {"path": str(prepare(print)), "servedName": "tried", "maxLength": 1024, "dtype": "float32"},
        "platform": "npu",
        "deviceBlocks": 40,
        "offload": {"numCpuBlocks": 64, "transport": "npu"},
        # What vLLM's NPU platform would do by itself.
        "extraArgs": ["--enforce-eager"],
        "extraEnv": {
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        },
    }
    (tmp_path / "engine.yaml").write_text(yaml.safe_dump(tree))
    command = [sys.executable, "-m", "spillway_engine.ascend_acceptance", "--config", "engine.yaml", "--small"]
    command += ["--clients", "2", "--prompts", "2", "--prompt-tokens", "400", "--answer-tokens", "4"]
    command += ["--megabytes", "32"]

    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ANNOUNCER), "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS_MAX,
        check=False,
    )

    assert (tmp_path / "acceptance.json").exists(), done.stdout + done.stderr
    report = json.loads((tmp_path / "acceptance.json").read_text())
    assert (report["verdict"], report["reasons"]) == ("passed", [])
    assert done.returncode == 0
    assert report["emulator"] is True and report["note"] == NOTE_OF_EMULATOR
    for mode, path in (("on", "batch"), ("off", "loop")):
        assert report[f"batch_memcpy_{mode}_copy_path"] == path
        assert report[f"batch_memcpy_{mode}_answers_cached_tokens"] == 2 * 3 * 128
        assert report[f"batch_memcpy_{mode}_2_clients_cached_share"] > 0
    assert report["no_offload_2_clients_cached_share"] == 0
    assert all(isinstance(value, str | int | float | bool | list | None) for value in report.values())
