"""Names and set phrases that this repository does not use, because vLLM, Redis, Kubernetes and OpenAI have terms."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path, PurePath

from lanes.rules import ROOT

from repository.tracked import tracked_files

# Identifiers in Python, and names of modules and folders, with a term to use instead.
NAMES = {
    "Guide": "router",
    "badge": "lease",
    "changes": "differences, change log",
    "comes_soon": "pending",
    "housekeeper": "maintenance thread",
    "keep_house": "maintain",
    "look_around": "poll",
    "short_way": "dispatch",
    "take_back_from_the_dead": "release expired leases",
    "told": "reported, received",
    "turn_writes": "write coalescing",
    "wear": "hold a lease",
    "worth": "load cost",
}
# Phrases in any text, as whole words, in any case.
PHRASES = (
    r"told",
    r"anew",
    r"for ever",
    r"whom",
    r"who waits",
    r'(?<!["`])(?-i:[Nn]obody)',  # quoted: a name; no engine, no request, nothing
    r"keeps? house",
    r"housekeep\w*",
    r"(?:look|search)\w* for circles",
    r"company of requests",
    r"wear\(\)",
    *(name for name in NAMES if "_" in name),
)
NAME = re.compile(rf"\b(?:{'|'.join(NAMES)})\b")
PHRASE = re.compile(rf"(?<![\w-])(?:{'|'.join(PHRASES)})(?![\w-])", re.IGNORECASE)
THIS = Path(__file__).relative_to(ROOT).as_posix()


def identifiers(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of everything that a module defines, imports or uses."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.alias(name=name, asname=asname):
                yield node.lineno, asname or name
            case ast.keyword(arg=str(name)):
                yield node.value.lineno, name


def found_in(path: str, text: str) -> set[str]:
    """Every listed name and phrase of one file, as `path:line: what`; `path: what` for its folders and its own name."""
    found = {f"{path}: {name}" for part in PurePath(path).parts if (name := PurePath(part).stem) in NAMES}
    if path.endswith(".py") and NAME.search(text):  # parsing takes many times as long as this search
        found |= {f"{path}:{line}: {name}" for line, name in identifiers(text) if name in NAMES}
    for number, line in enumerate(text.splitlines(), 1) if PHRASE.search(text) else ():
        found |= {f"{path}:{number}: {match[0]}" for match in PHRASE.finditer(line)}
    return found


def test_no_listed_name_or_phrase_is_used() -> None:
    found: set[str] = set()
    for path in tracked_files():
        if path not in (THIS, "LICENSE"):
            found |= found_in(path, (ROOT / path).read_text(errors="replace"))
    assert not found, f"{len(found)} places:\n" + "\n".join(sorted(found))


def test_listed_names_are_found() -> None:
    source = "import changes\n\ndef worth(told=1):\n    return self.badge.wear(look_around=2)\n"
    assert found_in("a/worth.py", source) == {
        "a/worth.py: worth",
        "a/worth.py:1: changes",
        "a/worth.py:3: worth",
        "a/worth.py:3: told",
        "a/worth.py:4: badge",
        "a/worth.py:4: wear",
        "a/worth.py:4: look_around",
    }


def test_listed_phrases_are_found_in_any_text() -> None:
    text = "The interpreter looks for circles\nand Keeps House,\nas it was told: {{ turn_writes }}.\nNobody is NOBODY."
    assert found_in("a.md", text) == {"a.md:1: looks for circles", "a.md:2: Keeps House", "a.md:3: told"} | {
        "a.md:3: turn_writes",
        "a.md:4: Nobody",
    }


def test_other_names_that_hold_a_listed_one_are_left_alone() -> None:
    assert found_in("changes_of.py", "not_worth = wearing = changes_of = 1  # untold, retold\n") == set()
