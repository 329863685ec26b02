"""The columns of the table, in its order."""

from __future__ import annotations

# Column -> its test in test_cells.py, the same for each version.
CELLS = {
    "CPU tier": "test_cpu_tier",
    "NVMe": "test_nvme",
    "Redis": "test_redis",
    "early load": "test_early_load",
    "failed load": "test_failed_load",
    "computed while loading": "test_computed_while_loading",
    "several KV groups": "test_several_kv_groups",
    "two ranks": "test_two_ranks",
    "data parallel": "test_data_parallel",
    "LoRA": "test_lora",
    "reset": "test_reset",
    "events": "test_events",
}
