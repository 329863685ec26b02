"""The comments of values.yaml: what is said above a setting, and behind it on its line."""

from __future__ import annotations

import re

_KEY = re.compile(r"^( *)([A-Za-z][A-Za-z0-9]*):( .*)?$")
_COMMENT = re.compile(r"^( *)# ?(.*)$")
_BEHIND = re.compile(r"(?<=\s)#\s+(.*)$")
_QUOTED = re.compile(r'"[^"]*"')
_RULE = re.compile(r"^-{3,}|-{3,}$")


def comments_by_setting(text: str) -> dict[str, str]:
    """Path of a setting in block style -> its comment, as one paragraph. A setting without one is left out."""
    found: dict[str, str] = {}
    above: list[str] = []
    path: list[tuple[int, str]] = []
    for line in text.splitlines():
        if comment := _COMMENT.match(line):
            above.append(comment[2])
            continue
        key = _KEY.match(line)
        if key is None:
            above = []
            continue
        depth = len(key[1])
        path = [step for step in path if step[0] < depth] + [(depth, key[2])]
        rest = key[3] or ""
        behind = _BEHIND.search(_QUOTED.sub(lambda quoted: "x" * len(quoted[0]), rest))
        words = [word for word in above if not _RULE.search(word)] + ([rest[behind.start(1) :]] if behind else [])
        if sentence := " ".join(" ".join(words).split()):
            found[".".join(name for _, name in path)] = sentence
        above = []
    return found
