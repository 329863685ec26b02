"""Imports point one way. ALLOWED lists, for each room and each module at the root, what it may import."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import spillway_gateway

PACKAGE = "spillway_gateway"
ROOT = Path(spillway_gateway.__file__).parent

# From the bottom up. Rooms (folders) and root modules (files) share one name space.
ALLOWED: dict[str, set[str]] = {
    "__init__": set(),
    "background": set(),
    "errors": set(),
    "error_bodies": {"errors"},
    "metrics": set(),
    "turns": set(),
    "write_coalescing": set(),
    "config": {"background", "errors"},
    "interpreter": set(),
    "lifecycle": {"errors"},
    "logs": {"config"},
    "routing": set(),
    "access": {"background", "config", "errors", "turns"},
    "discovery": {"config", "errors"},
    "fleet": {"config", "errors", "metrics", "routing", "turns"},
    "tokens": {"background", "config", "errors", "routing"},
    "client": {"config", "error_bodies", "errors", "lifecycle", "turns", "write_coalescing"},
    "upstream": {
        "access",
        "config",
        "error_bodies",
        "errors",
        "fleet",
        "lifecycle",
        "metrics",
        "routing",
        "turns",
        "write_coalescing",
    },
    "picker": {"client", "error_bodies", "errors", "fleet", "lifecycle", "upstream", "write_coalescing"},
    "tracing": {"config", "fleet", "routing", "upstream"},
    "scaling": {"background", "config", "discovery", "fleet", "metrics", "routing", "upstream"},
    "roster": {
        "access",
        "background",
        "config",
        "discovery",
        "errors",
        "fleet",
        "interpreter",
        "metrics",
        "routing",
        "tokens",
    },
    "api": {
        "access",
        "client",
        "config",
        "error_bodies",
        "errors",
        "fleet",
        "lifecycle",
        "roster",
        "tokens",
        "tracing",
        "upstream",
    },
    "ops": {
        "access",
        "background",
        "client",
        "config",
        "discovery",
        "error_bodies",
        "errors",
        "fleet",
        "lifecycle",
        "metrics",
        "routing",
    },
}
ALLOWED["app"] = ALLOWED.keys() - {"__init__"}
ALLOWED["listeners"] = {"app", "background", "client", "config", "errors", "ops", "picker"}
ALLOWED["processes"] = ALLOWED.keys() - {"__init__", "tracing", "write_coalescing"}
ALLOWED["__main__"] = {
    "access",
    "app",
    "client",
    "config",
    "errors",
    "interpreter",
    "listeners",
    "logs",
    "processes",
}
ALLOWED["testing"] = ALLOWED.keys() - {"__init__", "__main__"}  # doubles for tests; nothing above imports it


def unit_of(path: Path) -> str:
    """The room or root module that a file, relative to the package, belongs to."""
    return path.parts[0].removesuffix(".py")


def imported_units(source: str, path: Path) -> Iterator[tuple[int, str]]:
    """(line, room or root module) of each import from the package anywhere in the file: at the top, inside a function,
    under TYPE_CHECKING, relative ones too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = [PACKAGE, *path.parent.parts]
            prefix = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
            module = ".".join(filter(None, [prefix, node.module]))
            modules = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        for module in modules:
            if module.startswith(f"{PACKAGE}."):
                yield node.lineno, module.split(".")[1]


def against_the_arrows(source: str, path: Path) -> list[str]:
    unit = unit_of(path)
    if unit not in ALLOWED:
        return [f"{path}: {unit!r} is not in ALLOWED; say there what it may import"]
    return [
        f"{path}:{line} imports {other}"
        for line, other in imported_units(source, path)
        if other != unit and other not in ALLOWED[unit]
    ]


def test_no_module_imports_against_the_arrows() -> None:
    broken: list[str] = []
    for path in sorted(ROOT.rglob("*.py")):
        broken += against_the_arrows(path.read_text(encoding="utf-8"), path.relative_to(ROOT))
    assert broken == []


def test_the_arrows_have_no_cycle_and_name_only_what_exists() -> None:
    assert list(TopologicalSorter(ALLOWED).static_order())  # raises CycleError
    units = {unit_of(path.relative_to(ROOT)) for path in ROOT.rglob("*.py")}
    assert units == ALLOWED.keys()
    assert [unit for unit, allowed in ALLOWED.items() if "testing" in allowed] == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("roster/wrong.py", "from spillway_gateway.api.inference import InferenceEndpoint"),
        ("roster/wrong.py", "from spillway_gateway import app"),
        ("roster/wrong.py", "import spillway_gateway.ops.server"),
        ("roster/deeper/wrong.py", "from ...api import routes"),
        ("errors.py", "from . import metrics"),
        ("fleet/wrong.py", "def later():\n    from spillway_gateway.tokens.prompt import PromptReader"),
        (
            "upstream/wrong.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import spillway_gateway.tracing.exporting",
        ),
        ("app.py", "from spillway_gateway.testing.running import until"),
        ("new_room/module.py", "x = 1"),
    ],
)
def test_an_import_against_the_arrows_is_found(path: str, source: str) -> None:
    assert len(against_the_arrows(source, Path(path))) == 1


def test_an_import_along_the_arrows_passes() -> None:
    source = "import asyncio\nfrom spillway_gateway.fleet.engine import Engine\nfrom . import usage"
    assert against_the_arrows(source, Path("upstream/right.py")) == []
