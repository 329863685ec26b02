"""The configuration by which vLLM finds the connector, for who starts an engine. Needs no vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LOAD_FAILURES = {"kv_load_failure_policy": "recompute"}  # vLLM's default ends the request


def transfer_config(options: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's `kv_transfer_config`. options: The connector's settings; they may name another `spec_name` or module."""
    return {
        "kv_connector": "SpillwayConnector",
        "kv_connector_module_path": "spillway_connector.engine.connector",
        "kv_role": "kv_both",
        **LOAD_FAILURES,
        "kv_connector_extra_config": {
            "spec_name": "SpillwayOffloadingSpec",
            "spec_module_path": "spillway_connector.engine.spec",
            **options,
        },
    }
