"""A method that replaces one of a base says so: `@override`, where the base is Spillway's own or vLLM's.

The bases are read, not imported. Those that this environment's vLLM does not have are another environment's to judge.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from lanes.rules import ROOT

PACKAGES = {
    "spillway_settings": "settings",
    "spillway_connector": "connector",
    "spillway_gateway": "gateway",
    **{f"spillway_{name}": f"services/{name}" for name in ("ctl", "engine", "simulator", "stack")},
}
# A type checker expects none there: each class makes its own objects.
EXEMPT = {"__init__", "__new__", "__init_subclass__", "__post_init__"}
# vLLM 0.30 and later do not have these in the base, so that a mark is an error there.
OF_ONE_VLLM = {"medium", "_touch"}
MOST_IMPORTS = 8  # names that are handed on from module to module
METHODS = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def folder_of(package: str) -> Path | None:
    """Return the folder of a package's modules; None: it is neither Spillway's nor vLLM's, or is not there."""
    if package in PACKAGES:
        return ROOT / PACKAGES[package] / "src"
    return next((Path(path) for path in sys.path if package == "vllm" and Path(path, package).is_dir()), None)


@cache
def file_of(module: str) -> Path | None:
    folder = folder_of(module.partition(".")[0])
    if folder is None:
        return None
    stem = folder / module.replace(".", "/")
    return next((file for file in (stem.with_suffix(".py"), stem / "__init__.py") if file.exists()), None)


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Every statement below a node; expressions, most of a tree, hold no import and no class."""
    for block in ("body", "orelse", "handlers", "finalbody", "cases"):
        for below in getattr(node, block, ()):
            if isinstance(below, ast.stmt):
                yield below
            yield from statements(below)


@cache
def contents(file: Path) -> tuple[dict[str, tuple[str, str]], dict[str, ast.ClassDef]]:
    """Names that a module imports from others, and the classes in it."""
    imports: dict[str, tuple[str, str]] = {}
    classes: dict[str, ast.ClassDef] = {}
    for node in statements(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imports |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
        elif isinstance(node, ast.ClassDef):
            classes.setdefault(node.name, node)
    return imports, classes


def found(file: Path, name: str, imports_left: int = MOST_IMPORTS) -> tuple[Path, ast.ClassDef] | None:
    imports, classes = contents(file)
    if name in classes:
        return file, classes[name]
    if name not in imports or not imports_left:
        return None
    module, original = imports[name]
    source = file_of(module)
    return found(source, original, imports_left - 1) if source is not None else None


def inherited(file: Path, kind: ast.ClassDef) -> set[str]:
    """Names of the methods of all bases."""
    names: set[str] = set()
    for base in kind.bases:
        plain = base.value if isinstance(base, ast.Subscript) else base
        above = found(file, plain.id) if isinstance(plain, ast.Name) else None
        if above is not None and above[1] is not kind:
            names |= {node.name for node in above[1].body if isinstance(node, METHODS)} | inherited(*above)
    return names


def unmarked(file: Path) -> Iterator[str]:
    for kind in contents(file)[1].values():
        names = inherited(file, kind) - EXEMPT - OF_ONE_VLLM if kind.bases else set()
        for node in kind.body:
            if isinstance(node, METHODS) and node.name in names:
                marks = {ast.unparse(decorator) for decorator in node.decorator_list}
                if not marks & {"override", "overload"}:
                    yield f"{file.name}:{node.lineno} {kind.name}.{node.name}"


def test_methods_that_replace_others_are_marked() -> None:
    files = [file for folder in PACKAGES.values() for file in (ROOT / folder / "src").rglob("*.py")]

    assert len(files) > 300
    assert [each for file in files for each in unmarked(file)] == []


def test_a_method_without_its_mark_is_found(tmp_path: Path) -> None:
    file = tmp_path / "tier.py"
    file.write_text(
        "from spillway_connector.tiers.memory import MemoryTier\n"
        "class Plain:\n    def close(self): ...\n"
        "class Own(Plain):\n    def close(self): ...\n"
        "class Marked(Plain):\n    @override\n    def close(self): ...\n"
        "class Other(MemoryTier):\n    def contains(self): ...\n    def further(self): ...\n"
    )

    assert list(unmarked(file)) == ["tier.py:5 Own.close", "tier.py:10 Other.contains"]
