"""The verdicts of vLLM's own parser about arguments that a person adds, in sentences that name what to change.

It imports the standard library alone, and vLLM when it is asked, so the interpreter of any environment with a vLLM can
run this file: a list of command lines as JSON comes in, the version and the verdicts on each command line go out.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

NO_FLAG = "no flag before it takes this value"
TWO_ENTRIES = "write --flag=value, or flag and value as two entries"
# vLLM keeps its server's arguments in one of these.
PARSER_MODULES = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
_NEEDED = {
    "int": ("a whole number", "write the number alone"),
    "float": ("a number", "write the number alone"),
    "human_readable_int": ("a whole number", "write it as 8192 or 8k"),
    "human_readable_int_or_auto": ("a whole number or auto", "write it as 8192, 8k or auto"),
}
_SHOWN_CHARACTERS_MAX, _MESSAGE_CHARACTERS_MAX = 64, 400
_LEFT_OVER = "unrecognized arguments: "
_NUMBER = re.compile(r"-\d+$|-\d*\.\d+$")  # argparse takes it for a value
_IN_A_CONFIG = re.compile(r"^(?:\d+ validation errors? for (\w+))\n(?:(\S+)\n)? +(.+?)(?: \[type=|$)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ArgumentVerdict:
    """One mistake.

    Attributes:
        problem: what was given and what is needed; it names the argument, if there is one.
        remedy: what to change.
        index: which entry of the list it is, for a value that belongs to no argument.
    """

    problem: str
    remedy: str
    index: int | None = None

    @property
    def setting(self) -> str:
        """Path of the argument in the engine's settings."""
        return "extraArgs" if self.index is None else f"extraArgs[{self.index}]"


class ArgumentVerdictError(Exception):
    """Error: this environment has no vLLM whose parser can be asked."""


class _Refused(Exception):
    """Error in place of argparse's exit; its context is the ArgumentError, if there is one."""


@dataclass(frozen=True, slots=True)
class ServerParser:
    """The parser of vLLM's API server, and the vLLM that it is of, such as 0.32."""

    parser: argparse.ArgumentParser
    version: str

    def refusal(self, arguments: Sequence[str]) -> _Refused | None:
        """The first thing that the parser finds wrong."""
        try:
            parsed = self.parser.parse_args(list(arguments))
        except _Refused as refused:
            return refused
        except (ValueError, TypeError) as error:  # what vLLM does before argparse sees the list
            return _Refused(str(error))
        leftover = getattr(parsed, "model_tag", None)
        return None if leftover is None else _Refused(f"{_LEFT_OVER}{leftover}")


def installed_parser() -> ServerParser:
    """Return the parser of the vLLM that this interpreter imports, which takes seconds. No device is opened.

    Raises ArgumentVerdictError.
    """
    try:
        version: str = importlib.import_module("vllm").__version__
        kind = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser
    except (ImportError, AttributeError) as error:
        raise ArgumentVerdictError(f"a vLLM that cannot be asked ({error}) is installed") from error
    for module in PARSER_MODULES:
        try:
            make = importlib.import_module(module).make_arg_parser
        except ModuleNotFoundError:
            continue
        parser = make(kind())
        parser.error = _raise
        return ServerParser(parser, minor_version(version))
    raise ArgumentVerdictError(f"vLLM {version}, whose parser is elsewhere than Spillway knows, is installed")


def minor_version(version: str) -> str:
    """Return the version up to the minor number: `0.32.1+cpu` -> `0.32`."""
    return ".".join(version.split(".")[:2])


def argument_verdicts(arguments: Sequence[str], server: ServerParser) -> list[ArgumentVerdict]:
    """Every argument that this vLLM would not start with; empty: it takes them all.

    argparse stops at the first mistake, so after one each argument is judged by itself.
    """
    whole = server.refusal(arguments)
    if whole is None:
        return []
    found = [
        _verdict(start, group, refused, server)
        for start, group in _with_their_values(arguments)
        if (refused := server.refusal(group)) is not None
    ]
    return found or [ArgumentVerdict(_clipped(str(whole)), "change or remove the argument")]


def _raise(message: str) -> NoReturn:
    raise _Refused(message)


def _with_their_values(arguments: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Each flag with the entries that follow it, and where it stands."""
    start = 0
    for index in range(1, len(arguments) + 1):
        if index == len(arguments) or (
            len(arguments[index]) > 1 and arguments[index].startswith("-") and not _NUMBER.match(arguments[index])
        ):
            yield start, list(arguments[start:index])
            start = index


def _verdict(start: int, group: Sequence[str], refused: _Refused, server: ServerParser) -> ArgumentVerdict:
    name = _name(group[0])
    _, has_value, value = group[0].partition("=")
    value = value if has_value else " ".join(group[1:])
    error = refused.__context__
    message = error.message if isinstance(error, argparse.ArgumentError) else str(refused)
    if message.startswith(_LEFT_OVER):
        return _unknown(start, group, message.removeprefix(_LEFT_OVER), server)
    if found := re.match(r"ambiguous option: .* could match (.*)", message):
        return ArgumentVerdict(f"{name} is the beginning of {found[1]}", "write one of these whole")
    if message.startswith("expected "):
        return ArgumentVerdict(f"{name} has no value", TWO_ENTRIES)
    if message.startswith("ignored explicit argument"):
        opposite = f"--no-{name.removeprefix('--').removeprefix('no-')}"
        has_opposite = opposite in server.parser._option_string_actions
        remedy = f"write it alone, or {opposite} for the opposite" if has_opposite else "write it alone"
        return ArgumentVerdict(f"{name} takes no value", remedy)
    problem, remedy = _wrong_value(value, message)
    return ArgumentVerdict(f"{name}: {problem}", remedy)


def _name(argument: str) -> str:
    """`--kv_transfer_config.kv_role=x` -> `--kv-transfer-config.kv_role`."""
    return re.sub(r"^--[^.]*", lambda found: found[0].replace("_", "-"), argument.partition("=")[0])


def _unknown(start: int, group: Sequence[str], leftover: str, server: ServerParser) -> ArgumentVerdict:
    name = _name(group[0])
    if _name(leftover).startswith(name.partition(".")[0]) and re.match("-[^0-9]", name):
        flag, dot, key = name.partition(".")
        near = difflib.get_close_matches(flag, server.parser._option_string_actions, 1, 0.8)
        remedy = f"did you mean {near[0]}{dot}{key}?" if near else "remove it, or use an image whose vLLM knows it"
        return ArgumentVerdict(f"{name} is no argument of vLLM {server.version}", remedy)
    values = range(1, len(group)) if group[0].startswith("-") else range(len(group))
    too_many = next((at for at in values if server.refusal(group[: at + 1]) is not None), 0)
    return ArgumentVerdict(NO_FLAG, TWO_ENTRIES, start + too_many)


def _wrong_value(value: str, message: str) -> tuple[str, str]:
    """Return the fault of an argument's value, and the remedy."""
    if found := re.match(r"invalid (\w+) value", message):
        if found[1] in _NEEDED:
            needed, remedy = _NEEDED[found[1]]
            return f"{_shown(value)} given, {needed} needed", remedy
        if found[1] == "loads":
            return _no_json(value)
    if message.startswith("invalid choice: "):
        _, _, choices = message.partition("(choose from ")
        words = [word.strip("' ") for word in choices.rstrip(")").split(",")]
        near = difflib.get_close_matches(value, words, 1)
        remedy = f"did you mean {near[0]}?" if near else "write one of these"
        return f"{_shown(value)} given, one of {_clipped(', '.join(words))} needed", remedy
    if "function loads" in message or "Invalid JSON" in message:
        return _no_json(value)
    if found := _IN_A_CONFIG.search(message):
        return _in_a_config(found[1], found[2] or "", found[3])
    return f"{_shown(value)} given, which vLLM does not take: {_clipped(message)}", "write what vLLM asks for"


def _in_a_config(config: str, key: str, message: str) -> tuple[str, str]:
    """One of vLLM's configurations as JSON, or one key of it as --flag.key."""
    if message.startswith("Unexpected keyword argument"):
        kind = getattr(sys.modules.get("vllm.config"), config, None)
        near = difflib.get_close_matches(key, list(getattr(kind, "__dataclass_fields__", {})), 1)
        return f"{key} is no key of {config}", f"did you mean {near[0]}?" if near else "remove it"
    text = _clipped(message.removeprefix("Value error, "))
    return (f"{key}: {text}" if key else text), f"change this key of {config}"


def _no_json(value: str) -> tuple[str, str]:
    text = f"text of {len(value)} characters given that is no JSON"
    if value.lstrip().startswith(("{", "[")):
        return text, "close every brace and quote, and write names in double quotes"
    return f"{text}, which this argument takes", 'write a map as {"name": "value"}, a list as ["value"]'


def _shown(value: str) -> str:
    if len(value) > _SHOWN_CHARACTERS_MAX or value.startswith(("{", "[")):
        return f"text of {len(value)} characters"
    return json.dumps(value, ensure_ascii=False)


def _clipped(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MESSAGE_CHARACTERS_MAX else f"{line[: _MESSAGE_CHARACTERS_MAX - 1]}…"


def require_version(asked: str) -> None:
    """Raises ArgumentVerdictError, before vLLM is imported, which takes long.

    Every wheel of vLLM has its version in a file; not every one has metadata.
    """
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        raise ArgumentVerdictError("no vLLM is installed")
    file = Path(found.origin).with_name("_version.py")
    version = re.search(r"\bversion = '([0-9.]+)", file.read_text()) if file.exists() else None
    installed = minor_version(version[1]) if version else "of an unknown version"
    if minor_version(asked) != installed:
        raise ArgumentVerdictError(f"vLLM {installed} is installed")


def main() -> int:
    """Answer on the last line of standard output; vLLM may have logged above it."""
    try:
        require_version(sys.argv[1])
        server = installed_parser()
    except ArgumentVerdictError as error:
        answer: dict[str, Any] = {"error": str(error)}
    else:
        lines = json.load(sys.stdin)
        verdicts = [[asdict(verdict) for verdict in argument_verdicts(line, server)] for line in lines]
        answer = {"version": server.version, "verdicts": verdicts}
    print(f"\n{json.dumps(answer)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
