"""Commands that the documentation names exist: make's targets with their variables, subcommands, options, scripts."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from functools import cache

import pytest
from lanes.rules import ROOT

from repository.tracked import tracked_files
from spillway_ctl.options import parser

PAGES = tuple(
    path
    for path in tracked_files()
    if path in ("CONTRIBUTING.md", "README.md", "SECURITY.md")
    or path in ("charts/spillway/README.md", "charts/spillway/templates/NOTES.txt")
    or re.fullmatch(r"docs/.*\.md", path)
)
FENCED = re.compile(r"^([ \t]*)```[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?:(?<=\n\n)|(?<=^))(?: {4}[^\n]*\n|\n)+", re.MULTILINE)
INLINE = re.compile(r"`([^`]+)`")
MAKE = re.compile(r"(?:\$ )?make ([a-z][a-z-]*)((?: +[A-Z_]+=(?:\"[^\"]*\"|[^\s\"]*))*)")
# `spillway ...`, `python -m module ...` and `python file.py ...`, to the end of the command; behind a pipe or `--` too.
PROGRAM = r"(spillway|(?:[\w./-]*/)?python[\d.]*(?: -m)?)"
RUN = re.compile(rf"(?:^|\$ |\| |-- |\$\()(?:[A-Z_]+=\S+ )*{PROGRAM} (?!-)([^|;&<>#)]*)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
# Strings in sealed payloads (docs/formats.md).
NO_COMMANDS = {"spillway sealed block 1", "spillway blocks", "spillway key check"}
FOREIGN = ("vllm.", "pytest", "cProfile")  # modules of other projects


def lines_of_code(text: str) -> Iterator[str]:
    """Lines of blocks, continued ones joined, and inline code."""
    rest = FENCED.sub("\n", text)
    blocks = [block for _, block in FENCED.findall(text)] + INDENTED.findall(rest)
    for block in blocks:
        yield from (" ".join(line.split()) for line in re.sub(r"\\\n", " ", block).splitlines() if line.strip())
    yield from (" ".join(span.split()) for span in INLINE.findall(INDENTED.sub("\n", rest)))


@cache
def makefile() -> dict[str, str]:
    """Target -> its line, the comment under it and its recipe."""
    parts = re.split(r"^([a-z][a-z-]*):(?!=)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


def scripts(section: str) -> list[str]:
    """Paths of what a recipe runs, and of modules that it runs by `-m`."""
    named = re.findall(r"(bench/\w+\.py)", section)
    return named + [path for module in re.findall(r"-m (\w+)", section) for path in module_files(module)]


def module_files(module: str) -> list[str]:
    """The module's file, or those of a package."""
    end = module.replace(".", "/")
    return [path for path in tracked_files() if re.search(rf"(^|/){end}(\.py|/[\w/]*\w+\.py)$", path)]


def has_option(files: list[str], option: str) -> bool:
    """Whether one of the files, or a room of bench/ that one of them imports, has the option."""
    texts = [(ROOT / path).read_text() for path in files]
    rooms = {room for text in texts for room in re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE)}
    texts += [
        (ROOT / path).read_text()
        for path in tracked_files()
        if path.endswith(".py") and path.startswith("bench/") and path.removesuffix(".py").split("/")[1] in rooms
    ]
    return any(f'"{option}"' in text for text in texts)


def wrong_make(line: str) -> list[str]:
    found = MAKE.match(line)
    if found is None:
        return []
    target, words = found[1], shlex.split(found[2])
    if target not in makefile():
        return [f"make {target}"]
    section, wrong = makefile()[target], []
    for name, _, value in (word.partition("=") for word in words):
        known = re.search(rf"\b{name}\b", section) or re.search(rf"^{name} \?=", (ROOT / "Makefile").read_text(), re.M)
        if not known:
            wrong.append(f"make {target} {name}=")
        elif name == "TESTS" and "/" in value:
            wrong += [
                f"make {target} TESTS={path}" for path in value.split() if not (ROOT / path.split("::")[0]).exists()
            ]
        elif f"$({name})" in section and value.startswith("-"):
            files = scripts(section)
            wrong += [f"make {target} {option}" for option in OPTION.findall(value) if not has_option(files, option)]
    return wrong


@cache
def own_commands() -> dict[str, set[str]]:
    """The commands of `spillway`: "tier ls" -> its options."""

    def walk(name: str, node: argparse.ArgumentParser) -> Iterator[tuple[str, set[str]]]:
        yield name, {option for action in node._actions for option in action.option_strings}
        for action in node._actions:
            if isinstance(action, argparse._SubParsersAction):
                for word, below in action.choices.items():
                    yield from walk(f"{name} {word}".strip(), below)

    return dict(walk("", parser()))


def wrong_run(line: str) -> list[str]:
    wrong = []
    for program, rest in RUN.findall("" if line in NO_COMMANDS else line):
        words, options = rest.split(), OPTION.findall(rest)
        if program == "spillway" or words[0] == "spillway_ctl":
            names = [word for word in words if word != "spillway_ctl"]
            name = next((name for name in (" ".join(names[:2]), "".join(names[:1])) if name in own_commands()), None)
            if name is None:
                wrong.append(f"spillway {names[0]}")
            else:
                wrong += [f"spillway {name} {option}" for option in options if option not in own_commands()[name]]
        elif (program.endswith(" -m") and not words[0].startswith(FOREIGN)) or words[0].endswith(".py"):
            files = module_files(words[0]) if program.endswith(" -m") else [words[0]]
            if not files or not (ROOT / files[0]).is_file():
                wrong.append(words[0])
            else:
                wrong += [f"{words[0]} {option}" for option in options if not has_option(files, option)]
    return wrong


def wrong_commands(text: str) -> list[str]:
    return [wrong for line in lines_of_code(text) for wrong in wrong_make(line) + wrong_run(line)]


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist(page: str) -> None:
    assert wrong_commands((ROOT / page).read_text()) == []


def test_what_does_not_exist_is_found() -> None:
    text = """\
Say `make upp`, `make down PORT=1`, `make test TESTS=tests/nowhere`, `make bench-gateway BENCH="--rounds 3 --hops 2"`,
`spillway teir status`, `python bench/nothing.py`, `python bench/gateway.py --hops` and `python -m self_chek`.

    make up PORT=9000 PROT=1
    kubectl exec POD -- python3 -m spillway_ctl tier purge \\
      --tenant T --dry-runn
    cat F | spillway tier tenant --name N --salt-file -

```
$ spillway plan --chart C --rate 3; echo $?
```
"""

    assert sorted(wrong_commands(text)) == sorted(
        [
            "make upp",
            "make down PORT=",
            "make test TESTS=tests/nowhere",
            "make bench-gateway --hops",
            "spillway teir",
            "bench/nothing.py",
            "bench/gateway.py --hops",
            "self_chek",
            "make up PROT=",
            "spillway tier purge --dry-runn",
            "spillway tier tenant --salt-file",
            "spillway plan --rate",
        ]
    )
    assert len(PAGES) > 15
