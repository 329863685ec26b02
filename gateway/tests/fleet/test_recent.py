from __future__ import annotations

import time

from spillway_gateway.fleet.recent import DECISIONS_MAX, FIRST_BYTES_MAX, REQUEST_ID_CHARS_MAX, Recent
from spillway_gateway.routing.fleet_view import HeldPrefix
from spillway_gateway.routing.route import Decision, RouteReason


def decision(held: HeldPrefix, prompt_tokens: int) -> Decision:
    return Decision("e", RouteReason.PREFIX, held, prompt_tokens, prompt_tokens - held.total_tokens, ())


def test_prompt_tokens_add_up_by_where_they_were_expected() -> None:
    recent = Recent(lambda: 5.0)

    recent.decided("m", b"a", decision(HeldPrefix(128, 256, 0), 500))
    recent.decided("m", b"b", decision(HeldPrefix(0, 0, 384), 400))

    tokens = recent.prompt_tokens["m"]
    assert (tokens.device, tokens.cpu, tokens.shared, tokens.computed) == (128, 256, 384, 132)
    assert [noted.request_id for noted in recent.decisions] == [b"a", b"b"]
    assert recent.decisions[0].at == 5.0


def test_cached_tokens_add_up_as_expected_and_as_reported() -> None:
    recent = Recent()

    recent.reported("m", HeldPrefix(128), 0)
    recent.reported("m", HeldPrefix(64, 128, 64), 300)

    tokens = recent.prompt_tokens["m"]
    assert (tokens.expected, tokens.reported, tokens.device) == (384, 300, 0)
    assert sum(minute.expected for minute in tokens.last_hour.minutes(time.time())) == 384


def test_nothing_grows_beyond_its_bound() -> None:
    recent = Recent()
    for at in range(FIRST_BYTES_MAX + DECISIONS_MAX):
        recent.first_byte("m", "e", float(at))
        recent.decided("m", b"%d" % at * 100, decision(HeldPrefix(), 1))

    assert len(recent.first_bytes) == FIRST_BYTES_MAX
    assert len(recent.decisions) == DECISIONS_MAX
    assert recent.first_bytes[-1].seconds == FIRST_BYTES_MAX + DECISIONS_MAX - 1
    assert max(len(noted.request_id) for noted in recent.decisions) == REQUEST_ID_CHARS_MAX
