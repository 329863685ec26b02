"""When a prompt is computed on another engine than its answer; see routing/legs.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spillway_gateway.errors import ConfigError
from spillway_settings.roles import EngineRole, missing_role
from spillway_settings.typed import CamelSection, Count, NotNegative, Positive

if TYPE_CHECKING:
    from spillway_gateway.config.settings import ModelConfig

_MODES = ("auto", "always", "off", False)  # YAML reads a plain `off` as false


class DisaggregationConfig(CamelSection, frozen=True):
    mode: str | bool = "auto"
    uncached_tokens_min: Count = 1024  # a prompt with fewer to compute takes one leg
    # Mean time between two tokens of the decode engine's answers, above which no price is compared; None: no bound.
    token_ms_max: Positive | None = None
    hand_over_ms: NotNegative = 50.0  # its price, while none was measured within a minute
    hand_over_seconds_max: Positive = 2.0  # wait for the prompt in the shared tier once it is computed
    prefill_seconds_max: Positive = 60.0  # then another engine computes it

    @property
    def is_off(self) -> bool:
        return self.mode in ("off", False)


def check_disaggregation(disaggregation: DisaggregationConfig) -> None:
    """Raises ConfigError."""
    mode = disaggregation.mode
    if mode is True or mode not in _MODES:
        raise ConfigError(f"disaggregation.mode: {mode!r} given, auto, always or off needed")


def check_roles(model: ModelConfig) -> None:
    """Raises ConfigError if the model's engines cannot serve it together. Which of them can load what another one
    stores, their KV events tell."""
    roles = [engine.role for engine in model.engines]
    lack = missing_role(roles)
    if lack is not None:
        raise ConfigError(f"models: {model.name!r} {lack}")
    if all(role is EngineRole.BOTH for role in roles):
        return
    for engine in model.engines:
        if engine.kv_events is None:
            raise ConfigError(
                f"models: engine {engine.name!r} of {model.name!r}: no kvEvents given, but engines of the model have "
                "roles, which rest on what is known of their shared tier; set kvEvents, or remove the roles"
            )
