"""The columns of the table, in its order, and the tests of each."""

from __future__ import annotations

# Column -> its test in test_cells.py, on a vLLM whose engine runs here.
CELLS = {
    "CPU tier": "test_cpu_tier",
    "NVMe": "test_nvme",
    "Redis": "test_redis",
    "early load": "test_early_load",
    "load within a step": "test_load_within_a_step",
    "failed load": "test_failed_load",
    "computed while loading": "test_computed_while_loading",
    "several KV groups": "test_several_kv_groups",
    "two ranks": "test_two_ranks",
    "data parallel": "test_data_parallel",
    "LoRA": "test_lora",
    "reset": "test_reset",
    "events": "test_events",
}

_LIVES = "tests/engine_lives"  # vLLM's own scheduler on random schedules, with every byte of KV checked
_STOCK = "tests/stock_tiers"  # vLLM's own tiering over real files and a real Valkey
_UPSTREAM = "tests/upstream"  # vLLM's own tests of offloading
_ENGINE = "connector/tests/engine"
_REFUSALS = "tests/generations/test_refusals.py"
# Column -> its tests on every version, which start no engine.
ALIKE: dict[str, tuple[str, ...]] = {
    "vLLM's tests": (_UPSTREAM,),
    "HiSparse": (f"{_REFUSALS}::test_hisparse",),
    "vLLM's load within a step": (f"{_REFUSALS}::test_sync_load_budget_bytes",),
}
# Column -> the tests that stand for it on a vLLM whose engine does not run here. Of the columns that are left out only
# engines can show anything.
CONTRACTS: dict[str, tuple[str, ...]] = {
    "CPU tier": (_LIVES, f"{_ENGINE}/cpu_tier/test_lru_rows.py"),
    "NVMe": (_LIVES, _STOCK),
    "Redis": (_STOCK,),
    "early load": (_LIVES, f"{_ENGINE}/manager/test_early_loads.py"),
    "load within a step": (_LIVES, f"{_ENGINE}/scheduler/test_step_loads.py"),
    "failed load": (_LIVES,),
    "computed while loading": (_LIVES, f"{_ENGINE}/features/test_meetings.py"),
    "several KV groups": (_LIVES,),
    "LoRA": (f"{_ENGINE}/namespace/test_adapters.py",),
    "reset": (_LIVES, f"{_ENGINE}/scheduler/test_resets.py"),
    "events": (f"{_ENGINE}/shared_tiers/test_events.py", f"{_ENGINE}/cpu_tier/test_lru_rows.py"),
    "vLLM's tiering": (_STOCK,),
    **ALIKE,
}
# Of these tests, those in which vLLM's own scheduler or tiering runs. The others ask what it calls.
RUN_VLLM = frozenset({_LIVES, _STOCK, _UPSTREAM})
REFUSED = frozenset({"HiSparse", "vLLM's load within a step"})  # whose tests show that Spillway refuses it
# Column -> its tests, each a file, a folder or a case for pytest, on a vLLM whose engine runs here.
ON_ENGINES = {
    **{column: (f"tests/generations/test_cells.py::{test}",) for column, test in CELLS.items()},
    "vLLM's tiering": (f"{_STOCK}/test_engine.py",),
    **ALIKE,
}
COLUMNS = tuple(ON_ENGINES)
