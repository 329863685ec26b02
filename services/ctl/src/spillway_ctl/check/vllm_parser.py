"""`spillway check --vllm`: extraArgs judged by the parser of an installed vLLM, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from spillway_connector.setting_names import PLAIN_NAMES
from spillway_ctl.check.engine_rules import findings_of
from spillway_ctl.check.finding import Finding
from spillway_ctl.check.shape import shape_findings
from spillway_ctl.check.typed_values import engine_groups, laid_out, missing_defaults
from spillway_ctl.errors import CommandError
from spillway_engine import argument_verdicts
from spillway_engine.argument_verdicts import ArgumentVerdict, minor_version
from spillway_engine.errors import SettingsError
from spillway_engine.extra_arguments import check_extra_arguments

_TIMEOUT_SECONDS = 600  # the imports of vLLM take a minute on a slow disk
# The parser asks for no device; what it imports shall find none either.
_NO_DEVICES = {"CUDA_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": "", "VLLM_LOGGING_LEVEL": "ERROR"}


class VllmVerdicts(msgspec.Struct, frozen=True):
    """The verdicts of the parsers.

    Attributes:
        findings: arguments that an engine's vLLM would not start with.
        unjudged: engines with arguments of whose vLLM no environment was named, with that version.
    """

    findings: list[Finding]
    unjudged: dict[str, str]


def vllm_verdicts(given: Mapping[str, Any], asked: Iterable[str]) -> VllmVerdicts:
    """Each engine's extraArgs by the parser of its own `image.vllm`; Spillway's own refusals come before it.

    Args:
        given: what was written over the chart's defaults.
        asked: versions such as `0.32`, or `0.32=FOLDER` with the environment in which it is installed.

    Raises:
        CommandError: such a vLLM is not installed there, or no engine has it.
    """
    environments = {minor_version(version): folder for version, _, folder in (each.partition("=") for each in asked)}
    tree = laid_out(given)
    if shape_findings(given) or list(missing_defaults(tree)):
        return VllmVerdicts([], {})
    groups = {f"engines.{key}" if key else "engine": engine for key, engine in engine_groups(tree).items()}
    versions = {path: str(engine.image.vllm) for path, engine in groups.items()}
    for version in environments.keys() - versions.values():
        raise CommandError(
            f"--vllm {version}: no engine has this vLLM ("
            + ", ".join(f"{path}.image.vllm: {own}" for path, own in versions.items())
            + f"); name the version that an engine has, or set image.vllm to {version}"
        )
    with_arguments = [path for path, engine in groups.items() if engine.extra_args]
    findings: list[Finding] = []
    for version, environment in environments.items():
        arguments = {
            path: groups[path].extra_args
            for path in with_arguments
            if versions[path] == version and _is_for_vllm(groups[path].extra_args)
        }
        verdicts = _judged(list(arguments.values()), version, environment)
        for path, of_engine in zip(arguments, verdicts, strict=True):
            findings += findings_of(path, (ArgumentVerdict(**each) for each in of_engine))
    unjudged = {path: versions[path] for path in with_arguments if versions[path] not in environments}
    return VllmVerdicts(findings, unjudged)


def _is_for_vllm(arguments: list[str]) -> bool:
    try:
        check_extra_arguments(arguments, PLAIN_NAMES)
    except SettingsError:
        return False
    return True


def _judged(lines: list[list[str]], version: str, environment: str) -> list[list[dict[str, Any]]]:
    place = environment or sys.prefix
    command = [_interpreter(environment), "-I", argument_verdicts.__file__, version]
    try:
        ran = subprocess.run(
            command,
            input=json.dumps(lines),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            env={**os.environ, **_NO_DEVICES},
            check=False,
        )
        answer = json.loads(ran.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, IndexError, ValueError) as error:
        raise CommandError(
            f"--vllm {version}: the vLLM in {place} gave no answer ({error!r}); see whether it imports there"
        ) from error
    if "error" in answer:
        raise CommandError(
            f"--vllm {version}: {answer['error']} in {place}; run this command where vLLM {version} is installed, such "
            f"as in the engine image, or name its environment: --vllm {version}=FOLDER"
        )
    found: list[list[dict[str, Any]]] = answer["verdicts"]
    return found


def _interpreter(environment: str) -> str:
    """Python of an environment's folder; it may be named itself."""
    if not environment:
        return sys.executable
    named = Path(environment)
    return str(named / "bin" / "python" if named.is_dir() else named)
