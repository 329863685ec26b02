"""Members of a body that steer the engine's transfers and its scheduler rather than the answer, and who may send them.

`kv_transfer_params` and `ec_transfer_params` name hosts, ports and block numbers: who writes them reads and pins any
block of the engine. With API keys they are taken from the tenants of `auth.kvTransferTenants` alone, the routers that
stand in front. vLLM reads the same names out of `vllm_xargs` and of the `extra_args` of `sampling_params` too, where it
checks no type before its scheduler takes them; there they are dropped whoever sends them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET

from spillway_gateway.upstream.forward import Body
from spillway_gateway.upstream.splice import MemberValue
from spillway_settings.wire import HAND_OVER_MEMBER, RETENTION_MEMBER, SESSION_MEMBER

TRANSFER_PARAMS = "kv_transfer_params"
# Members of kv_transfer_params that only the gateway sets.
OWN_MEMBERS = frozenset({SESSION_MEMBER, RETENTION_MEMBER, HAND_OVER_MEMBER})
# What vLLM's scheduler and connectors read out of a request's extra arguments.
STEERING_ARGUMENTS = frozenset({TRANSFER_PARAMS, "ec_transfer_params", "kv_cache_report_mode"})


class EngineFields(msgspec.Struct, kw_only=True):
    """As the client sent them; UNSET: it did not. Read whole, however long the body is."""

    kv_transfer_params: Any = UNSET
    ec_transfer_params: Any = UNSET
    priority: Any = UNSET
    vllm_xargs: Any = UNSET
    sampling_params: Any = UNSET


NAMES = frozenset(EngineFields.__struct_fields__)


def engine_members(
    given: EngineFields,
    body: Body,
    own: Mapping[str, Any],
    *,
    steers: bool,
    takes_transfer_params: bool,
) -> dict[str, MemberValue]:
    """The members that the body gets in place of the client's; None: it gets none.

    Args:
        given: the client's.
        body: the body that they are of. If a member is repeated, the last one counts, and all of them get its value.
        own: what the gateway says itself, by its names in OWN_MEMBERS.
        steers: whether the client may steer transfers and scheduling.
        takes_transfer_params: whether the engine reads kv_transfer_params on this route.
    """
    members: dict[str, MemberValue] = {"vllm_xargs": _without_steering(given.vllm_xargs)}
    sampling = given.sampling_params
    if not isinstance(sampling, dict):
        members["sampling_params"] = _without_steering(sampling)
    else:
        kept = {name: value for name, value in sampling.items() if name not in STEERING_ARGUMENTS}
        if "extra_args" in kept:
            kept["extra_args"] = _without_steering(kept["extra_args"])
        members["sampling_params"] = kept
    if not steers:
        members |= {"ec_transfer_params": None, "priority": None, TRANSFER_PARAMS: None}
    if takes_transfer_params:
        members[TRANSFER_PARAMS] = _transfer_params(given.kv_transfer_params if steers else UNSET, own)
    return {
        name: value
        for name, value in members.items()
        if _changes(getattr(given, name), value) or (value is not None and _may_repeat(body, name))
    }


def _may_repeat(body: Body, name: str) -> bool:
    """Whether the body may have the member more than once; a name may be written with escapes."""
    return body.count(name.encode()) > 1 or b"\\u" in body


def _transfer_params(given: Any, own: Mapping[str, Any]) -> Any:
    """The client's without its own idea of what is the gateway's to say."""
    if given is UNSET or given is None:
        return dict(own) or None
    if not isinstance(given, dict):
        return given  # the engine refuses it
    return {**{name: value for name, value in given.items() if name not in OWN_MEMBERS}, **own}


def _changes(given: Any, value: Any) -> bool:
    """A null is taken out, as it may be the last of several: then no reader can take an earlier one."""
    return value is not None if given is UNSET else given is None or value != given


def _without_steering(value: Any) -> Any:
    """Remove the members at any depth of objects and lists."""
    if value is UNSET:
        return None
    if isinstance(value, dict):
        return {name: _without_steering(each) for name, each in value.items() if name not in STEERING_ARGUMENTS}
    if isinstance(value, list):
        return [_without_steering(each) for each in value]
    return value
