"""Modules import downwards: each imports only modules that stand earlier in this table."""

from __future__ import annotations

import ast
from pathlib import Path

import spillway_ctl

LEVELS = (
    "census errors interruption pace plan_arithmetic quantities store",
    "frame_filter namespace_summary nvme_store plan_input progress redis_store seal_check",
    "plan_options run store_choice",
    "listing options plan purge status",
    "verify",
    "command",
    "__main__",
)


def test_each_module_imports_only_lower_levels() -> None:
    level = {module: height for height, modules in enumerate(LEVELS) for module in modules.split()}
    files = {file.stem: file for file in Path(spillway_ctl.__file__).parent.glob("*.py") if file.stem != "__init__"}
    assert files.keys() == level.keys()
    upwards = [
        f"{module} -> {name}"
        for module, file in files.items()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("spillway_ctl.")
        for name in [str(node.module).split(".")[1]]
        if level[name] >= level[module]
    ]
    assert upwards == []
