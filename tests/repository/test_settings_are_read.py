"""Every field of the chart's values has a reader: one that nothing reads would be documented and change nothing."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator

import msgspec
from lanes.rules import ROOT

from repository.tracked import tracked_files
from spillway_settings import values

WORD = re.compile(r"\w+")
COPIED = frozenset({"ParentReference"})  # by templates, as Gateway API defines it


def sections() -> Iterator[type[msgspec.Struct]]:
    for module in pkgutil.iter_modules(values.__path__, f"{values.__name__}."):
        for kind in vars(importlib.import_module(module.name)).values():
            if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == module.name:
                yield kind


def words_of(paths: Iterable[str]) -> Counter[str]:
    return Counter(word for path in paths for word in WORD.findall((ROOT / path).read_text()))


def unread(kinds: Collection[type[msgspec.Struct]], code: Counter[str], templates: Counter[str]) -> set[str]:
    """Return the fields whose names the code has only in the model, and whose keys no template has."""
    keys = {field.name: field.encode_name for kind in kinds for field in msgspec.structs.fields(kind)}
    defined = Counter(name for kind in kinds for name in inspect.get_annotations(kind))
    return {name for name, key in keys.items() if code[name] <= defined[name] and not templates[key]}


def test_every_setting_is_read() -> None:
    code = words_of(path for path in tracked_files() if path.endswith(".py") and "/src/" in path)
    templates = words_of(path for path in tracked_files() if path.startswith("charts/spillway/templates/"))
    found = unread([kind for kind in sections() if kind.__name__ not in COPIED], code, templates)
    assert not found, f"no code reads {', '.join(sorted(found))}"


def test_an_unread_setting_is_found() -> None:
    class Section(msgspec.Struct, rename="camel"):
        read_ms: int = 1
        rendered_ms: int = 2
        forgotten_ms: int = 3

    code = Counter({"read_ms": 2, "rendered_ms": 1, "forgotten_ms": 1})
    assert unread([Section], code, Counter({"renderedMs": 1})) == {"forgotten_ms"}
