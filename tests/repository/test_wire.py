"""Names that two sides must spell alike stand in `spillway_settings.wire` alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from lanes.rules import ROOT

from repository.tracked import tracked_files
from spillway_settings import wire

PLACE = "settings/src/spillway_settings/wire.py"
NAMES = sorted(value for value in vars(wire).values() if isinstance(value, str) and "spillway" in value[:12])
NAMES += [wire.RANK_HEADER]
# A media type, a module or a longer name that merely begins like one is another word.
_NAME = re.compile(rf"(?<![\w./-])(?:{'|'.join(map(re.escape, NAMES))})(?![\w-])", re.IGNORECASE)
_ANYWHERE = re.compile("|".join([*map(re.escape, NAMES), "redis/", "nvme/"]), re.IGNORECASE)
_MEDIUM = re.compile(r"(?:redis|nvme)/(?:[0-9a-f]{16}|\[)")


def spelled(source: str) -> Iterator[str]:
    """Each of the names in the text of a module that is not a docstring: strings, bytes, parts of f-strings."""
    if not _ANYWHERE.search(source):  # most modules: parsing them all takes a second
        return
    tree = ast.parse(source)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in docstrings:
            text = node.value.decode("latin-1") if isinstance(node.value, bytes) else node.value
            if isinstance(text, str) and (_NAME.search(text) or _MEDIUM.search(text)):
                yield f"{node.lineno}: {text[:60]}"


def test_no_other_module_of_the_product_spells_them() -> None:
    modules = [path for path in tracked_files() if re.search(r"(^|/)src/.*\.py$", path) and path != PLACE]
    assert len(modules) > 200
    assert {path: found for path in modules if (found := list(spelled((ROOT / path).read_text())))} == {}


def test_the_names_are_those_of_the_module() -> None:
    assert {wire.CONFIG_PATH, wire.PROMOTE_UTILITY, wire.SESSION_MEMBER, wire.OWN_HEADERS_PREFIX} <= {*NAMES}


@pytest.mark.parametrize(
    "source",
    [
        'PATH = "/spillway/promote"',
        'HEADER = b"x-spillway-engine"',
        'HEADER = "X-Data-Parallel-Rank"',
        'url = f"{base}/spillway/config"',
        'PREFIX = b"x-spillway-"',
        'message = "send spillway_session in kv_transfer_params"',
        'medium = "redis/73696d756c617465"',
        'MEDIUM = r"redis/[0-9a-f]{16}"',
    ],
)
def test_a_second_spelling_is_found(source: str) -> None:
    assert list(spelled(source))


@pytest.mark.parametrize(
    "source",
    ['"""GET /spillway/config."""', 'name = "spillway_session_total"', 'path = "/var/lib/spillway/config.yaml"'],
)
def test_other_words_pass(source: str) -> None:
    assert list(spelled(source)) == []
