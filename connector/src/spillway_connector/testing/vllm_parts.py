"""vLLM's own objects of which a test needs a few attributes, without what their constructors would start or load."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

Kind = TypeVar("Kind")


def part_of(kind: type[Kind], **attributes: Any) -> Kind:
    """Make an object of one of vLLM's classes that has these attributes alone; all of its methods are vLLM's.

    An attribute that this vLLM renamed fails the test, unlike in an imitation. A property gets its value in a subclass.

    Raises:
        AttributeError: Neither the class nor one of its bases names the attribute.
    """
    unknown = [name for name in attributes if not _names(kind, name)]
    if unknown:
        raise AttributeError(f"{kind.__module__}.{kind.__qualname__} of this vLLM names no {', '.join(unknown)}")
    fixed = {name: value for name, value in attributes.items() if isinstance(getattr(kind, name, None), property)}
    made: Any = object.__new__(type(kind.__name__, (kind,), fixed) if fixed else kind)
    for name in attributes.keys() - fixed:
        object.__setattr__(made, name, attributes[name])
    return cast("Kind", made)


def _names(kind: type, name: str) -> bool:
    if hasattr(kind, name):
        return True
    own = re.compile(rf"^    {name}\s*:|\bself\.{name}\b", re.MULTILINE)  # a field of a dataclass, or set by a method
    return any(own.search(_source(base.__module__)) for base in kind.__mro__ if base is not object)


@cache
def _source(module: str) -> str:
    path = getattr(sys.modules[module], "__file__", None)
    return Path(path).read_text(encoding="utf-8") if path and path.endswith(".py") else ""
