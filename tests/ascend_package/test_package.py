"""Spillway beside vllm-ascend's own package: its model runner's KV caches, its patches of vLLM, its unit tests.

In processes of their own, as importing vllm_ascend changes vLLM for good; standins.py lists what is not real there.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from upstream.archives import unpacked

from ascend_package.package import ARCHIVE, RUN_SECONDS_MAX, run
from ascend_package.standins import STANDINS

HERE = Path(__file__).resolve().parent
DOCS = HERE.parents[1] / "docs" / "ascend.md"
# vllm-ascend's unit tests of KV transfer, below its tests/ut, that run here unchanged, with Spillway's patches of vLLM.
THEIRS = (
    "kv_offload/test_recompute_cpu_offload.py",
    "kv_offload/test_mooncake_connector.py",
    "kv_offload/test_mooncake_hybrid_connector.py",
    "kv_offload/test_mooncake_layerwise_connector.py",
    "distributed/kv_transfer/test_kv_transfer_failures.py",
)
# The others, and why not. None can have a class of Spillway's in place of theirs: those that it has a class for
# (NPUOffloadingSpec, its handler, SimpleCPUOffloadConnector) have no unit test in the archive.
NOT_RUN = {
    "kv_offload/a2/test_remote_decode_lifecycle.py": "needs an NPU",
    "kv_offload/a2/test_remote_prefill_lifecycle.py": "needs an NPU",
    "distributed/ascend_store/": "their store alone, with their own modules replaced in the whole process",
    "distributed/mooncake/": "their transfer engine alone",
}
FOLDERS = ("kv_offload", "distributed/kv_transfer", "distributed/ascend_store", "distributed/mooncake")

pytestmark = pytest.mark.timeout(RUN_SECONDS_MAX + 60)


@pytest.mark.parametrize(
    ("names", "least", "plugins"),
    [
        (("check_layouts.py", "check_engine.py", "check_transfer.py"), 23, None),
        # Without their platform, which wants blocks of 128 tokens: theirs are the patches.
        (("check_lives.py",), 2, "ascend_kv_connector"),
    ],
)
def test_checks_beside_their_package(
    names: tuple[str, ...], least: int, plugins: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if plugins is not None:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)

    outcome = run([str(HERE / name) for name in names], ["-p", "ascend_package.beside"], HERE, tmp_path)

    assert outcome.not_passed == ()
    assert len(outcome.passed) >= least


def test_their_unit_tests_pass_with_our_patches_of_vllm(tmp_path: Path) -> None:
    folder = unpacked(ARCHIVE)
    cases = [f"tests/ut/{name}" for name in THEIRS]

    outcome = run(cases, ["--noconftest", "-p", "ascend_package.patched"], folder, tmp_path)

    assert outcome.not_passed == ()
    assert len(outcome.passed) > 100


def test_every_unit_test_of_theirs_is_listed() -> None:
    root = unpacked(ARCHIVE) / "tests" / "ut"
    files = [path.relative_to(root).as_posix() for folder in FOLDERS for path in (root / folder).rglob("test_*.py")]

    assert files
    assert [file for file in files if file not in THEIRS and not file.startswith(tuple(NOT_RUN))] == []
    assert [entry for entry in (*THEIRS, *NOT_RUN) if not any(file.startswith(entry) for file in files)] == []
    subjects = "NPUOffloadingSpec|CpuNpuOffloadingHandler|SimpleCPUOffloadConnector"
    assert [path for path in root.rglob("*.py") if re.search(subjects, path.read_text())] == []


def test_what_stands_in_is_documented() -> None:
    text = DOCS.read_text()
    assert [name for name in STANDINS if f"`{name}`" not in text] == []
