"""Docstrings begin with a noun or a verb: not with a preposition, or with an answer or a clause that lacks its noun.

Nor do the entries of their Args blocks begin with a genitive.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from lanes.rules import ROOT

from repository.tracked import tracked_files

DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
FIRST_WORDS = (
    "Against Among Around As Away At Before Behind Below Beside Between Beyond By For From In Into Like Of Off On Out "
    "Outside Over Per Through To Under Unlike Up Upon With Within Without "  # prepositions
    "Although And Because But However If Once Since So Unless Until When Where Wherever While "  # conjunctions
    "Also Else Here Longer Meanwhile Not Otherwise Sooner Then "
    "How It Its None: That These They Those What Whatever Which Whichever Who Whoever Whose Why "  # pronouns
    "0: False False: Never None None, True True,"  # answers of functions
)
ELLIPTIC = rf"\A(?:{'|'.join(FIRST_WORDS.split())}) |^ +[a-z][a-z_, ]*: (?:[Oo]f|[Tt]hat|[Ww]hose) "


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
        '    def j(self):\n        """In place."""\n    def k(self):\n        """None if it is away."""\n'
        '    def l(self):\n        """Infinity if it is away."""\n'
    )
    assert list(elliptic(source)) == [1, 3, 7, 11, 17, 19]
