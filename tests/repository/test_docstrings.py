"""Docstrings, and entries of their Args blocks, do not begin with a genitive or a clause that lacks its noun."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from lanes.rules import ROOT

from repository.tracked import tracked_files

DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
ELLIPTIC = r"\A(?:Of|What|Whatever|None:|Its|It|Those|They|As|That) |^ +[a-z][a-z_, ]*: (?:[Oo]f|[Tt]hat|[Ww]hose) "


def elliptic(source: str) -> Iterator[int]:
    """Yield the first lines of docstrings that are elliptic."""
    # Parsing takes many times as long as this search.
    if not re.search(ELLIPTIC.replace(r"\A", '"""'), source, re.MULTILINE):
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and re.search(ELLIPTIC, ast.get_docstring(node) or "", re.MULTILINE):
            yield node.body[0].lineno


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    found = [
        f"{path}:{line}"
        for path in tracked_files()
        if path.endswith(".py")
        for line in elliptic((ROOT / path).read_text())
    ]
    assert not found, "say what it is or does: not `What a request costs.` but `Return the cost of a request.`"


def test_such_docstrings_are_found() -> None:
    source = (
        '"""Of a module."""\nclass A:\n    """Of it."""\n    def f(self):\n        """Offers it. Of it."""\n'
        '    def g(self):\n        """What it is."""\n    def h(self):\n        """Whether it is."""\n'
        '    def i(self, a):\n        """Do it.\n\n        Args:\n            a: Of it.\n        """\n'
    )
    assert list(elliptic(source)) == [1, 3, 7, 11]
