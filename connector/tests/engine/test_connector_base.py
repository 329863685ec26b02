"""What no engine with Spillway's connector may be configured for, whichever its vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from spillway_connector.engine.connector_base import ConnectorBase
from spillway_connector.engine.generation import Seams
from spillway_connector.errors import ConfigError

NO_SEAMS = Seams(names={}, methods=())


def config(policy: str = "recompute", hisparse: object = None) -> Any:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy=policy),
        attention_config=SimpleNamespace(hisparse_config=hisparse),
    )


@pytest.mark.parametrize(
    ("given", "names"),
    [(config(policy="fail"), "kv_load_failure_policy: 'fail'"), (config(hisparse=object()), "hisparse_config")],
    ids=["failure policy", "HiSparse"],
)
def test_it_is_refused_with_the_setting_and_the_remedy(given: Any, names: str):
    with pytest.raises(ConfigError, match=rf"{names}.*(set it to|remove it)"):
        ConnectorBase._check(NO_SEAMS, given)
