"""Choice of prompts that another engine computes than the one that answers; see routing/legs.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spillway_gateway.errors import ConfigError
from spillway_settings.roles import EngineRole, missing_role
from spillway_settings.values.gateway import Disaggregation

if TYPE_CHECKING:
    from spillway_gateway.config.settings import ModelConfig

_MODES = ("auto", "always", "off", False)  # YAML reads a plain `off` as false


class DisaggregationConfig(Disaggregation, frozen=True):
    """token_ms_max: mean time between two tokens of the decode engine's answers, above which no price is compared."""

    @property
    def is_off(self) -> bool:
        return self.mode in ("off", False)

    @property
    def by_connector(self) -> bool:
        """Whether the engines' own connectors hand prompts over: NixlConnector, vllm-ascend's MooncakeConnectorV1."""
        return self.hand_over == "connector"


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
