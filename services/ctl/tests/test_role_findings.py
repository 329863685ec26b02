"""The findings of doctor about engines with roles."""

from __future__ import annotations

from typing import Any

import pytest

from spillway_ctl.evidence import EngineReading, Exposition, Finding, GatewayReading, Verdict
from spillway_ctl.findings import judge
from spillway_ctl.role_findings import CHECK

LEGS = 'spillway_gateway_legs_total{{model="m",decision="{decision}",reason="{reason}"}} {count}\n'


def found(
    roles: dict[str, str],
    page: str = "",
    hand_over: str = "store",
    found_by: str = "settings",
    asked: dict[str, Any] | None = None,
    **settings: Any,
) -> list[Finding]:
    """settings: of the engine d; None: as the others have it."""
    listed = [{"name": name, "url": f"http://{name}", "role": role} for name, role in roles.items()]
    named: dict[str, Any] = {
        "disaggregation": {"mode": "auto", "strictRoles": False, "handOver": hand_over, **(asked or {})},
        "models": [{"name": "m", "engines": listed}],
    }
    config: dict[str, Any] = {"settings": named}
    if found_by == "discovery":
        named["models"] = []
        config["discovered"] = {"m": {"engines": listed}}
    gateway = GatewayReading("http://g", config=config, before=Exposition(""), after=Exposition(page))
    engines = []
    for name in roles:
        own: dict[str, Any] = {"blockSize": 128, "kvTransfer": {"connector": "NixlConnector"}}
        if name == "d":
            own |= settings
        engines.append(EngineReading(name, f"http://{name}", config={"servedName": "m", "settings": own}))
    return [each for each in judge(gateway, engines, 5.0) if each.check == CHECK]


@pytest.mark.parametrize("found_by", ["settings", "discovery"])
def test_roles_that_fit_are_counted(found_by: str) -> None:
    (one,) = found({"p": "prefill", "d": "decode", "e": "decode"}, found_by=found_by)
    assert (one.verdict, one.found) == (Verdict.OK, "1 prefill, 2 decode")


def test_engines_without_roles_are_not_judged() -> None:
    assert found({"a": "both", "d": "both"}, blockSize=64) == []


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_engines_of_one_role_alone_fail(role: str) -> None:
    (one,) = found({"a": role, "d": role})
    assert one.verdict is Verdict.FAILED and f"{role} engines alone" in one.found and "both" in one.change


@pytest.mark.parametrize(
    ("hand_over", "settings", "words"),
    [
        ("store", {"blockSize": 64}, "blockSize differs: d 64, p 128"),
        ("store", {"offload": {"blocksPerChunk": 4}}, "offload.blocksPerChunk differs"),
        ("connector", {"kvTransfer": None}, "kvTransfer.connector differs"),
        ("connector", {"tensorParallelSize": 2}, "tensorParallelSize differs"),
    ],
)
def test_engines_that_cannot_read_the_other_ones_kv_fail(hand_over: str, settings: dict[str, Any], words: str) -> None:
    (one,) = found({"p": "prefill", "d": "decode"}, hand_over=hand_over, **settings)
    assert one.verdict is Verdict.FAILED and words in one.found and "equal" in one.change


def test_only_what_the_way_of_handing_over_reads_has_to_be_equal() -> None:
    (by_store,) = found({"p": "prefill", "d": "decode"}, kvTransfer=None)
    (by_connector,) = found({"p": "prefill", "d": "decode"}, hand_over="connector", offload={"blocksPerChunk": 4})
    assert by_store.verdict is by_connector.verdict is Verdict.OK


@pytest.mark.parametrize(
    ("reason", "change"), [("no_common_store", "one store"), ("text", "model.tokenizer"), ("body", "prompt_logprobs")]
)
def test_requests_that_could_not_take_two_legs_say_why(reason: str, change: str) -> None:
    page = LEGS.format(decision="one", reason=reason, count=7) + LEGS.format(decision="one", reason="short", count=90)
    (one,) = found({"p": "prefill", "d": "decode"}, page)
    assert one.verdict is Verdict.WARNING and f"7 requests took one leg ({reason})" in one.found
    assert change in one.change
    (fine,) = found({"p": "prefill", "d": "decode"}, LEGS.format(decision="one", reason="short", count=90))
    assert fine.verdict is Verdict.OK


@pytest.mark.parametrize(
    ("roles", "asked", "warned"),
    [
        ({"d": "prefill", "e": "decode"}, {}, True),
        ({"d": "prefill", "e": "decode"}, {"mode": "off"}, True),
        ({"d": "prefill", "e": "decode"}, {"strictRoles": True}, False),
        ({"d": "prefill", "e": "decode"}, {"mode": "always"}, False),
        ({"p": "prefill", "d": "decode"}, {}, False),
    ],
)
def test_producers_that_answer_whole_requests_are_named(roles: dict[str, str], asked: dict[str, Any], warned: bool):
    transfer = {"connector": "NixlConnector", "role": "kv_producer"}
    (one,) = found(roles, asked=asked, kvTransfer=transfer)
    assert (one.verdict is Verdict.WARNING, "d: kv_producer" in one.found) == (warned, warned)
