"""The frame itself: it sees a gateway that stalls or grows, and none where nothing happens."""

from __future__ import annotations

import os
import signal
import time

import httpx
import pytest
from attack.target import GAP_SECONDS_MAX, Harm, Target


def test_a_small_request_harms_nobody(target: Target) -> None:
    def ask() -> None:
        body = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}
        assert httpx.post(target.url + "/v1/chat/completions", json=body).status_code == 200

    target.suffer(ask).assert_bearable(grown_mib_max=16)


def test_a_gateway_that_stands_still_is_seen_in_every_round(target: Target) -> None:
    def stop_for_a_while() -> None:
        os.kill(target.pid, signal.SIGSTOP)
        time.sleep(0.3)
        os.kill(target.pid, signal.SIGCONT)

    harm = target.suffer(stop_for_a_while, rounds=2)
    assert harm.added_gap_seconds > GAP_SECONDS_MAX
    with pytest.raises(AssertionError, match="another stream waited"):
        harm.assert_bearable(grown_mib_max=16)


def test_memory_above_the_bound_is_an_error() -> None:
    with pytest.raises(AssertionError, match="MiB more memory"):
        Harm(0.0, 2**24 + 1).assert_bearable(grown_mib_max=16)
