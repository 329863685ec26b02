"""Names and parameters of vLLM's classes, from the sources of a wheel: nothing of it is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from spillway_connector.engine.generation import Seams

# What tells the generations apart (engine/generation.py).
FEATURES = ("vllm.v1.kv_offload.worker.worker", "vllm.v1.kv_offload.config")


class Sample(NamedTuple):
    """Facts read from one wheel, as JSON values.

    features: which of FEATURES it has. names: those of the seams that it has, by module. methods: their parameters, by
    module, class and method.
    """

    vllm: str
    features: list[str]
    names: dict[str, list[str]]
    methods: dict[str, dict[str, dict[str, list[str]]]]


def read(wheel: Path, version: str, seams: Seams) -> Sample:
    """wheel: the folder that holds `vllm`. What is missing there is missing in the sample."""
    methods: dict[str, dict[str, dict[str, list[str]]]] = {}
    for module, cls, wanted, _ in seams.methods:
        found = {name: _parameters(node) for name in wanted if (node := _method(wheel, module, cls, name)) is not None}
        methods.setdefault(module, {}).setdefault(cls, {}).update(found)
    return Sample(
        version,
        [module for module in FEATURES if _file(wheel, module) is not None],
        {module: sorted({*names} & {*_bound(wheel, module)}) for module, names in seams.names.items()},
        methods,
    )


def _file(wheel: Path, module: str) -> Path | None:
    path = wheel.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None)


def _tree(wheel: Path, module: str) -> ast.Module:
    file = _file(wheel, module)
    return ast.parse(file.read_text() if file is not None else "")


def _bound(wheel: Path, module: str) -> Iterator[str]:
    """Names at the top of a module."""
    for node in _tree(wheel, module).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def _method(wheel: Path, module: str, cls: str, method: str) -> ast.FunctionDef | None:
    """The method of the class, or of the first of its bases that has it."""
    tree = _tree(wheel, module)
    node = next((one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == cls), None)
    if node is None:
        imported = _imported_from(tree, cls)
        return _method(wheel, imported, cls, method) if imported is not None else None
    for one in node.body:
        if isinstance(one, ast.FunctionDef) and one.name == method:
            return one
    bases = (base.id for base in node.bases if isinstance(base, ast.Name))
    return next((found for base in bases if (found := _method(wheel, module, base, method)) is not None), None)


def _imported_from(tree: ast.Module, name: str) -> str | None:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            return node.module
    return None


def _parameters(method: ast.FunctionDef) -> list[str]:
    given: Any = method.args
    ordered = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
    return [one.arg for one in ordered if one is not None]
