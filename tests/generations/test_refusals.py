"""Options of some versions of vLLM that Spillway refuses: on a vLLM without one, its test is skipped."""

from __future__ import annotations

import importlib

import pytest
from vllm.config import KVTransferConfig, VllmConfig

from spillway_connector.config import ConnectorConfig
from spillway_connector.engine.connector_base import ConnectorBase
from spillway_connector.engine.generation import Seams
from spillway_connector.errors import ConfigError


def test_hisparse() -> None:
    config = VllmConfig()
    if not hasattr(config.attention_config, "hisparse_config"):
        pytest.skip("this vLLM has no HiSparse")
    config.attention_config.hisparse_config = importlib.import_module("vllm.config.attention").HiSparseConfig()
    config.kv_transfer_config = KVTransferConfig(kv_load_failure_policy="recompute")
    with pytest.raises(ConfigError, match=r"hisparse_config: .*; remove it"):
        ConnectorBase._check(Seams(names={}, methods=()), config)


def test_sync_load_budget_bytes() -> None:
    scheduler = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler")
    if "sync_load_budget_bytes" not in scheduler.SchedulerOffloadConfig._fields:
        pytest.skip("this vLLM has no sync_load_budget_bytes")
    with pytest.raises(ConfigError, match="sync_load_budget_bytes: unknown setting"):
        ConnectorConfig.parse({"num_cpu_blocks": 1, "sync_load_budget_bytes": 1})
