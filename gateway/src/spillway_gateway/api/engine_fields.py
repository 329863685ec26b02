"""Members of a body that steer the engine's transfers and its scheduler rather than the answer, and who may send them.

`kv_transfer_params` and `ec_transfer_params` name hosts, ports and block numbers: a client that writes them can read
and pin any block of the engine. With API keys they are accepted only from the tenants of `auth.kvTransferTenants`, the
routers that stand in front. vLLM reads the same names out of `vllm_xargs` and of the `extra_args` of `sampling_params`
too, and checks no type of them before its scheduler takes them; the gateway drops these from all callers.
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
# Members that vLLM's scheduler and connectors read out of a request's extra arguments.
STEERING_ARGUMENTS = frozenset({TRANSFER_PARAMS, "ec_transfer_params", "kv_cache_report_mode"})


class EngineFields(msgspec.Struct, kw_only=True):
    """The members as the client sent them; UNSET: it sent none. They are read whole, however long the body is."""

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
    """Return the members that replace the client's in the body; None: a member is removed.

    Args:
        given: the client's members.
        body: the body that they are of. If a member is repeated, the last one counts, and all of them get its value.
        own: the gateway's own values, by their names in OWN_MEMBERS.
        steers: whether the client may steer transfers and scheduling.
        takes_transfer_params: whether the engine reads kv_transfer_params on this route.
    """
    is_untouched = (
        UNSET
        is given.kv_transfer_params
        is given.ec_transfer_params
        is given.priority
        is given.vllm_xargs
        is given.sampling_params
    )
    if is_untouched and not own:  # nearly always
        return {}
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
    """Return the client's parameters without the members that only the gateway sets."""
    if given is UNSET or given is None:
        return dict(own) or None
    if not isinstance(given, dict):
        return given  # the engine refuses it
    return {**{name: value for name, value in given.items() if name not in OWN_MEMBERS}, **own}


def _changes(given: Any, value: Any) -> bool:
    """Whether the body changes. A null is removed, as it may be the last of several: no reader can then use another."""
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
