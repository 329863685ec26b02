"""Waits of tests are bounded by time. A number of tries is used up at once where each try is answered at once."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from lanes.rules import ROOT

from repository.tracked import tracked_files

PAUSES = {"sleep", "wait"}
LOOP = re.compile(r"( *)(?:async )?for .* in range\(")
END = re.compile(r"\b(?:break|return)\b")


def waits_by_tries(source: str) -> Iterator[int]:
    """Lines of loops over a range that end early when something holds, so that the range bounds how often it is tried.

    Loops that use their number for more than a pause or a check repeat something that differs each time, which is no
    wait. Steps of an engine that a test drives itself are counted, as they take no time that differs.
    """
    if not _may_end_early(source):
        return
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.For | ast.AsyncFor) or not _is_range(node.iter):
            continue
        if "steps" in ast.unparse(node.iter):
            continue
        inner = [child for statement in node.body for child in ast.walk(statement)]
        of_the_wait = {id(name) for child in inner if _paces(child) for name in ast.walk(child)}
        number = ast.unparse(node.target)
        if any(isinstance(child, ast.Name) and child.id == number and id(child) not in of_the_wait for child in inner):
            continue
        if any(map(_ends, node.body)):
            yield node.lineno


def _may_end_early(source: str) -> bool:
    """Search the words of the lines, as parsing all files takes many times as long."""
    depth: int | None = None  # of the outermost loop over a range
    for line in source.splitlines():
        if depth is not None and line.strip() and len(line) - len(line.lstrip()) <= depth:
            depth = None
        if depth is None and (found := LOOP.match(line)):
            depth = len(found[1])
        if depth is not None and END.search(line):
            return True
    return False


def _ends(node: ast.AST, *, in_a_loop: bool = False) -> bool:
    """Whether a statement of a loop may end it; what ends a loop or a function inside it does not."""
    if isinstance(node, ast.Return) or (isinstance(node, ast.Break) and not in_a_loop):
        return True
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return False
    in_a_loop = in_a_loop or isinstance(node, ast.For | ast.AsyncFor | ast.While)
    return any(_ends(child, in_a_loop=in_a_loop) for child in ast.iter_child_nodes(node))


def _is_range(iterated: ast.expr) -> bool:
    return isinstance(iterated, ast.Call) and isinstance(iterated.func, ast.Name) and iterated.func.id == "range"


def _paces(node: ast.AST) -> bool:
    """A pause, or a check that may count how often it was tried."""
    if isinstance(node, ast.Assert):
        return True
    if not isinstance(node, ast.Call):
        return False
    called = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
    return called in PAUSES


def test_no_wait_of_a_test_counts_tries() -> None:
    found = [
        f"{path}:{line}"
        for path in tracked_files()
        if path.endswith(".py") and ("tests/" in path or "/testing/" in path)
        for line in waits_by_tries((ROOT / path).read_text())
    ]
    assert not found, "bound these waits by a deadline, as stack_driver.deadlines.eventually does"


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("for _ in range(9):\n    if ready(): break\n    time.sleep(1)", [1]),
        ("for _ in range(TRIES):\n    try:\n        ask()\n        break\n    except OSError: pass", [1]),
        ("async def f():\n    for _ in range(9):\n        if ready(): return\n        await asyncio.sleep(1)", [2]),
        ("def f():\n    for _ in range(TRIES):\n        if ask() == wanted: return True", [2]),
        ("for i in range(9):\n    if ready(): break\n    sleep(0.1 * i)", [1]),
        ("for i in range(9):\n    if ready(): break\n    assert i < 8", [1]),
        ("for _ in range(9):\n\n    for one in all_of_them:\n        if ready(one): break\n    send()", []),
        ("for _ in range(steps_max):\n    if idle(): break\n    step()", []),
        ("for i in range(9):\n    if harm(i): break\n    time.sleep(1)", []),
        ("for name in names:\n    if ready(name): break\n    time.sleep(1)", []),
        ("for _ in range(9):\n    send()\n    time.sleep(1)", []),
        ("while time.monotonic() < end:\n    if ready(): break\n    time.sleep(1)", []),
    ],
)
def test_such_a_wait_is_recognised(source: str, lines: list[int]) -> None:
    assert list(waits_by_tries(source)) == lines
