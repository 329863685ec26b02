"""Benches use names of the product that exist: a bench that a change of the product broke says so when the tests run,
not when it is needed. By their sources alone, as benches take minutes and most need engines.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from lanes.rules import ROOT

from repository.tracked import tracked_files

SOURCES = {path.name: path for path in ROOT.glob("*/src/*/")} | {
    path.name: path for path in ROOT.glob("services/*/src/*/")
}
BENCHES = [path for path in tracked_files() if path.startswith("bench/") and path.endswith(".py")]


def file_of(module: str) -> Path | None:
    """The source of a module or package of the product; None if there is none."""
    top, *rest = module.split(".")
    if top not in SOURCES:
        return None
    path = SOURCES[top].joinpath(*rest)
    found = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
    return found if found.is_file() else None


@cache
def names_of(module: str) -> frozenset[str]:
    """Return the names that a module binds at its top level, and the modules of a package."""
    path = file_of(module)
    assert path is not None, module
    names = {one.stem for one in path.parent.iterdir()} if path.name == "__init__.py" else set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Name(ctx=ast.Store()):
                names.add(node.id)
            case ast.Import() | ast.ImportFrom():
                names.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
    return frozenset(names)


def missing_names(source: str) -> Iterator[str]:
    """`module.name` of each name that the product lacks, whether it is imported, read, set or patched."""
    tree = ast.parse(source)
    modules: dict[str, str] = {}
    wanted: list[tuple[str, str]] = []
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in SOURCES:
                if file_of(module) is None:
                    yield module
                    continue
                for alias in node.names:
                    wanted.append((module, alias.name))
                    if file_of(inner := f"{module}.{alias.name}") is not None:
                        modules[alias.asname or alias.name] = inner
            case ast.Import():
                for alias in node.names:
                    if alias.name.split(".")[0] in SOURCES and file_of(alias.name) is None:
                        yield alias.name
                    elif alias.asname is not None and file_of(alias.name) is not None:
                        modules[alias.asname] = alias.name
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in modules:
                wanted.append((modules[name], attribute))
            case ast.Call(args=[ast.Name(id=name), ast.Constant(value=str(attribute)), *_]) if name in modules:
                wanted.append((modules[name], attribute))
    yield from (f"{module}.{name}" for module, name in wanted if name not in names_of(module))


@pytest.mark.parametrize("path", BENCHES)
def test_every_name_of_the_product_that_a_bench_uses_exists(path: str):
    assert list(missing_names((ROOT / path).read_text())) == []


def test_names_that_are_gone_are_found_wherever_they_are_used():
    source = """
from spillway_connector.engine.shared_tiers import prefix_tier as tiers
from spillway_connector.nowhere import thing
from spillway_settings.wire import HAND_OVER_MEMBER, gone
tiers.gate_of, tiers.absent
with patch.object(tiers, "lost", 1):
    pass
"""
    prefix_tier = "spillway_connector.engine.shared_tiers.prefix_tier"
    expected = ["spillway_connector.nowhere", "spillway_settings.wire.gone"]
    assert sorted(missing_names(source)) == sorted([*expected, f"{prefix_tier}.absent", f"{prefix_tier}.lost"])
