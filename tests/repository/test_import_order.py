"""Modules of the services import downwards: each imports only modules that stand earlier in its table.

The connector and the gateway have rooms, and tables of their own (`test_import_arrows.py` of each).
"""

from __future__ import annotations

import ast

import pytest
from lanes.rules import ROOT

LEVELS = {
    "ctl": (
        "census errors evidence interruption plan_arithmetic planned_tier quantities store tier_rates",
        "frame_filter namespace_summary nvme_store plan_input plan_ratio progress readings redis_store s3_store "
        "role_findings seal_check tier_findings",
        "findings named_text run store_choice",
        "check doctor listing node_tier plan_options purge status store_options tenant_id",
        "live plan verify",
        "doctor_options",
        "options",
        "command",
        "__main__",
    ),
    "ctl/live": (
        "asking",
        "release",
    ),
    "ctl/check": (
        "chart_facts finding values_files",
        "model_facts shared_rules size_rules typed_values unknown_key",
        "pod_memory shape",
        "group",
        "ascend_rules auth_rules credential_rules device_rules duration_rules node_group_rules pod_rules role_rules"
        " route_rules unread_rules",
        "container_rules engine_rules",
        "gateway_rules model_rules release_rules tier_rules",
        "node_rules",
        "judgement vllm_parser",
        "command_line",
    ),
    "engine": (
        "argument_verdicts ascend_versions chart_keys chat_answers engine_core errors exit_report headless in_flight "
        "kv_transfer messages_usage near_ties pod_channel replica_lines",
        "machine",
        "extra_arguments in_process lora_settings model_shape shared_memory tier_settings",
        "argument_memory drafters settling",
        "reference_likelihood settings tier_files watchdog",
        "launch likelihood promotion_hints setting_rules weight_names",
        "platform_facts self_check server settings_reader",
        "memory_budget",
        "vllm_arguments",
        "middleware resolve",
        "__main__",
    ),
}


def upward_imports(sources: dict[str, str], level: dict[str, int], package: str) -> list[str]:
    """Each import of a module on the same or a higher level, as `importer -> imported`.

    sources: by module, or by room with all of its modules.
    """
    return [
        f"{module} -> {name}"
        for module, source in sources.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{package}.")
        for name in [str(node.module).removeprefix(f"{package}.").split(".")[0]]
        if name != module and level[name] >= level[module]
    ]


@pytest.mark.parametrize("service", LEVELS)
def test_each_module_imports_only_lower_levels(service: str) -> None:
    package = f"spillway_{service.replace('/', '.')}"
    level = {module: height for height, modules in enumerate(LEVELS[service]) for module in modules.split()}
    folder = ROOT / "services" / service.split("/", maxsplit=1)[0] / "src" / package.replace(".", "/")
    sources = {file.stem: file.read_text() for file in folder.glob("*.py") if file.stem != "__init__"}
    rooms = {file.parent for file in folder.glob("*/__init__.py") if f"{service}/{file.parent.name}" in LEVELS}
    sources |= {room.name: "\n".join(file.read_text() for file in room.glob("*.py")) for room in rooms}
    assert sources.keys() == level.keys()
    assert upward_imports(sources, level, package) == []


def test_an_upward_import_is_found() -> None:
    sources = {"low": "from p.high import it", "high": "from p.low import it"}
    assert upward_imports(sources, {"low": 0, "high": 1}, "p") == ["low -> high"]
