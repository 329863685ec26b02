"""Rates of real stores, of which nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis
from ctl_media import ONE, FileMedium, RedisMedium, fill

from spillway_connector.errors import TierError
from spillway_connector.tiers.redis.client.endpoint import RedisEndpoint
from spillway_ctl import tier_rates
from spillway_ctl.command import main
from spillway_ctl.tier_rates import PIECE_BYTES, PIECES, measure_directory, measure_redis


def test_a_directory_is_written_and_read_and_left_as_it_was(tmp_path: Path) -> None:
    files = FileMedium(tmp_path / "tier")
    fill(files, range(2))
    before = sorted(tmp_path.rglob("*"))
    rates = measure_directory(files.root)
    assert rates.size_bytes == PIECES * PIECE_BYTES
    assert rates.write_bytes_per_second > 0 and rates.read_bytes_per_second > 0
    assert sorted(tmp_path.rglob("*")) == before


def test_a_directory_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        measure_directory(tmp_path / "nowhere")


def test_a_server_is_left_as_it_was_and_inspection_sees_none_of_it(
    valkey, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    medium = RedisMedium(valkey.port)
    fill(medium, range(2), ONE)
    server = redis.Redis(port=valkey.port)
    before = sorted(server.keys())
    seen: list[bytes] = []
    repeat = tier_rates._repeat

    def and_look(write, began):
        pieces = repeat(write, began)
        seen.extend(server.keys("spillway1:doctor:*"))
        assert all(0 < server.pttl(key) <= tier_rates.EXPIRES_MS for key in seen)
        assert main(["tier", "status", *medium.options, "--json"]) == 0
        assert '"frames": 2' in capsys.readouterr().out
        return pieces

    monkeypatch.setattr(tier_rates, "_repeat", and_look)
    rates = measure_redis(RedisEndpoint.from_url(f"redis://127.0.0.1:{valkey.port}/0"), 5.0)
    assert rates.size_bytes == PIECES * PIECE_BYTES == len(seen) * PIECE_BYTES
    assert sorted(server.keys()) == before


def test_the_documented_user_of_engines_may_measure(valkey) -> None:
    server = redis.Redis(port=valkey.port)
    rules = (Path(__file__).parents[3] / "docs" / "formats.md").read_text().partition("user spillway on ")[2]
    words = rules.partition("\n")[0].replace(">PASSWORD", ">p").split()
    server.execute_command("ACL", "SETUSER", "rates", "on", *words)
    try:
        login = {"username": "rates", "password": "p"}
        rates = measure_redis(RedisEndpoint.from_url(f"redis://127.0.0.1:{valkey.port}/0", **login), 5.0)
    finally:
        server.execute_command("ACL", "DELUSER", "rates")
    assert rates.size_bytes == PIECES * PIECE_BYTES


def test_a_slow_store_is_written_to_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.5, 2.0, 3.5, 9.0])
    monkeypatch.setattr(tier_rates.time, "monotonic", lambda: next(moments))
    written: list[int] = []
    assert tier_rates._repeat(written.append, 0.0) == 3 == len(written)


def test_a_server_that_is_away_is_a_tier_error() -> None:
    with pytest.raises(TierError, match=r"127\.0\.0\.1:1"):
        measure_redis(RedisEndpoint.from_url("redis://127.0.0.1:1/0"), 1.0)
