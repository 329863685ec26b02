"""The members that a request's `kv_transfer_params` may have, with their types.

Clients write them, and no schema checks all of them: `vllm_xargs: {"kv_transfer_params": ...}` may hold a string or a
list. vLLM's scheduler and the connector halves read them on the scheduler's thread, where an exception ends the engine,
so anything else is dropped before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from spillway_connector.engine.patches.own_connector import is_among_others, own_connector
from spillway_connector.engine.requests.tenancy import is_handed_over, retention_of, session_of
from spillway_settings.wire import HAND_OVER_MEMBER, RETENTION_MEMBER, SESSION_MEMBER

_TOKENS_MAX = 2**31  # vLLM counts tokens in 32 bits
_LOAD_TIERS_MAX = 8  # vLLM 0.32 knows two media in two places
_TIER_NAME_CHARS_MAX = 32


def accepted(params: object) -> dict[str, Any] | None:
    """The members that the connector and the offloading code that it inherits read; None: there are none."""
    if not isinstance(params, dict):
        return None
    known = {name: params[name] for name, is_known in _FORMS.items() if name in params and is_known(params[name])}
    return known or None


def _is_token_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _TOKENS_MAX


def _is_session(value: object) -> bool:
    return session_of({SESSION_MEMBER: value}) is not None


def _is_retention(value: object) -> bool:
    return retention_of({RETENTION_MEMBER: value}) is not None


def _is_hand_over(value: object) -> bool:
    return is_handed_over({HAND_OVER_MEMBER: value})


def _is_list_of_tiers(value: object) -> bool:
    return isinstance(value, list) and len(value) <= _LOAD_TIERS_MAX and all(map(_is_tier, value))


def _is_tier(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(text, str) and len(text) <= _TIER_NAME_CHARS_MAX
        for text in (value.get("medium", ""), value.get("locality", ""))
    )


_FORMS: Mapping[str, Callable[[object], bool]] = {
    SESSION_MEMBER: _is_session,
    RETENTION_MEMBER: _is_retention,
    HAND_OVER_MEMBER: _is_hand_over,
    "max_offload_tokens": _is_token_count,
    "max_load_tokens": _is_token_count,  # vLLM 0.32
    "kv_load_tiers": _is_list_of_tiers,  # vLLM 0.32
}


def filtering_transfer_params(connector: type[Any], preprocess: Any) -> Callable[..., Any]:
    """Wrap EngineCore.preprocess_add_request: an engine with Spillway's connector accepts no other kv_transfer_params.

    Beside other connectors their members pass: only they know the forms of those.

    Args:
        connector: The class of Spillway's connectors.
        preprocess: vLLM's method.
    """

    def filtering(self: Any, request: Any) -> Any:
        made, wave = preprocess(self, request)
        scheduler = getattr(self, "scheduler", None)
        if made.kv_transfer_params is not None and own_connector(scheduler, connector) is not None:
            given = made.kv_transfer_params
            if not (is_among_others(scheduler) and isinstance(given, dict)):
                made.kv_transfer_params = accepted(given)
        return made, wave

    return filtering
