from __future__ import annotations

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler

from spillway_connector.engine.generation import require
from spillway_connector.engine.v023.seams import SEAMS
from spillway_connector.errors import UnsupportedEngine


def test_this_vllm_is_supported():
    require(SEAMS)


def test_a_method_that_changed_its_duty_is_refused(monkeypatch):
    monkeypatch.setattr(OffloadingConnectorScheduler, "_lookup", lambda self, key: None)
    with pytest.raises(UnsupportedEngine, match=r"OffloadingConnectorScheduler\._lookup takes"):
        require(SEAMS)


def test_a_missing_class_is_refused(monkeypatch):
    monkeypatch.delattr("vllm.v1.kv_offload.tiering.base.JobResult")
    with pytest.raises(UnsupportedEngine, match="JobResult is missing"):
        require(SEAMS)
