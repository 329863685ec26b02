"""Requests that take one leg whatever the engines, by what their bodies say and however it is spelled."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import spillway_gateway
from spillway_gateway.api.engine_fields import NAMES, EngineFields, engine_members
from spillway_gateway.routing.legs import LegsReason
from spillway_gateway.routing.prefix import PromptBlocks
from spillway_gateway.upstream.first_leg import first_leg_body, why_one_leg
from spillway_gateway.upstream.splice import replace_text

MODEL_TOKENS = 4096
PROMPT = PromptBlocks(keys=[1], tokens_per_block=16, prompt_tokens=1000, spread_key=1)
COMPUTED_IN_FULL = ["prompt_logprobs", "echo", "prompt_embeds"]
REPLACED = [
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "n",
    "best_of",
    "use_beam_search",
    "stream",
    "logprobs",
]


async def why(body: bytes, *, by_connector: bool = True, vllm: tuple[int, int] = (0, 32)) -> LegsReason | None:
    fleet: Any = SimpleNamespace(
        has_roles=True,
        disaggregation=SimpleNamespace(by_connector=by_connector),
        prompt_tokens_max=MODEL_TOKENS,
        oldest_vllm=vllm,
    )
    return await why_one_leg(fleet, PROMPT, body, known=True, single=True, choices=1, proxied=False)


def spelled(name: str, draw: st.DrawFn) -> bytes:
    """A name in JSON with some of its characters escaped, at least one."""
    escaped = draw(st.lists(st.booleans(), min_size=len(name), max_size=len(name)).filter(any))
    forms = [rf"\u{ord(each):04x}" if escape else each for each, escape in zip(name, escaped, strict=True)]
    if draw(st.booleans()):
        forms = [
            form.replace("\\u00", "\\U00").upper().replace("\\U", "\\u") if len(form) > 1 else form for form in forms
        ]
    return '"{}"'.format("".join(forms)).encode()


@given(st.data(), st.sampled_from([*COMPUTED_IN_FULL, "use_beam_search"]), st.booleans())
async def test_a_name_with_escapes_is_that_name(data: Any, name: str, by_connector: bool) -> None:
    as_spelled = data.draw(st.composite(lambda draw: spelled(name, draw))())
    plain, escaped = (b'{"prompt":"caf\\u00e9",%s:true}' % key for key in (b'"%s"' % name.encode(), as_spelled))
    assert json.loads(plain) == json.loads(escaped)

    assert await why(escaped, by_connector=by_connector) is await why(plain, by_connector=by_connector)
    in_full = name in COMPUTED_IN_FULL or by_connector
    assert await why(escaped, by_connector=by_connector) is (LegsReason.BODY if in_full else None)


@given(st.data(), st.sampled_from(REPLACED), st.sampled_from([1, -5, 17, True, "x", 10**9, None]))
async def test_a_value_with_an_escaped_name_counts(data: Any, name: str, value: Any) -> None:
    as_spelled = data.draw(st.composite(lambda draw: spelled(name, draw))())
    text = json.dumps(value).encode()
    plain, escaped = (b'{"prompt":"x",%s:%s}' % (key, text) for key in (b'"%s"' % name.encode(), as_spelled))

    assert (await why(escaped) is None) is (await why(plain) is None) or name == "use_beam_search"
    assert json.loads(await first_leg_body(plain)) == json.loads(await first_leg_body(escaped))
    assert json.loads(replace_text(plain, name, 7)) == json.loads(replace_text(escaped, name, 7))


@given(st.data(), st.sampled_from(sorted(NAMES)))
def test_a_field_that_steers_and_is_repeated_with_escapes_is_replaced(data: Any, name: str) -> None:
    as_spelled = data.draw(st.composite(lambda draw: spelled(name, draw))())
    body = b'{%s:{"do_remote_prefill":true},"%s":{"extra_args":{}}}' % (as_spelled, name.encode())
    sent = EngineFields(**{name: {"extra_args": {}}})
    members = engine_members(sent, body, {"spillway_session": {}}, steers=False, takes_transfer_params=True)

    for member, value in members.items():
        body = replace_text(body, member, value)
    assert b"do_remote_prefill" not in body


async def test_accents_and_quoted_names_that_are_no_members() -> None:
    assert await why(b'{"prompt":"caf\\u00e9 \\u0065cho"}') is None
    assert await why(b'{"prompt":"x","a":{"\\u0065cho":true}}', by_connector=False) is None


@pytest.mark.parametrize(
    ("vllm", "fields", "reason"),
    [
        ((0, 32), {"max_tokens": 4000}, None),  # with the prompt more than the model's length: cut
        ((0, 32), {"max_tokens": 4097}, LegsReason.BODY),  # alone more than it: refused
        ((0, 32), {"max_tokens": 4000, "min_tokens": 4000}, LegsReason.BODY),  # more than what it is cut to
        ((0, 32), {"max_completion_tokens": 4096}, None),
        ((0, 30), {"max_tokens": 4000}, LegsReason.BODY),
        ((0, 30), {"max_tokens": 3096}, None),
        ((0, 0), {"max_tokens": 3097}, LegsReason.BODY),  # a vLLM that does not say its version
        ((0, 32), {"stop": ["x" * 9000], "n": 1}, None),
        ((0, 32), {"stream_options": {"x": "y" * 5000}, "stream": True}, LegsReason.BODY),  # not read whole
    ],
)
async def test_a_length_counts_as_the_oldest_engine_takes_it(
    vllm: tuple[int, int], fields: dict[str, Any], reason: LegsReason | None
) -> None:
    assert await why(json.dumps({"prompt": "x", **fields}).encode(), vllm=vllm) is reason


# Whose author is an engine's serialiser, which escapes no letter; a hostile engine could as well leave the name out.
OF_REPLIES = {
    "api/private_replies.py",
    "error_bodies.py",
    "fleet/stored_responses.py",
    "upstream/answers.py",
    "upstream/continuation/sent_answer.py",
    "upstream/usage.py",
}
OF_METRICS = {"fleet/tier_traffic.py"}


def test_no_other_module_looks_for_a_quoted_name_in_bytes() -> None:
    """A client may spell it with escapes in a request's body: upstream/json_walk.py finds it however it is written."""
    root = Path(spillway_gateway.__file__).parent
    looks = re.compile(r"""\bb'"[a-z_]+"'|\b(?:rb|br)'[^'\n]*"[a-z_]+\"""")
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if "testing" not in path.parts and looks.search(path.read_text())
    }
    assert found <= OF_REPLIES | OF_METRICS, "use JsonWalk for bodies of requests"
