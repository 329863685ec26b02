"""The findings of doctor about the reasons that an engine has counted."""

from __future__ import annotations

import pytest

from spillway_connector.errors import RefusedReason, UnreachableReason
from spillway_connector.explanations import GENERAL, OF_TYPE, explanation
from spillway_ctl.evidence import EngineReading, Exposition, Finding, Verdict
from spillway_ctl.tier_findings import missed, shared_tiers
from spillway_settings.wire import STORE_TYPES

SETTINGS = {
    "nvme": {"path": "/kv"},
    "redis": {"url": "redis://cache:6379"},
    "s3": {"bucket": "kv", "prefix": "chat/", "endpoint": "https://store:9000"},
}
PLACES = {"nvme": "/kv", "redis": "redis://cache:6379", "s3": "s3://kv/chat/ at https://store:9000"}


def page(kind: str, *, ready: int = 1, resting: int = 0, **failures: int) -> str:
    return "".join(
        [
            f'spillway_tier_ready{{tier="{kind}"}} {ready}\n',
            f'spillway_tier_breaker_open{{tier="{kind}",operation="load"}} {resting}\n',
            *[
                f'spillway_tier_failures_total{{tier="{kind}",operation="load",reason="{reason}"}} {count}\n'
                for reason, count in failures.items()
            ],
        ]
    )


def findings(before: str, after: str, kind: str = "s3", below: str | None = None) -> list[Finding]:
    tier = {"type": kind, "below": {"type": below}} | SETTINGS
    config = {"settings": {"offload": {"enabled": True, "sharedTier": tier}}}
    engine = EngineReading("e", "http://e", config=config, before=Exposition(before), after=Exposition(after))
    return list(shared_tiers(engine, 5.0))


@pytest.mark.parametrize("kind", STORE_TYPES)
@pytest.mark.parametrize("reason", [*GENERAL])
def test_each_reason_is_a_sentence_with_the_place_and_the_remedy(kind: str, reason: str) -> None:
    (finding,) = findings("", page(kind, **{reason: 2}), kind)
    said = explanation(reason, kind)
    assert said is not None and finding.verdict is Verdict.FAILED
    assert finding.found == f"{kind} at {PLACES[kind]}: 2 operations failed within 5 s: {said.meaning} (load {reason})"
    assert finding.change == (
        said.remedy or "the engine's log has the reason; the engine uses the tier again by itself"
    )


def test_a_type_has_its_own_sentence_for_a_reason_that_others_have_too() -> None:
    sentences = {kind: findings("", page(kind, permission=1), kind)[0].found for kind in STORE_TYPES}
    assert "engines' user may not" in sentences["nvme"]
    assert "ACL" in sentences["redis"]
    assert OF_TYPE["s3", RefusedReason.PERMISSION].meaning in sentences["s3"]


def test_each_tier_of_a_chain_has_its_own_reasons() -> None:
    both = page("nvme", no_space=1) + page("s3", clock_skew=1)
    above, below = findings("", both, "nvme", "s3")
    assert (above.check, below.check) == ("shared tier", "tier below it")
    assert "file system is full" in above.found and "clock" not in above.found
    assert "clock of this node" in below.found and PLACES["s3"] in below.found and "NTP" in below.change


def test_what_only_follows_from_another_reason_is_left_out() -> None:
    (finding,) = findings("", page("s3", breaker_open=9, throttled=1))
    assert "throttled" in finding.found and "breaker_open" not in finding.found
    (alone,) = findings("", page("s3", breaker_open=9))
    assert "rests after repeated failures" in alone.found


@pytest.mark.parametrize(
    ("ready", "resting", "words"), [(0, 0, "cannot be used"), (1, 1, "the breaker of load is open")]
)
def test_a_tier_that_rests_is_explained_by_what_it_met_before_the_window(ready: int, resting: int, words: str) -> None:
    said = page("s3", ready=ready, resting=resting, bucket_missing=4)
    (finding,) = findings(said, said)
    assert words in finding.found and "there is no such bucket (load bucket_missing)" in finding.found
    assert finding.change == GENERAL[UnreachableReason.BUCKET_MISSING].remedy


def test_a_reason_of_another_release_is_named_as_it_is() -> None:
    (finding,) = findings("", page("s3", heat=1, tls=1))
    assert "; the two ends agree on no TLS connection (load tls)" in finding.found and "load heat" in finding.found


def test_misses_are_named_with_what_they_mean() -> None:
    after = (
        'spillway_tier_misses_total{tier="s3",reason="gone"} 2\nspillway_tier_misses_total{tier="s3",reason="x"} 1\n'
    )
    engine = EngineReading("e", "http://e", before=Exposition(""), after=Exposition(after))
    assert missed([engine]) == "gone (there at the lookup and not at the load), x"
    assert missed([]) == "none"
