"""Names of an engine's settings at `make up`: one variable each, ENGINE_SET for those without one."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from spillway_stack.errors import StackError

# Setting of the engine service -> variable of `make up` that sets it.
VARIABLES = {
    "model.path": "MODEL",
    "model.servedName": "MODEL",
    "model.dtype": "DTYPE",
    "model.maxLength": "MAX_LENGTH",
    "port": "PORT",
    "kvEvents.port": "PORT",
    "kvEvents.replayPort": "PORT",
    "deviceBlocks": "DEVICE_BLOCKS",
    "offload.enabled": "OFFLOAD",
    "offload.numCpuBlocks": "NUM_CPU_BLOCKS",
    "offload.cpuBytes": "NUM_CPU_BLOCKS",
    "offload.nodeTier": "NODE_TIER",
    "offload.nodeTier.bytes": "NODE_TIER",
    "offload.sharedTier.type": "SHARED_TIER",
    "lifecycle.selfCheck": "SELF_CHECK",
    "lifecycle.selfCheckText": "SELF_CHECK_TEXT",
    "extraArgs": "ENGINE_ARGS",
}
# Settings that the stack chooses, because its components have to agree on them.
RESERVED = frozenset(
    {
        "name",
        "host",
        "settingNames",
        "kvEvents.enabled",
        "offload.sharedTier.nvme.path",
        "offload.sharedTier.redis.url",
        "offload.sharedTier.s3.bucket",
        "offload.sharedTier.s3.endpoint",
    }
)
OVERRIDES = "ENGINE_SET"


def setting_names() -> dict[str, Any]:
    """Return the mapping by which an engine's configuration names its settings in messages."""
    return {"names": dict(VARIABLES), "others": f"{OVERRIDES}={{path}}", "separator": "="}


def overrides(environment: Mapping[str, str]) -> tuple[str, ...]:
    """ENGINE_SET="lifecycle.selfCheckTimeoutSeconds=300 blockSize=64", as spillway_engine's --set takes them.

    Raises StackError for a setting that has a variable, and for one that the stack chooses.
    """
    words = _words(environment, OVERRIDES)
    for word in words:
        path = word.partition("=")[0]
        for key in _sections(path):
            if key in VARIABLES:
                raise StackError(f"{OVERRIDES}={word}: {key} is set by {VARIABLES[key]}=")
        if any(
            reserved == path or reserved.startswith(f"{path}.") or path.startswith(f"{reserved}.")
            for reserved in RESERVED
        ):
            raise StackError(f"{OVERRIDES}={word}: {path} is decided by the local stack; leave it out")
    return words


def arguments(environment: Mapping[str, str]) -> tuple[str, ...]:
    """ENGINE_ARGS="--max-num-seqs 8", split as a shell splits it; the engine service validates them."""
    return _words(environment, "ENGINE_ARGS")


def _words(environment: Mapping[str, str], name: str) -> tuple[str, ...]:
    text = environment.get(name, "")
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise StackError(f"{name}={text} is not a command line: {error}") from error


def _sections(path: str) -> list[str]:
    parts = path.partition("[")[0].split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
