"""vLLM's arguments that a person may not add: those that Spillway writes itself, and secrets. Pure.

`spillway check` refuses the same ones by this module. How the others are spelt is judged by vLLM's own parser
(argument_verdicts.py).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from spillway_connector.setting_names import SettingNames
from spillway_engine.argument_verdicts import NO_FLAG, TWO_ENTRIES, ArgumentVerdict
from spillway_engine.errors import SettingsError
from spillway_settings.shared_names import CREDENTIAL_VALUE

# vLLM's argument -> the setting that decides it. Given twice, the last one wins in vLLM, while the memory arithmetic,
# the gateway and the shared tier go by the setting.
DECIDED_BY_A_SETTING = {
    "--model": "model.path",
    "--served-model-name": "model.servedName",
    "--dtype": "model.dtype",
    "--kv-cache-dtype": "model.kvCacheDtype",
    "--quantization": "model.quantization",
    "-q": "model.quantization",
    "--enable-lora": "lora",
    "--lora-modules": "lora.adapters",
    "--max-lora-rank": "lora.maxRank",
    "--max-loras": "lora.maxActive",
    "--max-cpu-loras": "lora.maxInMemory",
    "--max-model-len": "model.maxLength",
    "--seed": "model.seed",
    "--host": "host",
    "--port": "port",
    "--block-size": "blockSize",
    "--num-gpu-blocks-override": "deviceBlocks",
    "--kv-cache-memory-bytes": "deviceBlocks",
    "--tensor-parallel-size": "tensorParallelSize",
    "-tp": "tensorParallelSize",
    "--pipeline-parallel-size": "pipelineParallelSize",
    "-pp": "pipelineParallelSize",
    "--data-parallel-size": "dataParallelSize",
    "-dp": "dataParallelSize",
    "--kv-events-config": "kvEvents",
    "--kv-transfer-config": "offload",
    "--kv-offloading-size": "offload",
    "--kv-offloading-backend": "offload",
}
# Why vLLM's arguments may not be added -> these arguments.
FIXED = {
    "is the same on all engines that share a tier; remove it": "--prefix-caching-hash-algo",
    "would name blocks otherwise than the gateway and the other engines of a tier do; remove it": "--prefix-match-unit",
    "would turn off what routing and offload rest on; remove it": "--no-enable-prefix-caching",
    "would make rows of the CPU tier larger than the pod reserves; remove it": "--disable-hybrid-kv-cache-manager",
    "would hide from the gateway how much of a prompt was cached; remove it": "--no-enable-prompt-tokens-details",
    "would bring arguments past this check; write them here one by one": "--config",
    "would end the engine with vLLM's help; remove it": "--help -h",
    "takes no value and is on already; remove it": "--enable-prefix-caching",
    "would place ranks otherwise than tensorParallelSize, pipelineParallelSize and nodesPerReplica do; remove it": """
        --prefill-context-parallel-size -pcp --decode-context-parallel-size -dcp --nnodes -n --node-rank -r
        --master-addr --master-port
    """,
    "would place ranks or API servers otherwise than dataParallelSize and nodesPerReplica do; remove it": """
        --data-parallel-rank -dpn --data-parallel-start-rank -dpr
        --data-parallel-size-local -dpl --data-parallel-address -dpa --data-parallel-rpc-port -dpp
        --data-parallel-backend -dpb --data-parallel-hybrid-lb -dph --data-parallel-external-lb -dpe
        --data-parallel-multi-port-external-lb -dpm --data-parallel-supervisor-port --api-server-count -asc
    """,
    "would end the plain HTTP that the gateway and the probes speak to engines; end TLS at the gateway": """
        --ssl-keyfile --ssl-certfile --ssl-ca-certs --ssl-cert-reqs --ssl-ciphers --enable-ssl-refresh
    """,
    "would take away the HTTP routes that the gateway and the probes ask; remove it": """
        --headless --grpc --uds --root-path --tokens-only
    """,
}
WHY_FIXED = {argument: why for why, arguments in FIXED.items() for argument in arguments.split()}
SECRET = ("--api-key", "--hf-token")
# Other arguments of this kind, of plug-ins or of later versions.
SECRET_NAME = re.compile(r"api-key|password|secret|-token$")
BATCHED_TOKENS, SEQUENCES = "--max-num-batched-tokens", "--max-num-seqs"
AUTO_TOOLS, TOOL_PARSER = "--enable-auto-tool-choice", "--tool-call-parser"
MEMORY_SHARE = "--gpu-memory-utilization"
# Further names of the arguments that people may add.
LONG_NAMES = {
    "--device-memory-utilization": MEMORY_SHARE,
    "-O": "--optimization-level",
    "-ac": "--attention-config",
    "-cc": "--compilation-config",
    "-ep": "--enable-expert-parallel",
    "-sc": "--speculative-config",
}
# Arguments that the chart and the engine service read by their whole names, mostly to count memory.
READ_HERE = f"""
    --additional-config --cpu-offload-gb --distributed-executor-backend --enable-sleep-mode --hf-config-path
    --hf-overrides --logprobs-mode --mm-processor-cache-gb --mm-processor-cache-type --offload-backend
    --offload-group-size --offload-num-in-group --spec-method --spec-model --spec-tokens --speculative-config
    {BATCHED_TOKENS} {SEQUENCES} {AUTO_TOOLS} {TOOL_PARSER} {MEMORY_SHARE}
""".split()
_NUMBER = re.compile(r"[-+]?([0-9]+[.]?[0-9]*|[.][0-9]+)([eE][-+]?[0-9]+)?")


def is_credential_argument(argument: str) -> bool:
    """Whether vLLM's argument (`value`, `--flag=value`) is one by its value, whatever it is called."""
    return any(re.search(CREDENTIAL_VALUE, text) for text in (argument, re.sub(r"^-[^=]*=", "", argument)))


def argument_name(argument: str) -> str | None:
    """`--api_key=x`, `--kv_transfer_config.kv_role` -> the name with dashes, as vLLM reads it; None for a value."""
    if not argument.startswith("-"):
        return None
    name = re.split(r"[=.\s]", argument, maxsplit=1)[0]
    return name.replace("_", "-") if name.startswith("--") else name


def argument_value(arguments: Sequence[str], name: str) -> str | None:
    """Return the value of `--name value`, `--name=value` or `--na_me value`. The last one wins; None: it is not given.

    Abbreviations are not followed.
    """
    value = None
    for index, argument in enumerate(arguments):
        given_name = argument_name(argument)
        if given_name is not None and LONG_NAMES.get(given_name, given_name) == name:
            _, equals, given = argument.partition("=")
            value = given if equals else next(iter(arguments[index + 1 : index + 2]), "")
    return value


def is_secret(argument: str) -> bool:
    name = argument_name(argument) or ""
    return bool(SECRET_NAME.search(name)) or _meant(name) in SECRET


class SecretPlaces(NamedTuple):
    """Places in which this setting is shown, and places in which secrets belong instead."""

    shown_in: str
    by_argument: Mapping[str, str]
    other: str


OF_A_PROCESS = SecretPlaces(
    "this setting and in the list of processes",
    {"--api-key": "the environment variable VLLM_API_KEY", "--hf-token": "the environment variable HF_TOKEN"},
    "an environment variable or a file",
)
OF_THE_CHART = SecretPlaces(
    "a ConfigMap",
    {"--api-key": "apiKeySecret", "--hf-token": "model.hubTokenSecret"},
    "extraEnvVars with valueFrom.secretKeyRef",
)


def refused_arguments(
    arguments: Sequence[str], names: SettingNames, places: SecretPlaces = OF_A_PROCESS
) -> Iterator[ArgumentVerdict]:
    """Yield the arguments that only Spillway itself may set. vLLM judges the spelling of others when it starts."""
    for argument in arguments:
        if (refused := _refused(argument, names, places)) is not None:
            yield ArgumentVerdict(*refused)
    yield from _several_forms(arguments)
    for index in _values_without_a_flag(arguments):
        begin = arguments[index][:1]
        if unicodedata.category(begin or "-") == "Pd" and not begin.isascii():
            yield ArgumentVerdict(f"begins with {unicodedata.name(begin)}, which is no dash to vLLM", "write --", index)
        else:
            yield ArgumentVerdict(NO_FLAG, TWO_ENTRIES, index)
    batch, sequences, share = (
        argument_value(arguments, name) or "" for name in (BATCHED_TOKENS, SEQUENCES, MEMORY_SHARE)
    )
    if batch.isdecimal() and sequences.isdecimal() and int(batch) < int(sequences):
        yield ArgumentVerdict(
            f"{BATCHED_TOKENS}: {batch}, at least the {sequences} of {SEQUENCES} needed, as each sequence of a batch "
            "computes a token",
            "raise the first or lower the second",
        )
    for name, value in ((BATCHED_TOKENS, batch), (SEQUENCES, sequences)):
        if re.fullmatch(r"-[0-9]+|[+]?0+", value):
            yield ArgumentVerdict(f"{name}: {value}, at least 1 needed", "raise it")
    if _NUMBER.fullmatch(share) and not 0 < float(share) <= 1:
        yield ArgumentVerdict(
            f"{MEMORY_SHARE}: {share} given, a share of the device's memory above 0 and up to 1 needed",
            "write 0.9 for 90 %",
        )
    if any(argument_name(each) == AUTO_TOOLS for each in arguments) and not argument_value(arguments, TOOL_PARSER):
        yield ArgumentVerdict(f"{AUTO_TOOLS} needs {TOOL_PARSER}", f"add it, such as {TOOL_PARSER}=hermes")


def check_extra_arguments(arguments: Sequence[str], names: SettingNames) -> None:
    """Raises SettingsError with everything that is wrong, never with a secret's value."""
    texts = [
        f"{names.name(verdict.setting)}: {verdict.problem}; {verdict.remedy}"
        for verdict in refused_arguments(arguments, names)
    ]
    texts += [
        f"{names.name(f'extraArgs[{index}]')}: text of {len(argument)} characters that looks like a credential would "
        "be shown in this setting and in the list of processes; use an environment variable or a file"
        for index, argument in enumerate(arguments)
        if is_credential_argument(argument)
        and not any(is_secret(flag) for flag in arguments[max(0, index - 1) : index + 1])  # refused by its name
    ]
    if texts:
        raise SettingsError("\n".join(texts))


def _refused(argument: str, names: SettingNames, places: SecretPlaces) -> tuple[str, str] | None:
    name = argument_name(argument)
    if name is None:
        return None
    meant = _meant(name)
    if is_secret(argument):
        place = places.by_argument.get(meant, places.other)
        return f"{name} would show a secret in {places.shown_in}", f"use {place}"
    if meant in DECIDED_BY_A_SETTING:
        return f"{name} is decided by {names.name(DECIDED_BY_A_SETTING[meant])}", "change that instead"
    if meant in WHY_FIXED:
        why, _, remedy = WHY_FIXED[meant].partition("; ")
        return f"{name} {why}", remedy
    if (whole := next((each for each in (*READ_HERE, *LONG_NAMES) if _abbreviates(name, each)), None)) is not None:
        return f"{name} is short for {whole}, which is read by its whole name alone", "write it so"
    if re.fullmatch(r"""(["']).*\1""", argument.partition("=")[2]):
        return f"{name} has quotes around its value, which no shell takes away here", "write the value without them"
    if re.search(r"\s", argument.partition("=")[0]):
        return f"{name} and what follows are one word to vLLM, which knows none such", TWO_ENTRIES
    return None


def _abbreviates(name: str, whole: str) -> bool:
    return len(name.lstrip("-")) > 0 and whole != name and whole.startswith(name) and name not in READ_HERE


def _several_forms(arguments: Sequence[str]) -> Iterator[ArgumentVerdict]:
    """Refuse an argument that is given by two names, or as JSON and by its members: vLLM drops one of them without a
    word, the first one or the JSON."""
    forms: dict[str, dict[str, None]] = {}
    for argument in arguments:
        name = argument_name(argument)
        if name is None or _NUMBER.fullmatch(argument):
            continue
        short = "-O" if re.fullmatch("-O.*", name) else name
        members = ".MEMBER" if "." in argument.partition("=")[0] else ""
        forms.setdefault(LONG_NAMES.get(short, name), {})[short + members] = None
    for given in forms.values():
        if len(given) > 1:
            yield ArgumentVerdict(
                f"{' and '.join(given)} are one argument, of which vLLM takes one", "write it in one way"
            )


def _values_without_a_flag(arguments: Sequence[str]) -> Iterator[int]:
    """vLLM would take such a value for the name of the model."""
    is_taken = False
    for index, argument in enumerate(arguments):
        if argument.startswith("-"):
            is_taken = "=" not in argument
        elif not is_taken:
            yield index


def _meant(name: str) -> str:
    """The one of the arguments refused here that `name` is or abbreviates.

    argparse takes every unique beginning, and a letter with its value attached, `-n2`.
    """
    known = [*DECIDED_BY_A_SETTING, *WHY_FIXED, *SECRET]
    if name in known or len(name.lstrip("-")) == 0:
        return name
    letter = name[:2]
    if (short := re.fullmatch(r"(-[a-z]{2,})[0-9]+", name)) and short[1] in known:
        return short[1]
    return next((full for full in known if full.startswith(name)), letter if letter in known else name)
