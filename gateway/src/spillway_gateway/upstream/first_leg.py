"""The legs of a request, and the bodies that engines get for them. The first one: the prompt, and one token of the
answer.

That token is discarded. The second leg's engine computes it again from the same prompt and by the same settings, so
that text, ids, log-probabilities, stop strings and usage are those of one engine by construction.

The second one is the request as it is. If the engines' own connectors hand prompts over, as NixlConnector does, the
first reply names the place of the prompt's KV, and the second leg gets that name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.metrics import GatewayMetrics
from spillway_gateway.routing.fleet_view import Leg
from spillway_gateway.routing.legs import LegsReason
from spillway_gateway.routing.prefix import PromptBlocks
from spillway_gateway.upstream.forward import Body
from spillway_gateway.upstream.json_walk import JsonWalk
from spillway_gateway.upstream.outbound import OutboundRequest
from spillway_gateway.upstream.router import Attempt
from spillway_gateway.upstream.splice import Edit, edited, insertion, opening_of
from spillway_gateway.upstream.usage import UNSAID_REPLY_TOKENS
from spillway_settings.vllm_salts import Version
from spillway_settings.wire import HAND_OVER_MEMBER, RETENTION_MEMBER, SESSION_MEMBER

STEP_BYTES = 4 * 1024  # 3 ms of the event loop if names are short and spelled with escapes, 0.02 ms of text
STEPS_SECONDS = 0.001  # of steps in a row
REPLY_BYTES_MAX = 1024 * 1024  # a connector names each block
# Engines keep blocks that none asks for at least three times as long; later, others' KV may lie there.
PLACE_SECONDS_MAX = 10.0
_COMPUTED_IN_FULL = ("prompt_logprobs", "echo", "prompt_embeds")  # vLLM reads no cache for these
_BEAMS = "use_beam_search"
_ESCAPED = b"\\u00"  # begins a letter of a name that is written with an escape
_LENGTH, _PARAMS = "max_tokens", "kv_transfer_params"
_OWN = frozenset({HAND_OVER_MEMBER, RETENTION_MEMBER, SESSION_MEMBER})
# Asks vLLM's NixlConnector, or vllm-ascend's MooncakeConnectorV1, to keep the prompt's blocks and name their place.
_KEEP: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# How much is computed and in which form, if the request says so.
_VALUES: dict[str, int | bool | None] = {
    _LENGTH: 1,
    "max_completion_tokens": None,
    "min_tokens": 0,
    "n": 1,
    "best_of": None,
    _BEAMS: False,
    "stream": False,
    "stream_options": None,
    "logprobs": None,
    "top_logprobs": None,
    "return_token_ids": None,
}

_Count = Annotated[int, Meta(ge=1)]
_VALUE_BYTES_MAX = 4096  # of a member of _Replaced
_CUTS_LENGTHS: Version = (0, 32)  # an answer's, to what the prompt leaves; before it vLLM refuses longer ones
_LOGPROBS_MAX = 20  # vLLM's --max-logprobs, unless the operator has set another
_Logprobs = Annotated[int, Meta(ge=0, le=_LOGPROBS_MAX)]


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Replaced(msgspec.Struct):
    """The members of _VALUES in forms that every engine accepts. A first leg does not contain them as the client sent
    them, so its engine cannot refuse them."""

    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    n: _Count | None = None
    best_of: _Count | None = None
    use_beam_search: bool = False
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    logprobs: bool | _Logprobs | None = None
    top_logprobs: _Logprobs | None = None
    return_token_ids: bool | None = None
    messages: msgspec.Raw | None = None  # of a chat, whose `logprobs` is no number

    def accepted(self, prompt_tokens: int, tokens_max: int | None, vllm: Version) -> bool:
        """Whether no member contradicts another one, the length of the prompt or the model's (None: not known)."""
        lengths = [length for length in (self.max_tokens, self.max_completion_tokens) if length is not None]
        asked = max(lengths, default=0)
        answer_tokens = max(1, self.min_tokens, 0 if vllm >= _CUTS_LENGTHS else asked)
        return (
            self.min_tokens <= min(lengths, default=UNSAID_REPLY_TOKENS)
            and (tokens_max is None or max(prompt_tokens + answer_tokens, asked) <= tokens_max)
            and (self.messages is None or self.logprobs in (None, False, True))
            and (self.stream_options is None or bool(self.stream))
            and (not self.top_logprobs or bool(self.logprobs))
        )


_replaced = msgspec.json.Decoder(_Replaced)
_REPLACED = _Replaced.__struct_fields__


def _would_be_accepted(body: Body, walk: JsonWalk, prompt_tokens: int, tokens_max: int | None, vllm: Version) -> bool:
    """Whether engines accept the members of a body that its first leg replaces. walk: has found _REPLACED."""
    outline = []
    for name, found in walk.members.items():
        start, end = found[-1][:2]
        if name == "messages":
            outline.append(b'"messages":[]')
        elif end - start > _VALUE_BYTES_MAX:
            return False
        else:
            outline.append(b'"%s":%s' % (name.encode(), body[start:end]))
    try:
        return _replaced.decode(b"{%s}" % b",".join(outline)).accepted(prompt_tokens, tokens_max, vllm)
    except (ValueError, RecursionError):  # MsgspecError is a ValueError
        return False


async def _has_one(body: Body, names: Sequence[str]) -> bool:
    """Whether the body may have one of the members. Text that quotes a name counts, as it costs a leg at most."""
    if any(b'"%s"' % name.encode() in body for name in names):
        return True
    return _ESCAPED in body and bool((await _walked(body, names)).members)


async def why_one_leg(
    fleet: ModelFleet, prompt: PromptBlocks, body: Body, *, known: bool, single: bool, choices: int, proxied: bool
) -> LegsReason | None:
    """Return why a request takes one leg, whatever the engines; None if it may take two.

    Args:
        fleet: the engines of its model.
        prompt: its blocks.
        body: as engines get it.
        known: the route's body has the members that a first leg changes.
        single: it has one prompt, and does not say how its blocks are transferred.
        choices: answers that it asks for.
        proxied: a proxy sends it to one engine.
    """
    if not known or not fleet.has_roles:
        return LegsReason.DIALECT
    if proxied:
        return LegsReason.PROXY
    # A connector gives the blocks away to the first that reads them, and vLLM reads them for each choice. Its beams do
    # not read them at all, and they would be kept for minutes.
    by_connector = fleet.disaggregation.by_connector
    alone = (*_COMPUTED_IN_FULL, _BEAMS) if by_connector else _COMPUTED_IN_FULL
    if not single or (by_connector and choices > 1) or await _has_one(body, alone):
        return LegsReason.BODY
    if prompt.text_tokens is not None:
        return LegsReason.TEXT
    if not prompt.keys:
        return LegsReason.SHORT
    # If a second leg is refused, its prompt's blocks stay on the prefill engine until the connector gives them up.
    if by_connector:
        walk = await _walked(body, _REPLACED)
        if not _would_be_accepted(body, walk, prompt.prompt_tokens, fleet.prompt_tokens_max, fleet.oldest_vllm):
            return LegsReason.BODY
    return None


class RequestLegs:
    """The legs of one request, counted once: when it is known to take one, or with its second one.

    leg: what the next engine is chosen for; SECOND while the first one is under way.
    """

    __slots__ = ("_by_connector", "_counted", "_metrics", "_model", "_one_leg", "_roles", "_two_because", "leg")

    def __init__(self, request: OutboundRequest, fleet: ModelFleet, metrics: GatewayMetrics) -> None:
        self._one_leg = request.one_leg
        if self._one_leg is None and fleet.disaggregation.is_off:
            self._one_leg = LegsReason.OFF
        self._by_connector = fleet.disaggregation.by_connector
        self._roles = fleet.has_roles
        self._model = fleet.name
        self._metrics = metrics
        self._two_because = LegsReason.PRICE
        self._counted = not self._roles
        self.leg = Leg.OPEN if self._one_leg is None else Leg.WHOLE

    def chosen(self, attempt: Attempt, seconds: float) -> str | None:
        """Record that an engine was chosen, and how long that took. Returns the leg's name; None: there is one leg."""
        legs = attempt.decision.legs
        if legs is not None and legs.prefill is not None:
            self.leg, self._two_because = Leg.SECOND, legs.reason
            return "prefill"
        second, self.leg = self.leg is Leg.SECOND, Leg.WHOLE
        if second:
            if not self._by_connector:  # whose transfer is a part of the second leg
                self._metrics.hand_over(self._model).observe(seconds)
            self._count("two", self._two_because)
            return "decode"
        if not self._counted:
            self._count("one", legs.reason if legs is not None else self._one_leg or LegsReason.OFF)
        return None

    def prefilled(self, why_not: LegsReason | None) -> None:
        """The first leg has ended. why_not: it was of no use."""
        if why_not is not None:
            self.leg = Leg.WHOLE
            self._count("one", why_not)

    def _count(self, decision: str, reason: LegsReason) -> None:
        if not self._counted:
            self._counted = True
            self._metrics.legs(self._model, decision, reason.value).inc()


async def first_leg(request: OutboundRequest, *, by_connector: bool) -> OutboundRequest:
    """The first leg of a request that may take two."""
    body = await first_leg_body(request.body, by_connector=by_connector)
    return msgspec.structs.replace(request, body=body, stream=False)


async def second_leg(request: OutboundRequest, place: Mapping[str, Any]) -> OutboundRequest:
    """The second leg. place: of the prompt's KV, as `place_of` has read it."""
    walk = await _walked(request.body, [_PARAMS])
    params = {**_given(request.body, walk), **place}
    return msgspec.structs.replace(request, body=_with_values(request.body, walk, {_PARAMS: params}, [_PARAMS]))


_Text = Annotated[str, Meta(min_length=1, max_length=1024)]
_Block = Annotated[int, Meta(ge=0, lt=2**31)]


class _Place(msgspec.Struct):
    """The fields of every connector's place. vLLM reads it on the scheduler thread, and an exception there ends the
    engine; a request whose place lacks one of these waits for blocks without an end."""

    do_remote_prefill: bool
    remote_engine_id: _Text
    remote_request_id: _Text
    remote_host: _Text
    remote_port: Annotated[int, Meta(ge=1, le=65535)]
    remote_block_ids: list[_Block | list[_Block]]  # or of each KV group

    @property
    def has_blocks(self) -> bool:
        return self.do_remote_prefill and any(each != [] for each in self.remote_block_ids)


class _Checked(msgspec.Struct):
    kv_transfer_params: _Place | None = None


class _Kept(msgspec.Struct):
    kv_transfer_params: dict[str, msgspec.Raw]


def place_of(reply: bytes) -> Mapping[str, Any] | None:
    """The place of a prompt's KV in the reply to a first leg; None: it names none that an engine could read from.

    A connector's further members pass as they are; what only the gateway says of a request does not.
    """
    try:
        str(reply, "utf-8")  # members that pass as they are were not read
        checked = msgspec.json.decode(reply, type=_Checked).kv_transfer_params
        if checked is None or not checked.has_blocks:
            return None
        kept = msgspec.json.decode(reply, type=_Kept).kv_transfer_params
    except (ValueError, RecursionError):  # MsgspecError is a ValueError
        return None
    return {name: value for name, value in kept.items() if name not in _OWN}


async def first_leg_body(body: Body, *, by_connector: bool = False) -> bytes:
    """The body of the first leg. body: a JSON object."""
    walk = await _walked(body, [*_VALUES, _PARAMS])
    # Retention stays as the gateway has set it; a session is the second leg's to use and to end.
    params = {name: value for name, value in _given(body, walk).items() if name == RETENTION_MEMBER}
    params |= _KEEP if by_connector else {HAND_OVER_MEMBER: True}
    return _with_values(body, walk, {**_VALUES, _PARAMS: params}, [_LENGTH, _PARAMS])


async def _walked(body: Body, names: Sequence[str]) -> JsonWalk:
    """Finds members; a long body is searched between other work."""
    walk = JsonWalk(body, names)
    until = perf_counter() + STEPS_SECONDS
    while walk.at < len(body):
        walk.advance(STEP_BYTES)
        if perf_counter() >= until:
            await asyncio.sleep(0)
            until = perf_counter() + STEPS_SECONDS
    return walk


def _given(body: Body, walk: JsonWalk) -> dict[str, Any]:
    """Return the request's transfer parameters: the gateway's own, as a request with the client's takes one leg."""
    members = walk.members.get(_PARAMS, ())
    said = msgspec.json.decode(body[members[-1].start : members[-1].end]) if members else None
    return said if isinstance(said, dict) else {}


def _with_values(body: Body, walk: JsonWalk, values: Mapping[str, Any], added: Sequence[str]) -> bytes:
    """The body with these values of the members that it has. added: it gets these in any case."""
    edits = [
        Edit(member.start, member.end, msgspec.json.encode(values[name]))
        for name, members in walk.members.items()
        for member in members
    ]
    opening = opening_of(body, len(body))
    assert opening is not None
    edits += [insertion(opening, name, values[name]) for name in added if name not in walk.members]
    return edited(body, sorted(edits))
