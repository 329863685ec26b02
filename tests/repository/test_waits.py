"""Waits of tests are bounded by time. A number of tries is used up at once where each try is answered at once."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from lanes.rules import ROOT

from repository.tracked import tracked_files

PAUSES = {"sleep", "wait"}
MAY_WAIT = re.compile(rf"\b(?:try|{'|'.join(PAUSES)})\b")


def waits_by_tries(source: str) -> Iterator[int]:
    """Lines of loops over a range that pause, or catch an error, and end early when something holds.

    Loops that use their number repeat something that differs each time, which is no wait.
    """
    if not ("range" in source and MAY_WAIT.search(source)):  # parsing takes many times as long as this search
        return
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.For | ast.AsyncFor) or not _is_range(node.iter):
            continue
        inner = [child for statement in node.body for child in ast.walk(statement)]
        if any(isinstance(child, ast.Name) and child.id == ast.unparse(node.target) for child in inner):
            continue
        ends_early = any(isinstance(child, ast.Break | ast.Return) for child in inner)
        waits = any(isinstance(child, ast.Try) or _pauses(child) for child in inner)
        if ends_early and waits:
            yield node.lineno


def _is_range(iterated: ast.expr) -> bool:
    return isinstance(iterated, ast.Call) and isinstance(iterated.func, ast.Name) and iterated.func.id == "range"


def _pauses(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in PAUSES


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
        ("for i in range(9):\n    if harm(i): break\n    time.sleep(1)", []),
        ("for name in names:\n    if ready(name): break\n    time.sleep(1)", []),
        ("for _ in range(9):\n    send()\n    time.sleep(1)", []),
        ("while time.monotonic() < end:\n    if ready(): break\n    time.sleep(1)", []),
    ],
)
def test_such_a_wait_is_recognised(source: str, lines: list[int]) -> None:
    assert list(waits_by_tries(source)) == lines
