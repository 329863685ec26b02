"""The acceptance's report: one flat mapping, units in the keys, and the reasons for its verdict. Pure."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any

from spillway_engine.ascend_versions import AscendVersions

# batch_memcpy -> the path that copies must take.
PATHS = {"on": "batch", "off": "loop"}
COMPARED_SHARE_LEAST = 0.25
PACKAGES = ("vllm", "vllm-ascend", "torch-npu", "torch", "spillway-connector", "spillway-engine")
NOTE_OF_EMULATOR = "made with the ACL emulator: no NPU was used, and no figure here is one of an NPU"


def versions(found: AscendVersions) -> dict[str, str | None]:
    report: dict[str, str | None] = {"driver_version": found.driver, "cann_version": found.cann}
    for name in PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = None
        report[f"{name.replace('-', '_')}_version"] = version
    return report


def reasons(report: Mapping[str, Any]) -> list[str]:
    """Reasons for which an operator should not go on; empty: passed. Speed is no reason."""
    found = [f"probe, {line}" for line in report.get("probe_failed", ())]
    if (failure := report.get("no_offload_failed")) is not None:
        return [*found, f"without offload: {failure}"]
    for mode, path in PATHS.items():
        key = f"batch_memcpy_{mode}"
        if (failure := report.get(f"{key}_failed")) is not None:
            found.append(f"batchMemcpy {mode}: {failure}")
            continue
        if report[f"{key}_copy_path"] != path:
            found.append(f"batchMemcpy {mode}: device copies go by {report[f'{key}_copy_path']}, not {path}")
        if report[f"{key}_copy_failures"]:
            found.append(f"batchMemcpy {mode}: {report[f'{key}_copy_failures']} copies failed; see the engine's log")
        if not report[f"{key}_loaded_bytes"] or not report[f"{key}_answers_cached_tokens"]:
            found.append(f"batchMemcpy {mode}: nothing was loaded, so nothing was shown; give more numCpuBlocks")
        if not report[f"{key}_pinned"]:
            found.append(f"batchMemcpy {mode}: the CPU tier is not page-locked, so each copy blocks the model")
        found += [f"batchMemcpy {mode}: {line}" for line in report[f"{key}_answers_different"]]
        if report[f"{key}_answers_compared_share"] < COMPARED_SHARE_LEAST:
            found.append(
                f"batchMemcpy {mode}: near ties ended most comparisons, after "
                f"{report[f'{key}_answers_compared_share']:.0%} of their tokens; use a model surer of plain text"
            )
    return found


def concluded(report: Mapping[str, Any]) -> dict[str, Any]:
    why = reasons(report)
    note = {"note": NOTE_OF_EMULATOR} if report.get("emulator") else {}
    return {"verdict": "failed" if why else "passed", "reasons": why, **note, **report}
