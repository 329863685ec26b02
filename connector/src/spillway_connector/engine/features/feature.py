"""A feature of the scheduler half: an object that the half keeps in its list and tells what becomes of requests.

A feature that steers vLLM's steps takes part in `Scheduler.schedule`, too, which is patched for that. EngineCore
process, scheduler thread; no method blocks.
"""

from __future__ import annotations

import functools
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar, runtime_checkable

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from spillway_connector.engine.patches.own_connector import is_among_others, own_connector
from spillway_connector.engine.requests.state import RequestFields

logger = logging.getLogger(__name__)
Kind = TypeVar("Kind")


class Feature:
    """Each method does nothing unless a feature overrides it."""

    def came(self, status: RequestFields) -> None:
        """Handle the arrival of a request."""

    def admitted(self, request_id: str, loaded_tokens: int) -> None:
        """vLLM has given the request blocks, and the request loads this number of tokens."""

    def end_step(self, output: SchedulerOutput) -> None:
        """vLLM has planned a step; its stores have no rows yet."""

    def ended(self, request_id: str) -> None:
        """Handle the end of the request."""

    def tier_was_reset(self) -> None:
        """The CPU tier holds no chunk any more."""


class SteeringFeature(Feature):
    """A feature that decides what vLLM may plan in a step."""

    @abstractmethod
    def schedule(self, scheduler: Scheduler, plan: Callable[[], SchedulerOutput]) -> SchedulerOutput:
        """Plan a step by calling `plan`, which is vLLM's `schedule`."""


@runtime_checkable
class HasFeatures(Protocol):
    """A connector of Spillway's."""

    @property
    def scheduler_features(self) -> list[Feature]: ...


def feature_of(features: Iterable[Feature], kind: type[Kind]) -> Kind | None:
    """The feature of this kind, or None."""
    return next((feature for feature in features if isinstance(feature, kind)), None)


def steering(kind: type[SteeringFeature], setting: str) -> Callable[[Any], Callable[..., SchedulerOutput]]:
    """Make what wraps Scheduler.schedule, so that engines with this feature plan their steps by it.

    Args:
        setting: The name of the setting that switches the feature on.
    """

    def steer(original: Any) -> Callable[..., SchedulerOutput]:
        def schedule(self: Any, *arguments: Any, **options: Any) -> SchedulerOutput:
            plan: Callable[[], SchedulerOutput] = functools.partial(original, self, *arguments, **options)
            connector = own_connector(self, HasFeatures)  # type: ignore[type-abstract]
            feature = None if connector is None else feature_of(connector.scheduler_features, kind)
            if connector is None or feature is None:
                return plan()
            if is_among_others(self):
                logger.warning("%s: on changes nothing beside another KV connector", setting)
                connector.scheduler_features.remove(feature)
                return plan()
            return feature.schedule(self, plan)

        return schedule

    return steer
