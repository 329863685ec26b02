from __future__ import annotations

import importlib
import pickle

import pytest

from spillway_connector.engine import generation as probes
from spillway_connector.engine.generation import Generation, Seams, generation, require
from spillway_connector.errors import UnsupportedEngine


def test_the_public_paths_lead_to_the_room_of_this_vllm() -> None:
    for module, name in (("connector", "SpillwayConnector"), ("spec", "SpillwayOffloadingSpec")):
        found = getattr(importlib.import_module(f"spillway_connector.engine.{module}"), name)
        assert found.__module__ == f"spillway_connector.engine.{generation().value}.{module}"
        assert pickle.loads(pickle.dumps(found)) is found


def test_each_generation_has_a_room_with_its_seams() -> None:
    for one in Generation:
        assert isinstance(importlib.import_module(f"spillway_connector.engine.{one.value}.seams").SEAMS, Seams)


def test_a_vllm_of_no_known_generation_is_refused_with_what_is_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_has_module", lambda name: False)
    with pytest.raises(UnsupportedEngine, match="no known generation; run Spillway with vLLM 0"):
        generation.__wrapped__()


def test_vllms_own_class_is_found_beneath_what_a_platform_put_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("vllm.v1.core.sched.scheduler")
    own = module.Scheduler

    class Replacement(own):  # type: ignore[misc, valid-type]
        def schedule(self, throttle_prefills: bool = False) -> None: ...

    monkeypatch.setattr(module, "Scheduler", Replacement)

    assert probes.own_class(module.__name__, "Scheduler") is own
    require(importlib.import_module(f"spillway_connector.engine.{generation().value}.seams").SEAMS)


def test_a_missing_module_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedEngine, match=r"vllm\.no\.such is missing"):
        require(Seams(names={"vllm.no.such": ("Name",)}, methods=()))
