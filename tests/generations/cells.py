"""The columns of the table, in its order."""

from __future__ import annotations

# Column -> its test in test_cells.py, the same for each version.
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
_ENGINE = "connector/tests/engine"
# Column -> the tests that stand for it on a vLLM whose engine does not run here. Of the columns that are left out only
# engines can show anything.
CONTRACTS = {
    "CPU tier": (_LIVES, f"{_ENGINE}/cpu_tier/test_tier.py"),
    "NVMe": (_LIVES, "tests/stock_tiers"),
    "Redis": ("tests/stock_tiers",),
    "early load": (_LIVES, f"{_ENGINE}/manager/test_early_loads.py"),
    "load within a step": (_LIVES, f"{_ENGINE}/scheduler/test_step_loads.py"),
    "failed load": (_LIVES,),
    "computed while loading": (_LIVES, f"{_ENGINE}/features/test_meetings.py"),
    "several KV groups": (_LIVES,),
    "LoRA": (f"{_ENGINE}/namespace/test_adapters.py",),
    "reset": (_LIVES, f"{_ENGINE}/scheduler/test_resets.py"),
    "events": (f"{_ENGINE}/shared_tiers/test_events.py", f"{_ENGINE}/cpu_tier/test_tier.py"),
}
