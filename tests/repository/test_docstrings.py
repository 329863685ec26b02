"""Docstrings are sentences or noun phrases with a subject: none begins with a genitive that leaves its noun out."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from lanes.rules import ROOT

from repository.tracked import tracked_files

DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def genitives(source: str) -> Iterator[int]:
    """Lines of docstrings that begin with "Of "."""
    if "Of " not in source:  # parsing takes many times as long as this search
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and (ast.get_docstring(node) or "").startswith("Of "):
            yield node.body[0].lineno


def test_no_docstring_begins_with_a_genitive_without_a_noun() -> None:
    found = [
        f"{path}:{line}"
        for path in tracked_files()
        if path.endswith(".py")
        for line in genitives((ROOT / path).read_text())
    ]
    assert not found, "say what it is: not `Of one engine.` but `The state of one engine.`"


def test_such_docstrings_are_found() -> None:
    source = '"""Of a module."""\nclass A:\n    """Of it."""\n    def f(self):\n        """Offers it. Of it."""\n'
    assert list(genitives(source)) == [1, 3]
