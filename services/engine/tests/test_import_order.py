"""Modules import downwards: each imports only modules that stand earlier in this table."""

from __future__ import annotations

import ast
from pathlib import Path

import spillway_engine

LEVELS = (
    "chart_keys errors exit_report in_flight machine pod_channel",
    "extra_arguments in_process model_shape shared_memory tier_settings",
    "reference_likelihood settings tier_files watchdog",
    "launch likelihood memory_budget settings_reader",
    "self_check vllm_arguments",
    "middleware resolve",
    "__main__",
)


def test_each_module_imports_only_lower_levels() -> None:
    level = {module: height for height, modules in enumerate(LEVELS) for module in modules.split()}
    files = {file.stem: file for file in Path(spillway_engine.__file__).parent.glob("*.py") if file.stem != "__init__"}
    assert files.keys() == level.keys()
    upwards = [
        f"{module} -> {name}"
        for module, file in files.items()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("spillway_engine.")
        for name in [str(node.module).split(".")[1]]
        if level[name] >= level[module]
    ]
    assert upwards == []
