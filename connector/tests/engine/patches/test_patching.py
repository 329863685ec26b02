"""Every function of vLLM that is replaced is in a list, is replaced once, and is still the function it was."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore

import spillway_connector
from spillway_connector.engine.patches.patching import Needed, Patch, apply, in_force, replace_on, replaced_on
from spillway_connector.engine.patches.vllm_patches import V023, V030
from spillway_connector.errors import UnsupportedEngine
from spillway_connector.testing.generation import PATCHES

SOURCES = Path(spillway_connector.__file__).parent
PLACE = SOURCES / "engine" / "patching.py"
VERSIONS = Path(__file__).resolve().parents[4] / "docs" / "versions.md"
LISTS = {"0.23": V023, "0.30, 0.32, 0.33": V030}


def test_names_are_told_apart_and_fit_on_the_wire() -> None:
    for patches in LISTS.values():
        names = [patch.name for patch in patches]
        assert len(set(names)) == len(names)
        assert all(name.replace("-", "").isalnum() for name in names)


def test_the_documented_table_is_the_list() -> None:
    by_name = {patch.name: patch for patches in LISTS.values() for patch in patches}
    rows = [line for line in VERSIONS.read_text().splitlines() if line.startswith("| `")]

    assert sorted(rows) == sorted(_row(patch) for patch in by_name.values())


def _row(patch: Patch) -> str:
    versions = [version for version, patches in LISTS.items() if any(one.name == patch.name for one in patches)]
    until = patch.until if not patch.upstream else f"{patch.until} ({patch.upstream})"
    where = f"`{patch.target}`{'' if patch.parameters is not None else ', added'}"
    where += ", of one object" if patch.replacement is None else ""
    if patch.may_be_missing:  # the generation's first version has none
        versions = [", ".join(versions).partition(", ")[2]]
    cells = (f"`{patch.name}`", where, ", ".join(versions), patch.needed_by.value, patch.reason, until)
    return f"| {' | '.join(cells)} |"


# --- applying --------------------------------------------------------------------------------------------------------


class Engine:
    def step(self, tokens: int) -> int:
        """vLLM's."""
        return tokens


def doubling(original: Any) -> Any:
    return lambda self, tokens: 2 * original(self, tokens)


def adding_one(original: Any) -> Any:
    return lambda self, tokens: 1 + original(self, tokens)


def jumping(none: None) -> Any:
    return lambda self: "jumped"


def a_patch(name: str = "doubled", **fields: Any) -> Patch:
    given = {
        "place": f"{__name__}:Engine",
        "signature": "step(self, tokens)",
        "replacement": f"{__name__}:doubling",
        "reason": "a test",
        "until": "the test ends",
    }
    return Patch(name=name, **{**given, **fields})


@pytest.fixture(autouse=True)
def unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "step", Engine.step)


def test_a_patch_is_applied_once_and_looks_like_what_it_replaces() -> None:
    for _ in range(2):
        apply([a_patch()], {Needed.ENGINE_CORE})
    assert Engine().step(3) == 6
    assert (Engine.step.__name__, Engine.step.__doc__) == ("step", "vLLM's.")
    assert "doubled" in in_force().split()


def test_two_patches_of_one_function_are_both_applied_once() -> None:
    more = a_patch("one more", replacement=f"{__name__}:adding_one")
    for _ in range(2):
        apply([a_patch(), more], {Needed.ENGINE_CORE})
    assert Engine().step(3) == 7


def test_a_patch_that_this_process_does_not_need_is_left_out() -> None:
    apply([a_patch(needed_by=Needed.LORA_WORKER)], {Needed.ENGINE_CORE})
    assert Engine().step(3) == 3
    apply([a_patch(replacement=None)], Needed)
    assert Engine().step(3) == 3


def test_a_function_that_changed_is_refused_and_stays() -> None:
    with pytest.raises(UnsupportedEngine, match=r"Engine\.step takes \['self', 'tokens'\], not \['self'\]"):
        apply([a_patch(signature="step(self)")], Needed)
    with pytest.raises(UnsupportedEngine, match=r"Engine\.jump is missing"):
        apply([a_patch(signature="jump(self)")], Needed)
    with pytest.raises(UnsupportedEngine, match=r"Engine\.step exists, which Spillway adds"):
        apply([a_patch(signature="step")], Needed)
    apply([a_patch("later", signature="jump(self)", may_be_missing=True)], Needed)
    assert not hasattr(Engine, "jump") and "later" not in in_force().split()
    with pytest.raises(UnsupportedEngine, match=r"Engine\.step takes"):
        apply([a_patch(signature="step(self)", may_be_missing=True)], Needed)
    assert Engine().step(3) == 3


def test_a_function_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "jump", None, raising=False)
    monkeypatch.delattr(Engine, "jump")
    added = a_patch("added", signature="jump", replacement=f"{__name__}:jumping")
    for _ in range(2):
        apply([added], Needed)
    assert Engine().jump() == "jumped"  # type: ignore[attr-defined]


def test_what_is_no_longer_in_force_is_not_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as undone:
        undone.setattr(Engine, "step", Engine.step)
        apply([a_patch("gone")], Needed)
        assert "gone" in in_force().split()
    assert "gone" not in in_force().split()


def test_all_of_this_vllm_s_can_be_applied_together(monkeypatch: pytest.MonkeyPatch) -> None:
    here = [patch for patch in PATCHES if not patch.may_be_missing or hasattr(patch.owner(), patch.function)]
    for patch in here:
        if patch.parameters is None:
            monkeypatch.setattr(patch.owner(), patch.function, None, raising=False)
            monkeypatch.delattr(patch.owner(), patch.function)
        else:
            monkeypatch.setattr(patch.owner(), patch.function, getattr(patch.owner(), patch.function))
    apply(PATCHES, Needed)
    assert {patch.name for patch in here if patch.replacement is not None} <= set(in_force().split())
    before = EngineCore.preprocess_add_request
    apply(PATCHES, Needed)
    assert EngineCore.preprocess_add_request is before


def test_a_method_of_one_object_is_replaced_there_alone() -> None:
    one = Engine()
    with replaced_on(one, "step", lambda tokens: 0):
        assert (one.step(3), Engine().step(3)) == (0, 3)
    assert one.step(3) == 3
    replace_on(one, "step", lambda tokens: 1)
    assert (one.step(3), Engine().step(3)) == (1, 3)


# --- nothing else replaces a function of vLLM's ----------------------------------------------------------------------


def test_functions_replaced_on_objects_are_in_the_list() -> None:
    replaced = {
        call.args[1].value
        for path in _modules()
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id in ("replace_on", "replaced_on")
        and isinstance(call.args[1], ast.Constant)
    }
    listed = {patch.function for patches in LISTS.values() for patch in patches if patch.replacement is None}
    assert replaced == listed


def test_no_other_module_assigns_to_what_is_vllm_s() -> None:
    assert {str(path): found for path in _modules() if (found := list(assignments(path.read_text())))} == {}


@pytest.mark.parametrize(
    "source",
    [
        "from vllm.core import Engine\nEngine.step = 1",
        "from vllm.core import Engine as E\ndel E.step",
        "def f():\n    from vllm import core\n    core.step = 1",
        "import vllm.core\nvllm.core.LIMIT = 1",
        "import vllm.core as core\ncore.Engine.step += 1",
        "from vllm.core import Engine\nsetattr(Engine, 'step', 1)",
        "from vllm.core import Engine\ntype.__setattr__(Engine, 'step', 1)",
        "cls = own_class('vllm.core', 'Engine')\ncls.step = 1",
        "core = importlib.import_module('vllm.core')\ncore.step = 1",
        "def f(pool):\n    def step(): ...\n    pool.step = step",
        "def f(pool):\n    pool.step = lambda: 1",
        "def f(pool):\n    pool.step = functools.partial(print)",
        "def f(pool):\n    def step(): ...\n    setattr(pool, 'step', step)",
        "def f(pool):\n    def step(): ...\n    vars(pool)['step'] = step",
        "def f(pool):\n    def step(): ...\n    pool.__dict__['step'] = step",
        "class A:\n    def f(self):\n        self.pool.step = self.g\n    def g(self): ...",
        "class A:\n    def f(self, pool):\n        pool.step: Any = self.g\n    def g(self): ...",
    ],
)
def test_a_replacement_elsewhere_is_found(source: str) -> None:
    assert list(assignments(source))


@pytest.mark.parametrize(
    "source",
    [
        "from vllm.core import LIMIT\nclass A:\n    def f(self):\n        self.limit = LIMIT",
        "class A:\n    def f(self):\n        self.step = lambda: 1",
        "from vllm.core import Request\ndef f(request: Request):\n    request.tokens = 1\n    setattr(request, TAG, 1)",
    ],
)
def test_data_and_what_is_our_own_pass(source: str) -> None:
    assert list(assignments(source)) == []


def _modules() -> Iterator[Path]:
    found = [path for path in SOURCES.rglob("*.py") if path != PLACE]
    assert len(found) > 100
    return iter(found)


def assignments(source: str) -> Iterator[str]:
    """Places that assign to what was imported from vLLM, or put a function on an object that is not `self`."""
    tree = ast.parse(source)
    vllms = set(_bound_to_vllm(tree))
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    for node in ast.walk(tree):
        targets, value = _assigned(node)
        for target in targets:
            owner = _owner(target)
            if owner is None:
                continue
            root = owner
            while isinstance(root, ast.Attribute):
                root = root.value
            is_vllms = isinstance(root, ast.Name) and root.id in vllms
            is_self = isinstance(owner, ast.Name) and owner.id in ("self", "cls")
            if is_vllms or (not is_self and value is not None and _is_function(value, functions)):
                yield f"{node.lineno}: {ast.unparse(node)[:80]}"  # type: ignore[attr-defined]


def _bound_to_vllm(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.asname or "vllm") for alias in node.names if alias.name.partition(".")[0] == "vllm")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
            yield from (alias.asname or alias.name for alias in node.names)
        elif (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and ast.unparse(node.value.func) in ("own_class", "importlib.import_module", "import_module")
        ):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def _assigned(node: ast.AST) -> tuple[list[ast.expr], ast.expr | None]:
    """(targets, value) of a statement or call that assigns; value: None if one is removed, or by another operation."""
    match node:
        case ast.Assign():
            return node.targets, node.value
        case ast.AnnAssign():
            return [node.target], node.value
        case ast.AugAssign():
            return [node.target], None
        case ast.Delete():
            return node.targets, None
        case ast.Call(func=ast.Name(id="setattr" | "delattr") | ast.Attribute(attr="__setattr__")) if node.args:
            value = node.args[2] if len(node.args) > 2 else None
            return [ast.Attribute(node.args[0], "x")], value
    return [], None


def _owner(target: ast.expr) -> ast.expr | None:
    """Return the expression whose attribute is assigned to."""
    match target:
        case ast.Attribute(value=owner):
            return owner
        case ast.Subscript(value=ast.Call(func=ast.Name(id="vars"), args=[owner])):
            return owner
        case ast.Subscript(value=ast.Attribute(value=owner, attr="__dict__")):
            return owner
    return None


def _is_function(value: ast.expr, functions: set[str]) -> bool:
    match value:
        case ast.Lambda():
            return True
        case ast.Name(id=name):
            return name in functions
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return name in functions
        case ast.Call(func=called):
            return ast.unparse(called) in ("functools.partial", "partial", "functools.wraps")
    return False
