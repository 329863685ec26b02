"""Links, modules, make targets and import arrows that the pages name exist, and prose is as wide as the code."""

from __future__ import annotations

import re
import runpy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from lanes.rules import ROOT

from repository.tracked import tracked_files

BESIDE_DOCS = ("CONTRIBUTING.md", "README.md", "SECURITY.md", "charts/spillway/README.md")
PAGES = tuple(path for path in tracked_files() if path in BESIDE_DOCS or re.fullmatch(r"docs/.*\.md", path))
LINK = re.compile(r"\]\((?!https?:)([^)\s#]*)(?:#([^)\s]*))?\)")
MODULE = re.compile(r"`((?:[\w-]+/)*[\w-]+\.(?:py|sh|c|tpl|Dockerfile))(?:::\w+)?`")
# Series, variables, headers, alerts and modules of Spillway; benchmarks.py's reports have names of their own.
OWN_NAME = re.compile(r"\b(?:spillway_\w+|SPILLWAY_\w+|Spillway[A-Z]\w+)|\bx-spillway-[a-z-]*[a-z]", re.ASCII)
ADDED = re.compile(r"_(?:total|bucket|sum|count)$")  # to a series' name by the client library
TARGET = re.compile(r"`make ([a-z][a-z-]*)")
WIDTH = 120
# Files of other projects, and files that Spillway writes.
FOREIGN = {"platform.py", "set_env.sh"}


def anchors(text: str) -> set[str]:
    """The anchors of the headings, as GitHub derives them."""
    headings = re.findall(r"^#+ +(.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def missing_links(page: str, text: str) -> list[str]:
    missing = []
    for path, anchor in LINK.findall(text):
        target = (ROOT / page).parent / path if path else ROOT / page
        if not target.exists():
            missing.append(path)
        elif anchor and target.suffix == ".md" and anchor not in anchors(text if not path else target.read_text()):
            missing.append(f"{path}#{anchor}")
    return missing


def missing_modules(text: str) -> list[str]:
    named = {name for name in MODULE.findall(text) if name.rsplit("/", 1)[-1] not in FOREIGN}
    return sorted(name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in tracked_files()))


@cache
def own_names() -> frozenset[str]:
    """All such names in code and the chart."""
    paths = (path for path in tracked_files() if not path.endswith((".md", "repository/test_docs.py")))
    return frozenset(name for path in paths for name in OWN_NAME.findall((ROOT / path).read_text(errors="ignore")))


def missing_names(text: str) -> list[str]:
    return sorted(name for name in set(OWN_NAME.findall(text)) if not {name, ADDED.sub("", name)} & own_names())


def missing_targets(text: str) -> list[str]:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))
    return sorted(set(TARGET.findall(text)) - targets)


def wide_lines(text: str) -> list[int]:
    """Numbers of the lines of prose beyond WIDTH columns; tables and code are as wide as they must be."""
    code, wide = False, []
    for number, line in enumerate(text.splitlines(), start=1):
        code ^= line.lstrip().startswith("```")
        if len(line) > WIDTH and not code and not line.lstrip().startswith("|") and not line.startswith("    "):
            wide.append(number)
    return wide


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page: str) -> None:
    assert missing_links(page, (ROOT / page).read_text()) == []


@pytest.mark.parametrize("page", PAGES)
def test_modules_exist(page: str) -> None:
    assert missing_modules((ROOT / page).read_text()) == []


@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith("docs/benchmarks")])
def test_series_variables_headers_and_alerts_exist(page: str) -> None:
    assert missing_names((ROOT / page).read_text()) == []


def test_the_example_of_a_tier_runs(tmp_path: Path) -> None:
    """docs/development.md, "One tier": a block is stored and loaded."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/development.md").read_text(), re.DOTALL)
    assert "/tmp/kv" in code
    names: dict[str, Any] = {}
    exec(code.replace("bytes(4096)", "b'x' * 4096", 1).replace("/tmp/kv", str(tmp_path)), names)
    assert names["target"] == b"x" * 4096


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_exist(page: str) -> None:
    assert missing_targets((ROOT / page).read_text()) == []


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md"])
def test_prose_is_no_wider_than_code(page: str) -> None:
    assert wide_lines((ROOT / page).read_text()) == []


def test_wide_prose_is_found() -> None:
    wide = "word " * 25
    assert wide_lines(f"{wide}\n| {wide}\n    {wide}\n```\n{wide}\n```\n- {wide}") == [1, 7]


def test_what_does_not_exist_is_found() -> None:
    text = "# Here\n[a](docs/no.md) [b](docs/formats.md#no) [c](#here) `plan/no.py` `plan/copies.py` `make no`"
    assert missing_links("README.md", text) == ["docs/no.md", "docs/formats.md#no"]
    assert missing_modules(text) == ["plan/no.py"]
    assert missing_targets(text) == ["no"]
    names = "spillway_no_total spillway_tier_shed_total SPILLWAY_NO SpillwayNo x-spillway-no x-spillway-overhead-ms"
    assert missing_names(names) == ["SPILLWAY_NO", "SpillwayNo", "spillway_no_total", "x-spillway-no"]
    assert len(PAGES) > 10


def architecture_table(text: str) -> dict[str, set[str]]:
    """Gateway room -> rooms that docs/architecture.md says it may import."""
    chapter = text.split("\n## Gateway\n", 1)[1]
    rows = re.findall(r"^\| (`[^|]*/`) \| ([^|]*) \|$", chapter.split("| room | may import |", 1)[1], re.MULTILINE)
    return {room: set(re.findall(r"`(\w+)/`", cell)) for names, cell in rows for room in re.findall(r"`(\w+)/`", names)}


def test_the_architecture_page_lets_each_room_of_the_gateway_import_what_its_test_allows() -> None:
    allowed: dict[str, set[str]] = runpy.run_path(str(ROOT / "gateway/tests/test_import_arrows.py"))["ALLOWED"]
    source = ROOT / "gateway/src/spillway_gateway"
    rooms = {name for name in allowed if (source / name).is_dir()} - {"processes", "testing"}
    stated = architecture_table((ROOT / "docs/architecture.md").read_text())
    assert stated == {room: allowed[room] & rooms for room in rooms}


@pytest.mark.parametrize("package", ["connector/src/spillway_connector", "gateway/src/spillway_gateway"])
def test_the_architecture_page_names_every_room_and_root_module(package: str) -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    inside = {path.removeprefix(f"{package}/") for path in tracked_files() if path.startswith(f"{package}/")}
    names = {f"{name.split('/')[0]}/" if "/" in name else name for name in inside} - {"__init__.py", "py.typed"}
    assert len(names) > 10
    assert [name for name in sorted(names) if name not in page] == []


def test_the_architecture_page_lists_every_design_note() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    notes = [path.removeprefix("docs/") for path in tracked_files() if path.startswith("docs/design/")]
    assert len(notes) >= 10
    assert [note for note in notes if f"]({note})" not in page] == []


QUOTED_CHAPTER = re.compile(r"docs/operations\.md, \"([^\"]+)\"")


def test_chapters_of_operations_that_other_files_quote_exist() -> None:
    pages = [page for page in PAGES if page.startswith("docs/operations")]
    headings = {heading for page in pages for heading in re.findall(r"^#+ +(.*)$", (ROOT / page).read_text(), re.M)}
    index = (ROOT / "docs/operations.md").read_text()
    assert [page for page in pages[1:] if f"]({page.removeprefix('docs/')}" not in index] == []
    quoted = {
        chapter
        for path in tracked_files()
        if path.startswith("charts/") and path.endswith((".yaml", ".tpl", ".txt"))
        for chapter in QUOTED_CHAPTER.findall(re.sub(r"\s+(?:# )?", " ", (ROOT / path).read_text()))
    }
    assert len(quoted) >= 4
    assert quoted <= headings
