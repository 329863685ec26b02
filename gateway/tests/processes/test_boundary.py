"""The room of several processes composes the other rooms' objects: it reads and sets nothing private of theirs, and
extends none of their concrete classes."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spillway_gateway import processes

ROOM = processes.__name__
FILES = sorted(Path(processes.__file__).parent.glob("*.py"))
PACKAGE = ROOM.split(".")[0]


OF_NAMED_TUPLES = ("_replace", "_asdict", "_fields")  # public, whatever they are called


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in OF_NAMED_TUPLES


def imported(tree: ast.Module) -> dict[str, Any]:
    """The objects that the module imports from other rooms of the gateway, by their names in the module."""
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == PACKAGE:
            module = importlib.import_module(node.module)
            for alias in node.names:
                value = getattr(module, alias.name, None)
                if value is None:
                    value = importlib.import_module(f"{node.module}.{alias.name}")
                if not getattr(value, "__module__", getattr(value, "__name__", "")).startswith(f"{ROOM}."):
                    found[alias.asname or alias.name] = value
    return found


def resolved(node: ast.expr, names: dict[str, Any]) -> Any:
    """The class that a base names; None if it is not imported from another room."""
    if isinstance(node, ast.Subscript):
        return resolved(node.value, names)
    if isinstance(node, ast.Attribute):
        owner = resolved(node.value, names)
        return getattr(owner, node.attr, None) if owner is not None else None
    return names.get(node.id) if isinstance(node, ast.Name) else None


def trespasses(source: str) -> Iterator[str]:
    """Each line on which a module of this room goes past the public names of another room's object."""
    tree = ast.parse(source)
    names = imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if node.attr == "__new__" or (is_private(node.attr) and not own and ast.unparse(node) != "os._exit"):
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "vars", "object.__new__"):
            named = node.args[1] if len(node.args) > 1 else None
            if isinstance(named, ast.Constant) and isinstance(named.value, str) and is_private(named.value):
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if is_private(alias.name):
                    yield f"{node.lineno}: import of {alias.name}"
        elif isinstance(node, ast.ClassDef):
            for base in node.bases:
                extended = resolved(base, names)
                if isinstance(extended, type) and not getattr(extended, "_is_protocol", False):
                    yield f"{node.lineno}: class {node.name} extends {ast.unparse(base)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_other_rooms_are_used_by_their_public_names_alone(path: Path) -> None:
    assert list(trespasses(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        "def f(server): return server._drain",
        "def f(engine): engine._rates = None",
        "def f(engine): getattr(engine, '_rates')",
        "def f(engine): setattr(engine, '_rates', 1)",
        "def f(kind): return kind.__new__(kind)",
        "from spillway_gateway.app import _tracing",
        "from spillway_gateway.fleet.engine import Engine\nclass E(Engine): pass",
        "from spillway_gateway.fleet import engine\nclass E(engine.Engine): pass",
        "from spillway_gateway.fleet.engine import Engine as Base\nclass E(Base): pass",
        "from spillway_gateway.app import Gateway\ndef f():\n    class G(Gateway): pass",
    ],
)
def test_a_trespass_is_found(source: str) -> None:
    assert len(list(trespasses(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "class Own:\n    def f(self): return self._own, self.__class__, type(self).__name__",
        "from spillway_gateway.processes.messages import Message\nclass M(Message): pass",
        "from spillway_gateway.fleet.engine import EngineRequest\nclass R(EngineRequest): pass",
        "import asyncio\nclass C(asyncio.Protocol): pass",
    ],
)
def test_what_is_allowed_passes(source: str) -> None:
    assert list(trespasses(source)) == []
