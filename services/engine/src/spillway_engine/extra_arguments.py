"""Which of vLLM's arguments a person may not add: those that Spillway writes itself, and secrets. Pure.

The chart refuses the same ones while it renders (charts/spillway/files/refused-arguments.yaml); tests/chart holds the
two to one list of cases.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from spillway_connector.setting_names import SettingNames
from spillway_engine.errors import SettingsError

# vLLM's argument -> the setting that decides it. Given twice, the last one wins in vLLM, while the memory arithmetic,
# the gateway and the shared tier go by the setting.
DECIDED_BY_A_SETTING = {
    "--model": "model.path",
    "--served-model-name": "model.servedName",
    "--dtype": "model.dtype",
    "--max-model-len": "model.maxLength",
    "--seed": "model.seed",
    "--host": "host",
    "--port": "port",
    "--block-size": "blockSize",
    "--num-gpu-blocks-override": "deviceBlocks",
    "--tensor-parallel-size": "tensorParallelSize",
    "-tp": "tensorParallelSize",
    "--kv-events-config": "kvEvents",
    "--kv-transfer-config": "offload",
    "--kv-offloading-size": "offload",
    "--kv-offloading-backend": "offload",
}
# vLLM's argument -> why it may not be added.
FIXED = {
    "--prefix-caching-hash-algo": "is the same on all engines that share a tier; remove it",
    # Of vLLM 0.30 and later.
    "--prefix-match-unit": "would name blocks otherwise than the gateway and the other engines of a tier do; remove it",
    "--config": "would bring arguments past this check; write them here one by one",
}
# vLLM's argument -> where the secret belongs.
SECRET = {
    "--api-key": "the environment variable VLLM_API_KEY",
    "--hf-token": "the environment variable HF_TOKEN",
}
# Other arguments of this kind, of plug-ins or of later versions.
SECRET_NAME = re.compile(r"api-key|password|secret|hf-token")


def argument_name(argument: str) -> str | None:
    """`--api_key=x`, `--kv_transfer_config.kv_role` -> the name with dashes, as vLLM reads it; None for a value."""
    if not argument.startswith("-"):
        return None
    name = re.split(r"[=.\s]", argument, maxsplit=1)[0]
    return name.replace("_", "-") if name.startswith("--") else name


def argument_value(arguments: Sequence[str], name: str) -> str | None:
    """What `--name value`, `--name=value` or `--na_me value` gives; the last one wins, None: it is not given.

    Abbreviations are not followed.
    """
    value = None
    for index, argument in enumerate(arguments):
        if argument_name(argument) == name:
            _, equals, given = argument.partition("=")
            value = given if equals else next(iter(arguments[index + 1 : index + 2]), "")
    return value


def is_secret(argument: str) -> bool:
    name = argument_name(argument) or ""
    return bool(SECRET_NAME.search(name)) or _meant(name) in SECRET


def check_extra_arguments(arguments: Iterable[str], names: SettingNames) -> None:
    """Raises SettingsError with everything that is wrong, never with a secret's value."""
    problems = [problem for argument in arguments if (problem := _problem(argument, names)) is not None]
    if problems:
        raise SettingsError("\n".join(f"{names.name('extraArgs')}: {problem}" for problem in problems))


def _problem(argument: str, names: SettingNames) -> str | None:
    name = argument_name(argument)
    if name is None:
        return None
    meant = _meant(name)
    if is_secret(argument):
        place = SECRET.get(meant, "an environment variable or a file")
        return f"{name} would show a secret in this setting and in the list of processes; use {place}"
    if meant in DECIDED_BY_A_SETTING:
        return f"{name} is decided by {names.name(DECIDED_BY_A_SETTING[meant])}; change that instead"
    if meant in FIXED:
        return f"{name} {FIXED[meant]}"
    return None


def _meant(name: str) -> str:
    """Of the arguments refused here, the one that `name` is or abbreviates: argparse takes every unique beginning."""
    known = [*DECIDED_BY_A_SETTING, *FIXED, *SECRET]
    if name in known or len(name.lstrip("-")) == 0:
        return name
    return next((full for full in known if full.startswith(name)), name)
