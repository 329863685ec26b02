"""Host memory that arguments of vLLM ask for beside the CPU tier: weights kept off the device, caches of images. Pure.

The chart counts the same in templates/_memory.tpl; tests/chart/test_template_arithmetic.py compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spillway_engine.extra_arguments import argument_name, argument_value

_GIB = 1 << 30
# vLLM's own default, which it takes from shared memory if the cache's type is shm.
DEFAULT_IMAGE_CACHE_GIB = 4.0


@dataclass(frozen=True, slots=True)
class ArgumentMemory:
    """process_bytes: Memory of the engine's processes. shared_bytes: Memory in /dev/shm. Both of all data parallel
    ranks together."""

    process_bytes: int
    shared_bytes: int


def argument_memory(
    arguments: Sequence[str], *, on_cpu: bool, ranks: int, cores: int, weight_bytes: int
) -> ArgumentMemory:
    """ranks: The devices of one data parallel rank; cores: The number of data parallel ranks; weight_bytes: The weights
    of one of them. On a CPU the weights are in host memory anyway, and are counted there."""
    process_bytes = 0 if on_cpu else _kept_weights(arguments, ranks, cores, weight_bytes)
    image_cache_gib = _number(arguments, "--mm-processor-cache-gb")
    if argument_value(arguments, "--mm-processor-cache-type") == "shm":
        gib = DEFAULT_IMAGE_CACHE_GIB if image_cache_gib is None else image_cache_gib
        return ArgumentMemory(process_bytes, int(gib * _GIB))
    # One in the API server and one in each engine core.
    return ArgumentMemory(process_bytes + int((image_cache_gib or 0.0) * _GIB) * (1 + cores), 0)


def _kept_weights(arguments: Sequence[str], ranks: int, cores: int, weight_bytes: int) -> int:
    kept_bytes = 0
    group = int(_number(arguments, "--offload-group-size") or 0)
    if group > 0 and argument_value(arguments, "--offload-backend") != "uva":
        layers = min(group, max(1, int(_number(arguments, "--offload-num-in-group") or 1)))
        kept_bytes = weight_bytes * layers // group * cores
    else:  # the number for each device
        kept_bytes = int((_number(arguments, "--cpu-offload-gb") or 0.0) * _GIB) * ranks * cores
    if any(argument_name(each) == "--enable-sleep-mode" for each in arguments):
        kept_bytes += weight_bytes * cores  # a sleeping engine has all of its weights in host memory
    return kept_bytes


def _number(arguments: Sequence[str], name: str) -> float | None:
    try:
        value = float(argument_value(arguments, name) or "")
    except ValueError:  # refused by vLLM
        return None
    return value if 0 <= value < 1 << 20 else None
