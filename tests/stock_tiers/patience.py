"""Options of a tier in tests that are not about its deadlines."""

from __future__ import annotations

# Longer than anything takes on a busy machine.
PATIENT = {
    "lookup_timeout_seconds": 60,
    "load_timeout_seconds": 60,
    "store_timeout_seconds": 60,
    "store_queue_seconds_max": 60,
}
