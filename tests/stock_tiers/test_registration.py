"""The short names, as vLLM's processes get them."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from spillway_connector.engine.stock import registration
from spillway_connector.engine.stock.tiers import SpillwayNvmeTier, SpillwayRedisTier


def test_the_names_lead_to_the_tiers() -> None:
    registration.register()
    registration.register()  # vLLM may load plugins repeatedly
    assert SecondaryTierFactory.get_tier_class({"type": "spillway-nvme"}) is SpillwayNvmeTier
    assert SecondaryTierFactory.get_tier_class({"type": "spillway-redis"}) is SpillwayRedisTier


def test_vllm_finds_the_plugin() -> None:
    (entry,) = [one for one in importlib.metadata.entry_points(group="vllm.general_plugins") if one.name == "spillway"]
    assert entry.load() is registration.register


@pytest.mark.timeout(900)
def test_the_plugin_loads_nothing_that_a_worker_does_not_need() -> None:
    """The plugin runs in every process of vLLM."""
    program = (
        "import sys; from spillway_connector.engine.stock.registration import register; register(); "
        "print(*sorted(name for name in sys.modules if name.startswith('spillway')))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=800, check=True)
    assert run.stdout.split() == [
        "spillway_connector",
        "spillway_connector.engine",
        "spillway_connector.engine.stock",
        "spillway_connector.engine.stock.registration",
    ]
