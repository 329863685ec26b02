"""Rules of extraArgs: which of vLLM's arguments may not be added, and how the others are written. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from spillway_ctl.check.chart_facts import facts
from spillway_ctl.check.finding import Finding, quoted
from spillway_ctl.check.group import Group
from spillway_engine.extra_arguments import AUTO_TOOLS, BATCHED_TOKENS, SEQUENCES, TOOL_PARSER, argument_value

_TWO_ENTRIES = "write --flag=value, or flag and value as two entries"
_NUMBER = re.compile(r"[-+]?([0-9]+[.]?[0-9]*|[.][0-9]+)([eE][-+]?[0-9]+)?")
_JSON = re.compile(r'\s*([\[{"0-9-]|(true|false|null)\s*$)')


def argument_findings(group: Group) -> Iterator[Finding]:
    arguments, setting = group.engine.extra_args, f"{group.path}.extraArgs"
    kinds = argument_kinds(str(group.engine.image.vllm)) if group.is_chart_image else {}
    is_taken, waiting, kind = False, "", ""
    for index, argument in enumerate(arguments):
        if not argument.startswith("-"):
            if not is_taken:
                yield Finding(f"{setting}[{index}]", "no flag before it takes this value", _TWO_ENTRIES)
            elif wrong := _wrong_value(kind, waiting, argument):
                yield Finding(setting, f"{waiting}: {wrong[0]}", wrong[1])
            kind = ""
            continue
        is_taken, waiting, kind = "=" not in argument, "", ""
        name = _name(argument)
        refused = _refused(group, argument, name)
        if refused is not None:
            yield refused
        elif kinds and re.match("--.", name):
            full = _full_name(name, kinds)
            takes = kinds.get(full, "")
            following = [*arguments, ""][index + 1]
            yield from _spelled(group, argument, name, (full, takes), following)
            if takes == "switches":
                is_taken = False
            elif "=" not in argument:
                # What follows --attention-config.backend is a word, not the whole JSON.
                waiting, kind = name, "" if "." in argument else takes
    yield from _together(group)


@cache
def argument_kinds(version: str) -> dict[str, str]:
    """Argument of this vLLM's server -> what it takes; empty for a version without a list."""
    table = facts("vllm-arguments.yaml")
    if version == "all" or version not in table:
        return {}
    return {
        name: kind for part in (table["all"], table[version]) for kind, names in part.items() for name in names.split()
    }


def _name(argument: str) -> str:
    name = re.split(r"[=.\s]", argument, maxsplit=1)[0]
    return name.replace("_", "-") if name.startswith("--") else name


@cache
def _fixed() -> dict[str, str]:
    return {name: why for why, names in facts("refused-arguments.yaml")["fixed"].items() for name in names}


def _meant(name: str) -> str:
    """argparse takes every unique beginning of a name, and a letter with its value attached: -n2."""
    refused: dict[str, Any] = facts("refused-arguments.yaml")
    known: list[str] = sorted({*refused["decidedBySetting"], *_fixed(), *refused["secret"]})
    if name in known or not name.strip("-"):
        return name
    for full in known:
        if full.startswith(name):
            return full
    short = re.sub(r"^(-[a-z]{2,})[0-9]+$", r"\1", name)
    if short in known:
        return short
    letter = name[:2]
    return letter if letter != "--" and letter in known else name


def _refused(group: Group, argument: str, name: str) -> Finding | None:
    refused = facts("refused-arguments.yaml")
    meant, setting = _meant(name), f"{group.path}.extraArgs"
    if meant in refused["secret"] or re.search(refused["secretName"], name):
        place = refused["secret"].get(meant, "extraEnvVars with valueFrom.secretKeyRef")
        return Finding(setting, f"{name} would show a secret in a ConfigMap", f"use {place}")
    if meant in refused["decidedBySetting"]:
        decided = refused["decidedBySetting"][meant]
        place = "listenAddress" if decided == "host" else f"{group.path}.{decided}"
        return Finding(setting, f"{name} is decided by {place}", "change that instead")
    if meant in _fixed():
        why, _, remedy = _fixed()[meant].partition("; ")
        return Finding(setting, f"{name} {why}", remedy or "remove it")
    if re.match(r"[^=]*\s", argument):
        return Finding(setting, f"{name} and what follows are one word to vLLM, which knows none such", _TWO_ENTRIES)
    return None


def _full_name(name: str, kinds: dict[str, str]) -> str:
    positive = re.sub("^--no-", "--", name)
    if name in kinds:
        return name
    if kinds.get(positive) == "switches":
        return positive
    beginning = [each for each in sorted(kinds) if each.startswith(name)]
    return beginning[-1] if beginning else ""


def _spelled(group: Group, argument: str, name: str, takes: tuple[str, str], following: str) -> Iterator[Finding]:
    """takes: the argument's full name, empty for one that is not known, and what it takes."""
    setting = f"{group.path}.extraArgs"
    has_value = "=" in argument
    full, kind = takes
    if not full:
        yield Finding(
            setting,
            f"{name} is no argument of vLLM {group.engine.image.vllm}",
            "remove it, or name an image of your own that knows it by image.tag",
        )
    elif kind == "switches" and has_value:
        opposite = re.sub("^--(no-)?", "--no-", full)
        yield Finding(setting, f"{name} takes no value", f"write it alone, or {opposite} for the opposite")
    elif kind == "switches":
        return
    elif has_value:
        if name == argument.split("=", 1)[0].replace("_", "-"):
            wrong = _wrong_value(kind, full, argument.split("=", 1)[1])
            if wrong:
                yield Finding(setting, f"{name}: {wrong[0]}", wrong[1])
    elif kind in ("numbers", "json") and (not following or re.match("-[^0-9.]", following)):
        yield Finding(setting, f"{name} has no value", _TWO_ENTRIES)


def _wrong_value(kind: str, name: str, value: str) -> tuple[str, str] | None:
    """What is wrong with an argument's value, and the remedy."""
    if kind == "numbers" and _NUMBER.fullmatch(value) is None and value not in ("", "None"):
        return f"{quoted(value)} given, a number needed", "write the number alone"
    if name == "--gpu-memory-utilization" and value and value != "None" and not 0 < float(value) <= 1:
        return f"{value} given, a share of the device's memory above 0 and up to 1 needed", "write 0.9 for 90 %"
    text = f"text of {len(value)} characters given that is no JSON"
    if kind == "json" and _JSON.match(value) is None and value not in ("", "None"):
        return f"{text}, which this argument takes", 'write a map as {"name": "value"}, a list as ["value"]'
    if value.startswith("{"):
        try:
            json.loads(value)
        except ValueError:
            return text, "close every brace and quote, and write names in double quotes"
    return None


def _together(group: Group) -> Iterator[Finding]:
    arguments, setting = group.engine.extra_args, f"{group.path}.extraArgs"
    batch, sequences = (argument_value(arguments, name) or "" for name in (BATCHED_TOKENS, SEQUENCES))
    if re.fullmatch("[0-9]+", batch) and re.fullmatch("[0-9]+", sequences) and int(batch) < int(sequences):
        yield Finding(
            setting,
            f"{BATCHED_TOKENS}: {batch}, at least the {sequences} of {SEQUENCES} needed, as each sequence of a batch "
            "computes a token",
            "raise the first or lower the second",
        )
    for name, value in ((BATCHED_TOKENS, batch), (SEQUENCES, sequences)):
        if re.fullmatch(r"-[0-9]+|[+]?0+", value):
            yield Finding(setting, f"{name}: {value}, at least 1 needed", "raise it")
    uses_tools = any(argument.replace("_", "-") == AUTO_TOOLS for argument in arguments)
    if uses_tools and not argument_value(arguments, TOOL_PARSER):
        yield Finding(setting, f"{AUTO_TOOLS} needs {TOOL_PARSER}", f"add it, such as {TOOL_PARSER}=hermes")
