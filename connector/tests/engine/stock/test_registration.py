"""The plugin on a vLLM whose tiers have the earlier contract: nothing is registered, and no process fails."""

from __future__ import annotations

import importlib.metadata
import logging

import pytest
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from spillway_connector.engine.stock import registration


def test_vllm_finds_the_plugin():
    (entry,) = [one for one in importlib.metadata.entry_points(group="vllm.general_plugins") if one.name == "spillway"]
    assert entry.load() is registration.register


def test_an_earlier_vllm_gets_no_tier_and_no_error(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.DEBUG, logger=registration.__name__):
        registration.register()
    assert not registration.TIER_CLASSES.keys() & SecondaryTierFactory._registry.keys()
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG and "needs vLLM 0.30" in record.getMessage()


def test_a_vllm_without_offloading_is_no_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(registration, "_NEEDED", "vllm.no_such_room.config")
    with caplog.at_level(logging.DEBUG, logger=registration.__name__):
        registration.register()
    assert "not registered" in caplog.text
