"""Spillway's connector is found at vLLM's scheduler, alone or within vLLM's own MultiConnector."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from spillway_connector.engine.connector import SpillwayConnector
from spillway_connector.engine.features.hints import HintListener
from spillway_connector.engine.namespace.weights import WeightsListener
from spillway_connector.engine.patches.own_connector import is_among_others, own_connector
from spillway_connector.errors import ConfigError
from spillway_connector.testing.generation import patch_vllm
from spillway_connector.testing.vllm_parts import part_of


class Ours:
    def __init__(self) -> None:
        self.causes: list[str] = []

    def weights_changing(self, cause: str) -> None:
        self.causes.append(cause)


def together(*connectors: object) -> MultiConnector:
    """vLLM's class; its constructor would build the connectors itself."""
    return part_of(MultiConnector, _connectors=list(connectors))


def scheduler(connector: object) -> Scheduler:
    return part_of(Scheduler, connector=connector)


def test_alone_and_beside_others():
    ours = Ours()

    assert own_connector(scheduler(ours), WeightsListener) is ours
    assert own_connector(scheduler(together(object(), ours)), WeightsListener) is ours
    assert own_connector(scheduler(together(together(ours), object())), WeightsListener) is ours
    assert (is_among_others(scheduler(ours)), is_among_others(scheduler(together(ours)))) == (False, True)


@pytest.mark.parametrize("engine", [None, scheduler(None), scheduler(object()), scheduler(together(object()))])
def test_an_engine_without_it(engine: Any):
    assert own_connector(engine, WeightsListener) is None


def test_another_kind_of_listener_is_none():
    assert own_connector(scheduler(together(Ours())), HintListener) is None


def test_two_of_ours_are_refused():
    """Their rows of the CPU tier would be the same memory."""
    with pytest.raises(ConfigError, match="2 of them are Spillway's"):
        own_connector(scheduler(together(Ours(), Ours())), WeightsListener)


def test_a_change_of_weights_is_heard_beside_another_connector():
    patch_vllm("weight-changes")
    ours = Ours()
    executor = part_of(UniProcExecutor, collective_rpc=lambda method, timeout, args, kwargs: None)
    core = part_of(EngineCore, scheduler=scheduler(together(object(), ours)), model_executor=executor)

    core.collective_rpc("reload_weights")

    assert ours.causes == ["reload_weights"]


def test_vllm_knows_the_connector_by_the_name_under_which_a_multi_connector_asks_for_it():
    assert KVConnectorFactory.get_connector_class_by_name(SpillwayConnector.__name__) is SpillwayConnector
    stats = MultiConnector.build_kv_connector_stats({SpillwayConnector.__name__: {"data": {}}})

    assert stats is not None and list(stats.data) == [SpillwayConnector.__name__]
