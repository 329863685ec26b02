"""Host memory that arguments of vLLM ask for."""

from __future__ import annotations

import pytest

from spillway_engine.argument_memory import ArgumentMemory, argument_memory

GIB = 1 << 30
WEIGHTS = 64 * GIB


@pytest.mark.parametrize(
    ("arguments", "process_gib", "shared_gib"),
    [
        ([], 0, 0),
        (["--cpu-offload-gb=40"], 4 * 40 * 2, 0),
        (["--cpu_offload_gb", "0.5"], 4, 0),
        (["--cpu-offload-gb=9", "--cpu-offload-gb=1"], 8, 0),
        (["--offload-group-size=8", "--offload-num-in-group=2"], 64 // 4 * 2, 0),
        (["--offload-group-size=8", "--cpu-offload-gb=9"], 64 // 8 * 2, 0),
        (["--offload-group-size=8", "--cpu-offload-gb=1", "--offload-backend=uva"], 8, 0),
        (["--enable-sleep-mode"], 64 * 2, 0),
        (["--enable_sleep_mode", "--cpu-offload-gb=1"], 64 * 2 + 8, 0),
        (["--mm-processor-cache-gb=4"], 4 * (1 + 2), 0),
        (["--mm-processor-cache-type=shm"], 0, 4),
        (["--mm-processor-cache-type=shm", "--mm-processor-cache-gb=10"], 0, 10),
        (["--cpu-offload-gb=many"], 0, 0),
        (["--cpu-offload-gb=nan"], 0, 0),
        (["--cpu-offload-gb"], 0, 0),
    ],
)
def test_what_arguments_ask_for(arguments: list[str], process_gib: int, shared_gib: int) -> None:
    asked = argument_memory(arguments, on_cpu=False, ranks=4, cores=2, weight_bytes=WEIGHTS)

    assert asked == ArgumentMemory(process_gib * GIB, shared_gib * GIB)


def test_on_a_cpu_weights_are_in_host_memory_anyway() -> None:
    arguments = ["--cpu-offload-gb=40", "--enable-sleep-mode", "--mm-processor-cache-gb=1"]

    asked = argument_memory(arguments, on_cpu=True, ranks=1, cores=1, weight_bytes=WEIGHTS)

    assert asked == ArgumentMemory(2 * GIB, 0)
