"""New settings of the model, written into values.yaml: default, and the comment behind the field as its sentence."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator

import msgspec
import yaml

from spillway_settings.values.release import Values


def with_missing_settings(text: str) -> str:
    """The text of values.yaml with a line for each setting that only the model has, behind its neighbour there.

    Raises ValueError: a setting without a comment in the model, or in a section that is no block of lines.
    """
    lines = text.splitlines(keepends=True)
    missing = list(_missing(yaml.compose(text, Loader=yaml.SafeLoader), Values(), ""))
    for at, line in sorted(reversed(missing), key=lambda found: -found[0]):
        lines.insert(at, line)
    return "".join(lines)


def _missing(node: yaml.Node | None, section: msgspec.Struct, path: str) -> Iterator[tuple[int, str]]:
    """Yield the place of each new line, and the line; those of one place in their order."""
    if not isinstance(node, yaml.MappingNode):
        return
    given = {key.value: value for key, value in node.value}
    here, indent = node.start_mark.line, " " * node.start_mark.column
    for field in msgspec.structs.fields(section):
        key, default = field.encode_name, getattr(section, field.name)
        if key in given and isinstance(default, msgspec.Struct):
            yield from _missing(given[key], default, f"{path}{key}.")
        if key in given:
            here = _last_line(given[key]) + 1
        elif default is not msgspec.UNSET:
            comment = _comment(type(section), field.name)
            if comment is None or node.flow_style:
                raise ValueError(
                    f"{path}{key}: write it into values.yaml, or give its field a comment and a block there"
                )
            yield here, f"{indent}{key}: {json.dumps(msgspec.to_builtins(default))}  # {comment}\n"


def _last_line(node: yaml.Node) -> int:
    if isinstance(node, yaml.CollectionNode) and node.value and not node.flow_style:
        last = node.value[-1]
        return _last_line(last[1] if isinstance(last, tuple) else last)
    line: int = node.end_mark.line
    return line


def _comment(section: type, name: str) -> str | None:
    """Return the comment behind the field in the source of the model, or of the section that it is inherited from."""
    for own in section.__mro__:
        if name in inspect.get_annotations(own):
            found = re.search(rf"^    {name}: (?:.*\n)*?.*?  # (.+)$", inspect.getsource(own), re.MULTILINE)
            return found[1] if found and not re.search(r"\n    \w+: ", found[0]) else None
    return None
