from __future__ import annotations

import pytest
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

from spillway_connector.engine.generation import require
from spillway_connector.engine.v023.seams import SEAMS
from spillway_connector.errors import UnsupportedEngine


def test_this_vllm_is_supported():
    require(SEAMS)


def test_a_method_that_changed_its_duty_is_refused(monkeypatch):
    monkeypatch.setattr(TieringOffloadingManager, "lookup", lambda self, key: None)
    with pytest.raises(UnsupportedEngine, match=r"TieringOffloadingManager\.lookup takes"):
        require(SEAMS)


def test_a_missing_class_is_refused(monkeypatch):
    monkeypatch.delattr("vllm.v1.kv_offload.tiering.base.JobResult")
    with pytest.raises(UnsupportedEngine, match="JobResult is missing"):
        require(SEAMS)
