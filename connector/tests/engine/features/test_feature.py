"""A feature that steers vLLM's steps: for engines that have it, and for these alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.core.sched.scheduler import Scheduler

from spillway_connector.engine.features.feature import Feature, SteeringFeature, feature_of, steering
from spillway_connector.testing.vllm_parts import part_of


class Halving(SteeringFeature):
    @override
    def schedule(self, scheduler: Any, plan: Callable[[], Any]) -> Any:
        return plan() // 2


class Connector:
    def __init__(self, *features: Feature) -> None:
        self.scheduler_features = list(features)


def among_others(connector: Connector) -> MultiConnector:
    """vLLM's class; its constructor would build the connectors itself."""
    combined = part_of(MultiConnector)
    combined._connectors = [object(), connector]  # type: ignore[list-item]
    return combined


def step(connector: object, tokens: int) -> Any:
    schedule = steering(Halving, "halving")(lambda scheduler, tokens, throttle=False: tokens)
    return schedule(part_of(Scheduler, connector=connector), tokens, throttle=True)


def test_an_engine_with_the_feature_plans_by_it() -> None:
    assert step(Connector(Feature(), Halving()), 100) == 50


@pytest.mark.parametrize("connector", [None, object(), Connector(), Connector(Feature())])
def test_every_other_engine_plans_as_vllm(connector: object) -> None:
    assert step(connector, 100) == 100


def test_beside_another_connector_it_is_left_out_for_good(caplog: pytest.LogCaptureFixture) -> None:
    connector = Connector(Feature(), Halving())
    with caplog.at_level(logging.WARNING):
        assert [step(among_others(connector), 100) for _ in range(2)] == [100, 100]

    assert feature_of(connector.scheduler_features, Halving) is None
    assert feature_of(connector.scheduler_features, Feature) is connector.scheduler_features[0]
    assert [record.getMessage() for record in caplog.records] == [
        "halving: on changes nothing beside another KV connector"
    ]
