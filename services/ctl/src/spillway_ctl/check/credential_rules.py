"""Credentials belong into Secrets: what looks like one and would lie open is refused, and never repeated. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from spillway_ctl.check.finding import Finding
from spillway_ctl.check.group import Release
from spillway_ctl.check.shared_rules import containers
from spillway_engine.extra_arguments import is_credential_argument
from spillway_settings.shared_names import CREDENTIAL_NAME, CREDENTIAL_VALUE, HARMLESS_VALUE

NAME, VALUE = re.compile(CREDENTIAL_NAME), re.compile(CREDENTIAL_VALUE)
_OF_ANOTHER_VARIABLE = re.compile(r"\$\([A-Za-z_]")  # Kubernetes puts its value there


def credential_findings(release: Release) -> Iterator[Finding]:
    harmless = re.compile(HARMLESS_VALUE)
    for group in release.groups:
        for name, value in group.engine.extra_env.items():
            if (NAME.search(name) and not harmless.search(value)) or VALUE.search(value):
                yield Finding(
                    f"{group.path}.extraEnv.{name}",
                    "would lie in a ConfigMap in plain text",
                    "use extraEnvVars with valueFrom.secretKeyRef",
                )
        for index, argument in enumerate(group.engine.extra_args):
            if is_credential_argument(argument):
                yield Finding(
                    f"{group.path}.extraArgs[{index}]",
                    f"text of {len(argument)} characters that looks like a credential would lie in a ConfigMap in "
                    "plain text",
                    "use extraEnvVars with valueFrom.secretKeyRef",
                )
    for path, section in release.sections():
        variables = [(f"{path}.extraEnvVars", msgspec.to_builtins(section.extra_env_vars))]
        variables += [(f"{at}.env", container.get("env") or []) for at, container in containers(path, section)]
        for at, listed in variables:
            for variable in listed:
                yield from _variable(at, variable, harmless)


def _variable(at: str, variable: dict[str, Any], harmless: re.Pattern[str]) -> Iterator[Finding]:
    name, value = variable["name"], str(variable.get("value") or "")
    is_plain = not (harmless.search(value) or _OF_ANOTHER_VARIABLE.search(value))
    if value and ((NAME.search(name) and is_plain) or VALUE.search(value)):
        yield Finding(
            at,
            f"the value of {name} would lie in the pod's specification in plain text",
            "use valueFrom.secretKeyRef in its place",
        )
    sources = variable.get("valueFrom")
    if "value" in variable and sources is not None:
        yield Finding(at, f"{name} has value and valueFrom, and Kubernetes takes one of the two", "remove one")
    if sources is not None and len(sources) != 1:
        yield Finding(
            at,
            f"valueFrom of {name} names {len(sources)} sources, and it takes one",
            "add or remove some",
        )
