from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.fleet.tier_traffic import STALE_SECONDS, TIERS_MAX, TierTraffic, Way, moved_bytes

PAGE = b"""# TYPE spillway_device_copy_bytes_total counter
spillway_device_copy_bytes_total{direction="store",engine="0",model_name="m"} 100.0
spillway_device_copy_bytes_total{direction="store",engine="1",model_name="m"} 11.0
spillway_device_copy_bytes_total{direction="load",engine="0",model_name="m"} 20.0
spillway_kv_group_bytes_total{direction="store",engine="0",group="0-full",model_name="m"} 90.0
spillway_kv_group_bytes_total{direction="store",engine="1",group="0-full",model_name="m"} 11.0
spillway_kv_group_bytes_total{direction="store",engine="0",group="1-window",model_name="m"} 10.0
spillway_kv_group_bytes_total{direction="load",engine="0",group="0-full",model_name="m"} 20.0
spillway_tier_read_bytes_total{engine="0",model_name="m",tier="nvme"} 3e3
spillway_tier_written_bytes_total{engine="0",model_name="m",tier="nvme"} 4e3
spillway_tier_written_bytes_total{engine="0",model_name="m",tier="redis"} NaN
spillway_tier_read_seconds_total{engine="0",model_name="m",tier="nvme"} 9.0
"""


def test_a_page_tells_totals_by_tier_and_direction() -> None:
    assert moved_bytes(PAGE) == {
        Way("cpu", "load"): 20.0,
        Way("cpu", "store"): 111.0,
        Way("cpu, KV group 0-full:", "load"): 20.0,
        Way("cpu, KV group 0-full:", "store"): 101.0,
        Way("cpu, KV group 1-window:", "store"): 10.0,
        Way("nvme", "load"): 3000.0,
        Way("nvme", "store"): 4000.0,
    }


def test_rates_are_between_two_readings() -> None:
    traffic = TierTraffic()
    load, store = Way("nvme", "load"), Way("nvme", "store")

    traffic.observed({load: 1000.0}, 10.0)
    assert traffic.bytes_per_second(10.0) == {}
    traffic.observed({load: 1500.0, store: 40.0}, 12.0)
    assert traffic.bytes_per_second(12.0) == {load: 250.0, store: 20.0}


def test_an_engine_that_started_anew_counts_from_nothing() -> None:
    traffic = TierTraffic()
    load = Way("cpu", "load")

    traffic.observed({load: 1000.0}, 0.0)
    traffic.observed({load: 30.0}, 2.0)
    assert traffic.bytes_per_second(2.0) == {load: 15.0}


def test_an_old_reading_says_nothing() -> None:
    traffic = TierTraffic()
    load = Way("cpu", "load")

    traffic.observed({load: 0.0}, 0.0)
    traffic.observed({load: 10.0}, 1.0)
    assert traffic.bytes_per_second(1.0 + STALE_SECONDS) == {load: 10.0}
    assert traffic.bytes_per_second(1.001 + STALE_SECONDS) == {}


def test_a_page_with_endless_tiers_is_bounded() -> None:
    page = b"".join(b'spillway_tier_read_bytes_total{tier="t%d"} 1\n' % at for at in range(100))

    assert len(moved_bytes(page)) == TIERS_MAX


@given(st.lists(st.one_of(st.sampled_from(PAGE.split(b"\n")), st.binary(max_size=40)), max_size=30), st.binary())
def test_no_page_breaks_the_reader(lines: list[bytes], tail: bytes) -> None:
    totals = moved_bytes(b"\n".join([*lines, tail]))

    assert all(0 <= total < float("inf") for total in totals.values())
