"""Settings of an engine that Spillway's connector refuses, on every vLLM."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.config import KVTransferConfig, VllmConfig

from spillway_connector.engine import connector_base
from spillway_connector.engine.connector_base import ConnectorBase
from spillway_connector.engine.generation import Seams
from spillway_connector.errors import ConfigError

NO_SEAMS = Seams(names={}, methods=())


def config(policy: str = "recompute", hisparse: object = None) -> Any:
    made = VllmConfig()
    made.kv_transfer_config = KVTransferConfig(kv_load_failure_policy=policy)
    made.attention_config.hisparse_config = hisparse
    return made


@pytest.mark.parametrize(
    ("given", "names"),
    [(config(policy="fail"), "kv_load_failure_policy: 'fail'"), (config(hisparse=object()), "hisparse_config")],
    ids=["failure policy", "HiSparse"],
)
def test_it_is_refused_with_the_setting_and_the_remedy(given: Any, names: str):
    with pytest.raises(ConfigError, match=rf"{names}.*(set it to|remove it)"):
        ConnectorBase._check(NO_SEAMS, given)


def test_a_platform_that_refuses_recompute_gets_it_before_the_scheduler_reads_the_policy(monkeypatch):
    """tests/engine_lives shows that vLLM's own scheduler then recomputes."""
    monkeypatch.setattr(connector_base, "refuses_recompute", lambda: True)
    given = config(policy="fail")
    ConnectorBase._check(NO_SEAMS, given)
    assert given.kv_transfer_config.kv_load_failure_policy == "recompute"
