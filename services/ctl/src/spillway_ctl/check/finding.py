"""A finding: the fault of a setting in one sentence, and how values are shown in it. Pure."""

from __future__ import annotations

import json
import re
import unicodedata
from fractions import Fraction
from typing import Any

import msgspec

from spillway_settings.byte_sizes import format_byte_count, parse_byte_count

# Values of settings with such a name may be credentials, which end up in logs; counts of tokens are none.
_HIDDEN = re.compile(
    r"(?i)(secret|passw|tokens?$|key|credential|url|address|endpoint|env|args|\bvalue|annotation)(?!\w*(second|token))"
)
_HARMLESS = re.compile(r"(?i)(tokens?(persecond|max)|(per|max|block)\w*tokens?)$")
_SHOWN_CHARACTERS_MAX = 64
_SUFFIXES = {
    "": Fraction(1),
    **{suffix: Fraction(1, 1000**power) for power, suffix in enumerate("mun", 1)},
    **{suffix: Fraction(1000**power) for power, suffix in enumerate("kMGTPE", 1)},
    **{f"{suffix}i": Fraction(1024**power) for power, suffix in enumerate("KMGTPE", 1)},
}


class Finding(msgspec.Struct, frozen=True):
    """One mistake.

    Attributes:
        setting: its path in values.yaml, such as `engine.offload.cpuBytes`.
        problem: what was given and what is needed.
        remedy: what to change.
        is_note: whether the values may be right all the same: a cluster or a server can be set up for it.
    """

    setting: str
    problem: str
    remedy: str
    is_note: bool = False

    @property
    def sentence(self) -> str:
        joint = " " if re.match(r"(is empty|holds credentials|would lie|sets )", self.problem) else ": "
        return f"{self.setting}{joint}{self.problem}; {self.remedy}"


def number(value: Any) -> str:
    """A number as a person writes it: 2 for 2.0. Text stays as it is; None is null."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def quoted(value: Any) -> str:
    """Text in double quotes, other values as they are."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else number(value)


def shown(value: Any, path: str) -> str:
    """A value as a message may show it: short, and hidden if it may be a credential."""
    if isinstance(value, dict):
        return "a map"
    if isinstance(value, list):
        return "a list"
    if not isinstance(value, str):
        return number(value)
    name = path.rsplit(".", 1)[-1]
    hides = _HIDDEN.search(path) is not None and _HARMLESS.search(name) is None
    return f"text of {len(value)} characters" if hides or len(value) > _SHOWN_CHARACTERS_MAX else quoted(value)


def shown_url(url: str) -> str:
    """The address without user, password and secrets among its parameters."""
    without_login = re.sub(r"^([A-Za-z0-9+.-]*:?/*).*@", r"\1***@", url)
    return re.sub(r"(?i)((password|token|secret|key)=)[^&]*", r"\1***", without_login)


def foreign_letter(text: str) -> str:
    """The name of the first letter that is not ASCII, which may look like one that is; empty: there is none."""
    return next((unicodedata.name(letter, repr(letter)) for letter in text if not letter.isascii()), "")


def size(value: Any) -> int:
    """Bytes of a size that was read before."""
    return parse_byte_count(value)


bytes_text = format_byte_count


def quantity(size_bytes: int) -> str:
    """Write the size as Kubernetes does, rounded up to a MiB."""
    return f"{-(-size_bytes // (1 << 20))}Mi"


def amount(value: Any) -> Fraction:
    """Return the number that a quantity of Kubernetes stands for: 500m is a half, 1Ki is 1024."""
    number_part, suffix = re.fullmatch(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)([A-Za-z]*)", str(value)).groups()  # type: ignore[union-attr]
    return Fraction(number_part) * _SUFFIXES[suffix]


def milli_cores(value: Any) -> float:
    """Thousandths of a core of what Kubernetes calls cpu."""
    text = str(value)
    return float(text[:-1]) if text.endswith("m") else float(text) * 1000


def on_off(value: Any) -> str:
    """YAML 1.1 reads a bare on and off as true and false."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def below(path: str, folder: str) -> bool:
    """Whether `path` is `folder` or lies in it."""
    return f"{path}/".startswith(f"{folder.rstrip('/')}/")
