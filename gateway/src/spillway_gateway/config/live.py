"""The configuration in effect, one value for all rooms of a process."""

from __future__ import annotations

from spillway_gateway.config.settings import (
    ContinuationConfig,
    GatewayConfig,
    HealthConfig,
    LimitsConfig,
    TimeoutsConfig,
)


class LiveConfig:
    """A reload replaces it as a whole, between two requests' steps. A room that follows a reload reads it at each use,
    or is given a function that does; no room keeps a copy, and no other object sets a room's. On the event loop.
    """

    __slots__ = ("current",)

    def __init__(self, current: GatewayConfig) -> None:
        self.current = current

    def replace(self, config: GatewayConfig) -> None:
        self.current = config

    @property
    def limits(self) -> LimitsConfig:
        return self.current.limits

    @property
    def health(self) -> HealthConfig:
        return self.current.health

    @property
    def timeouts(self) -> TimeoutsConfig:
        return self.current.timeouts

    @property
    def continuation(self) -> ContinuationConfig:
        return self.current.continuation
