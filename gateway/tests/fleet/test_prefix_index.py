from __future__ import annotations

import gc
import itertools
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from spillway_gateway.fleet import block_runs, block_table, prefix_index
from spillway_gateway.fleet.block_holders import (
    ENTRY_BYTES,
    EVICTIONS_MAX,
    HOLDER_BYTES,
    STEP_BLOCKS,
    WAITING_SHARE,
)
from spillway_gateway.fleet.engine_blocks import EARLY_BYTES
from spillway_gateway.fleet.event_decoder import AllBlocksCleared, BlockRemoved, BlockStored, Tier
from spillway_gateway.fleet.expected_blocks import EXPECTED_BYTES
from spillway_gateway.fleet.prefix_index import PrefixIndex
from spillway_gateway.fleet.shared_stores import STORES_MAX, UNUSED_SECONDS
from spillway_gateway.routing.fleet_view import HeldPrefix
from spillway_gateway.routing.prefix import namespace_key, token_block_keys

BLOCK = 4


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts here are shorter than a run, so they would try nothing of what is remembered of runs."""
    monkeypatch.setattr(block_runs, "RUN_BLOCKS", 4)
    monkeypatch.setattr(block_runs, "SHORT_RUN_BLOCKS", 2)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def index(bytes_max: int = 10_000_000, orphans_max: int = 100, clock: Clock | None = None) -> PrefixIndex:
    made = PrefixIndex(
        "m",
        bytes_max=bytes_max,
        orphans_max=orphans_max,
        default_block_tokens=BLOCK,
        clock=clock or Clock(),
    )
    for name in ("a", "b"):
        made.add_engine(name)
    return made


def stored(
    hashes: list[int],
    parent: int | None,
    tokens: list[int],
    tier: Tier = Tier.DEVICE,
    *,
    lora: str | None = None,
    extra: list[object] | None = None,
    block: int = BLOCK,
    kind: str | None = None,
) -> BlockStored:
    return BlockStored(hashes, parent, tokens, block if tokens else 0, tier, lora, extra or [], 0, kind)


def keys(tokens: list[int], salt: str | None = None, lora: str | None = None) -> list[int]:
    return token_block_keys(namespace_key("m", lora, salt), tokens, BLOCK)


PROMPT = list(range(100, 116))  # four blocks


def test_a_stored_chain_is_found_up_to_where_it_reaches() -> None:
    made = index()
    made.apply("a", stored([1, 2], None, PROMPT[:8]))
    made.apply("a", stored([3], 2, PROMPT[8:12]))

    assert made.match(keys(PROMPT), BLOCK) == {"a": HeldPrefix(12, 0, 0)}
    assert made.match(keys(PROMPT[:4] + [9] * 12), BLOCK) == {"a": HeldPrefix(4, 0, 0)}


def test_engines_may_use_any_hash_for_the_same_tokens() -> None:
    made = index()
    made.apply("a", stored([1], None, PROMPT[:4]))
    made.apply("b", stored([77, 78], None, PROMPT[:8]))

    assert made.match(keys(PROMPT), BLOCK) == {"a": HeldPrefix(4, 0, 0), "b": HeldPrefix(8, 0, 0)}


def test_a_spilled_block_is_priced_as_cpu_and_gone_after_both_tiers() -> None:
    made = index()
    made.apply("a", stored([1, 2], None, PROMPT[:8]))
    made.apply("a", stored([1, 2], None, [], Tier.CPU))
    made.apply("a", BlockRemoved([2], Tier.DEVICE, 0))
    assert made.match(keys(PROMPT), BLOCK) == {"a": HeldPrefix(4, 4, 0)}

    made.apply("a", BlockRemoved([2], Tier.CPU, 0))
    assert made.match(keys(PROMPT), BLOCK) == {"a": HeldPrefix(4, 0, 0)}


def test_an_engine_key_that_names_another_block_now_holds_the_first_one_no_more() -> None:
    made = index()
    made.apply("a", stored([1, 2], None, PROMPT[:8]))
    made.apply("b", stored([1, 2], None, PROMPT[:8]))
    assert made.match(keys(PROMPT), BLOCK) == {"a": HeldPrefix(8, 0, 0), "b": HeldPrefix(8, 0, 0)}

    made.apply("a", stored([1], None, [7] * BLOCK))

    assert made.match(keys(PROMPT), BLOCK) == {"b": HeldPrefix(8, 0, 0)}


def test_blocks_that_an_engine_announced_take_no_room_when_they_are_expected() -> None:
    made = index()
    made.apply("a", stored([1, 2], None, PROMPT[:8]))
    before = made.estimated_bytes

    made.expect("a", keys(PROMPT[:8]), until=10.0)
    assert made.estimated_bytes == before
    made.expect("b", keys(PROMPT[:8]), until=10.0)
    assert made.estimated_bytes == before + 2 * EXPECTED_BYTES
    assert made.match(keys(PROMPT), BLOCK) == {"a": HeldPrefix(8, 0, 0), "b": HeldPrefix(8, 0, 0)}


@given(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4))
def test_what_match_found_is_expected_as_what_the_index_would_look_up(held: int, routed: int, other: int) -> None:
    """held: blocks that the engine has announced. routed, other: blocks of earlier prompts to it and to another one."""
    made, looked_up = index(), index()
    for each in (made, looked_up):
        each.apply("a", stored([1, 2, 3, 4][:held], None, PROMPT[: held * BLOCK]))
        each.expect("b", keys([9] * 16)[:other], until=10.0)
    before = [each.expect("a", keys(PROMPT[: routed * BLOCK]), until=10.0) for each in (made, looked_up)]
    found = made.match(keys(PROMPT), BLOCK).get("a")

    on_device = 0 if found is None else found.device_tokens // BLOCK
    made.expect("a", keys(PROMPT), until=10.0, on_device=on_device)
    looked_up.expect("a", keys(PROMPT), until=10.0)

    assert made.estimated_bytes == looked_up.estimated_bytes
    for each, expected in zip((made, looked_up), before, strict=True):
        each.withdraw(expected)  # what this prompt expects, too, stays
    for end in range(5):
        assert made.match(keys(PROMPT)[:end], BLOCK) == looked_up.match(keys(PROMPT)[:end], BLOCK)


def test_what_is_expected_takes_no_room_once_the_index_has_it() -> None:
    made = index()
    empty = made.estimated_bytes
    made.expect("a", keys(PROMPT), until=10.0)
    made.apply("a", stored([1, 2, 3, 4], None, PROMPT))
    assert made.estimated_bytes == empty + 4 * (ENTRY_BYTES + HOLDER_BYTES)

    expected = made.expect("b", keys(PROMPT), until=10.0)
    list(made.accepted("b", keys(PROMPT), 10.0, expected))

    assert made.estimated_bytes == empty + 4 * (ENTRY_BYTES + HOLDER_BYTES)
    assert made.match(keys(PROMPT), BLOCK) == {"a": HeldPrefix(16, 0, 0), "b": HeldPrefix(16, 0, 0)}


def test_blocks_that_another_engine_is_expected_to_hold_stay_expected() -> None:
    made = index()
    made.expect("a", keys(PROMPT), until=10.0)
    made.expect("b", keys(PROMPT), until=10.0)

    made.apply("a", stored([1, 2, 3, 4], None, PROMPT))

    assert made.match(keys(PROMPT), BLOCK) == {"a": HeldPrefix(16, 0, 0), "b": HeldPrefix(16, 0, 0)}


@pytest.mark.parametrize(("again", "held_until"), [(10.0, 100.0), (20.0, 120.0)])
def test_an_engine_without_events_holds_a_prompt_for_longer_once_an_eighth_has_passed(
    again: float, held_until: float
) -> None:
    clock = Clock()
    made = index(clock=clock)
    made.apply("b", stored(list(range(40)), None, list(range(1000, 1000 + 40 * BLOCK))))  # a table of some blocks
    for now in (0.0, 0.0, again):
        clock.now = now
        made.match(keys(PROMPT), BLOCK)
        list(made.accepted("a", keys(PROMPT), now + 100.0))
        assert made.match(keys(PROMPT), BLOCK) == {"a": HeldPrefix(16, 0, 0)}

    clock.now = held_until - 0.1
    assert made.match(keys(PROMPT), BLOCK) == {"a": HeldPrefix(16, 0, 0)}
    clock.now = held_until
    assert made.match(keys(PROMPT), BLOCK) == {}


def test_a_late_cpu_event_finds_a_block_that_left_the_device() -> None:
    made = index()
    made.apply("a", stored([1], None, PROMPT[:4]))
    made.apply("a", BlockRemoved([1], Tier.DEVICE, 0))
    made.apply("a", stored([1], None, [], Tier.CPU))

    assert made.match(keys(PROMPT), BLOCK) == {"a": HeldPrefix(0, 4, 0)}


REDIS, NODE = "redis/00000000000000aa", "nvme/00000000000000bb"


def in_store(hashes: list[int], store: str = REDIS) -> BlockStored:
    """Event of blocks in a store; without hashes, it says that the engine loads from the store."""
    return BlockStored(hashes, None, [], 0, Tier.SHARED, None, [], 0, None, store=store)


def out_of_store(hashes: list[int], store: str = REDIS) -> BlockRemoved:
    return BlockRemoved(hashes, Tier.SHARED, 0, store=store)


def test_blocks_of_a_store_count_for_every_engine_that_loads_from_it() -> None:
    made = index()
    made.add_engine("c")
    made.apply("a", stored([1, 2], None, PROMPT[:8]))
    made.apply("a", in_store([1, 2]))
    made.apply("b", in_store([]))
    made.apply("c", in_store([], NODE))
    made.apply("a", BlockRemoved([1, 2], Tier.DEVICE, 0))

    assert made.match(keys(PROMPT), BLOCK) == {"a": HeldPrefix(0, 0, 8), "b": HeldPrefix(0, 0, 8)}
    assert [made.shared_reach_of(name) for name in "abc"] == [({"redis": 2}, None)] * 2 + [({"nvme": 0}, None)]
    assert made.shared_stores == 2
    made.apply("b", stored([1], None, PROMPT[:4]))
    assert made.match(keys(PROMPT), BLOCK)["b"] == HeldPrefix(4, 0, 4)


def test_of_two_shared_tiers_the_nearer_one_counts_and_the_one_below_for_what_it_has_alone() -> None:
    made = index()
    below = "s3/00000000000000dd"
    made.add_engine("c")
    made.apply("a", stored([1, 2, 3], None, PROMPT[:12]))
    made.apply("a", in_store([1, 2], REDIS))
    made.apply("a", in_store([2, 3], below))
    made.apply("b", in_store([], REDIS))
    for name in "bc":
        made.apply(name, in_store([], below))
    made.apply("a", BlockRemoved([1, 2, 3], Tier.DEVICE, 0))
    held = HeldPrefix(0, 0, 12, below_tokens=4)

    assert made.match(keys(PROMPT), BLOCK) == {"a": held, "b": held}
    assert made.shared_reach_of("b").blocks == {"redis": 2, "s3": 2}
    made.apply("a", in_store([1], below))
    assert made.match(keys(PROMPT), BLOCK) == {"a": held, "b": held, "c": HeldPrefix(0, 0, 12)}  # its nearest


S3 = "s3/00000000000000dd"


def test_a_store_of_a_type_that_its_engine_declines_is_one_that_it_uses_and_does_not_load_from() -> None:
    made = index()
    for store in (REDIS, S3):
        made.apply("a", in_store([], store))
    made.decline("a", frozenset({"s3"}))
    assert (made.stores_of("a"), made.declined_stores_of("a")) == ({REDIS, S3}, {S3})
    made.decline("a", frozenset())
    assert made.declined_stores_of("a") == frozenset()


def test_a_prefix_ends_for_an_engine_at_the_first_block_that_only_a_tier_it_declines_has() -> None:
    made = index()
    made.apply("a", stored([1, 2, 3], None, PROMPT[:12]))
    made.apply("a", stored([3], 2, [], Tier.CPU))
    made.apply("a", in_store([1], REDIS))
    made.apply("a", in_store([2], S3))
    for store in (REDIS, S3):
        made.apply("b", in_store([], store))
    made.apply("a", BlockRemoved([1, 2, 3], Tier.DEVICE, 0))
    everything = {"a": HeldPrefix(0, 4, 8, below_tokens=4), "b": HeldPrefix(0, 0, 8, below_tokens=4)}

    assert made.match(keys(PROMPT), BLOCK) == everything
    made.decline("a", frozenset({"s3"}))
    assert made.match(keys(PROMPT), BLOCK) == {"a": HeldPrefix(0, 0, 4), "b": everything["b"]}
    assert made.shared_reach_of("a").blocks == {"redis": 1, "s3": 1}, "what it could load is the same"
    made.decline("a", frozenset({"redis"}))
    assert made.match(keys(PROMPT), BLOCK) == {"b": everything["b"]}
    made.decline("a", frozenset())
    assert made.match(keys(PROMPT), BLOCK) == everything


def test_an_engine_whose_events_are_followed_again_declines_what_it_did() -> None:
    """The engine's metrics say the same as before, and the index hears of changes alone."""
    made = index()
    made.apply("b", stored([1], None, PROMPT[:4]))
    made.apply("b", in_store([1], S3))
    made.decline("a", frozenset({"s3"}))
    for _ in made.clear_engine("a"):
        pass
    made.apply("a", in_store([], S3))
    assert made.match(keys(PROMPT), BLOCK).keys() == {"b"}

    for _ in made.retire_engine("a"):
        pass
    made.add_engine("a")
    made.apply("a", in_store([], S3))
    assert made.match(keys(PROMPT), BLOCK).keys() == {"a", "b"}, "another engine of this name"


declined_types = st.frozensets(st.sampled_from(["redis", "s3"]))
chunks = st.lists(st.sets(st.sampled_from(["cpu", REDIS, S3])), min_size=4, max_size=4)


@given(chunks, declined_types)
def test_an_engine_that_declines_a_tier_is_matched_as_if_it_did_not_use_it(
    places: list[set[str]], declined: frozenset[str]
) -> None:
    """Only the tier's blocks are left out: what the engine has above is the same."""

    def matched(uses: list[str], *, decline: frozenset[str]) -> dict[str, HeldPrefix]:
        made = index()
        made.apply("a", stored([1, 2, 3, 4], None, PROMPT[:16]))
        for number, held in enumerate(places, 1):
            if "cpu" in held:
                made.apply("a", stored([number], number - 1 or None, [], Tier.CPU))
            for store in (REDIS, S3):
                if store in held:
                    made.apply("b", in_store([number], store))
        for store in uses:
            made.apply("a", in_store([], store))
        made.apply("a", BlockRemoved([1, 2, 3, 4], Tier.DEVICE, 0))
        made.decline("a", decline)
        return {name: held for name, held in made.match(keys(PROMPT), BLOCK).items() if name == "a"}

    used = [store for store in (REDIS, S3) if store.split("/")[0] not in declined]
    with_gates, without = matched([REDIS, S3], decline=declined), matched(used, decline=frozenset())
    # A tier whose nearer one is declined is still the one below it.
    assert {name: held.total_tokens for name, held in with_gates.items()} == {
        name: held.total_tokens for name, held in without.items()
    }


def test_an_engine_of_the_same_name_declines_nothing_before_it_says_so() -> None:
    made = index()
    made.decline("b", frozenset({"redis"}))
    for _ in made.retire_engine("b"):
        pass
    made.add_engine("b")
    made.apply("a", stored([1], None, PROMPT[:4]))
    made.apply("a", in_store([1]))
    made.apply("b", in_store([]))
    assert made.match(keys(PROMPT), BLOCK)["b"] == HeldPrefix(0, 0, 4)


def test_blocks_of_a_node_are_in_the_cpu_tier_of_all_its_engines() -> None:
    made, node = index(), "node/00000000000000cc"
    made.add_engine("c")
    made.apply("a", stored([1, 2, 3], None, PROMPT[:12]))
    made.apply("a", BlockStored([1, 2], None, [], 0, Tier.CPU, None, [], 0, None, store=node))
    made.apply("a", in_store([3]))
    for name in "bc":
        made.apply(name, in_store([]))
    made.apply("b", BlockStored([], None, [], 0, Tier.CPU, None, [], 0, None, store=node))
    made.apply("a", BlockRemoved([1, 2, 3], Tier.DEVICE, 0))
    held = HeldPrefix(0, 8, 4)
    assert made.match(keys(PROMPT), BLOCK) == {"a": held, "b": held}
    assert [made.shared_reach_of(name) for name in "abc"] == [({"redis": 1}, 2)] * 2 + [({"redis": 1}, None)]
    assert made.in_a_store(keys(PROMPT)) == 0  # no engine of another node could load the first one

    made.apply("b", BlockRemoved([2], Tier.CPU, 0, store=node))
    assert made.match(keys(PROMPT), BLOCK) == dict.fromkeys("ab", HeldPrefix(0, 4, 0))
    made.apply("a", BlockRemoved([], Tier.CPU, 0, store=node))
    assert made.match(keys(PROMPT), BLOCK) == {"b": HeldPrefix(0, 4, 0)}


def test_shared_blocks_without_a_named_store_count_for_their_engine_alone() -> None:
    made = index()
    made.apply("a", stored([1, 2], None, PROMPT[:8], Tier.SHARED))

    assert made.match(keys(PROMPT), BLOCK) == {"a": HeldPrefix(0, 0, 8)}


def test_any_engine_of_a_store_announces_that_a_block_is_gone() -> None:
    made = index()
    made.apply("a", stored([1, 2, 3], None, PROMPT[:12]))
    made.apply("a", in_store([1, 2, 3]))
    made.apply("a", BlockRemoved([1, 2, 3], Tier.DEVICE, 0))
    made.apply("b", in_store([]))
    made.apply("b", out_of_store([2]))
    assert made.match(keys(PROMPT), BLOCK) == {"a": HeldPrefix(0, 0, 4), "b": HeldPrefix(0, 0, 4)}

    made.apply("b", stored([2], 1, PROMPT[4:8]))
    made.apply("b", in_store([2]))
    assert made.match(keys(PROMPT), BLOCK)["a"] == HeldPrefix(0, 0, 12)


def test_what_lies_in_a_store_outlives_its_engines() -> None:
    made = index()
    made.apply("a", stored([1, 2], None, PROMPT[:8]))
    made.apply("a", in_store([1, 2]))
    list(made.clear_engine("a"))
    assert made.match(keys(PROMPT), BLOCK) == {}

    made.apply("a", in_store([]))
    assert made.match(keys(PROMPT), BLOCK) == {"a": HeldPrefix(0, 0, 8)}

    list(made.retire_engine("a"))
    made.apply("b", in_store([]))
    assert made.match(keys(PROMPT), BLOCK) == {"b": HeldPrefix(0, 0, 8)}


def test_a_store_without_engines_is_dropped_after_an_hour() -> None:
    clock = Clock()
    made = index(clock=clock)
    made.apply("a", stored([1], None, PROMPT[:4]))
    made.apply("a", in_store([1]))
    list(made.clear_engine("a"))
    assert made.blocks == 1

    clock.now = UNUSED_SECONDS
    list(made.clear_engine("b"))
    assert (made.blocks, made.shared_stores) == (0, 0)
    made.apply("a", in_store([]))
    assert made.match(keys(PROMPT), BLOCK) == {}


def test_an_engine_that_stops_loading_from_a_store_finds_nothing_there() -> None:
    made = index()
    made.apply("a", stored([1], None, PROMPT[:4]))
    made.apply("a", in_store([1]))
    made.apply("a", BlockRemoved([1], Tier.DEVICE, 0))
    made.apply("a", out_of_store([]))
    assert made.match(keys(PROMPT), BLOCK) == {}

    made.apply("a", in_store([]))
    assert made.match(keys(PROMPT), BLOCK) == {"a": HeldPrefix(0, 0, 4)}


def test_events_seen_before_change_no_store_but_name_its_engines() -> None:
    made = index()
    made.apply("a", stored([1, 2], None, PROMPT[:8]))
    made.apply("a", in_store([1, 2]))
    list(made.clear_engine("a"))
    made.apply("b", out_of_store([2]))
    made.apply("a", stored([1, 2], None, PROMPT[:8]), seen=True)
    made.apply("a", in_store([1, 2]), seen=True)
    made.apply("a", out_of_store([1]), seen=True)
    made.apply("a", BlockRemoved([1, 2], Tier.DEVICE, 0), seen=True)

    assert made.match(keys(PROMPT), BLOCK)["a"] == HeldPrefix(0, 0, 4)


def test_what_a_store_has_is_known_once_a_replay_brings_the_tokens_that_were_missed() -> None:
    made = index()
    made.apply("a", in_store([1, 2]))  # the first event of a subscription that missed the one with the tokens
    list(made.clear_engine("a"))
    made.apply("a", stored([1, 2], None, PROMPT[:8]), seen=True)
    made.apply("a", in_store([1, 2]), seen=True)
    made.apply("a", BlockRemoved([1, 2], Tier.DEVICE, 0), seen=True)

    assert made.match(keys(PROMPT), BLOCK) == {"a": HeldPrefix(0, 0, 8)}


@pytest.mark.parametrize("tier", [Tier.CPU, Tier.SHARED])
def test_a_block_that_is_loaded_is_announced_before_its_tokens_are(tier: Tier) -> None:
    made = index()
    low, gone = (
        (stored([1, 2], None, [], Tier.CPU), BlockRemoved([2], Tier.CPU, 0))
        if tier is Tier.CPU
        else (in_store([1, 2]), out_of_store([2]))
    )
    made.apply("a", low)
    assert made.match(keys(PROMPT), BLOCK) == {}
    made.apply("a", gone)
    made.apply("a", stored([1, 2], None, PROMPT[:8]))
    made.apply("a", BlockRemoved([1, 2], Tier.DEVICE, 0))

    expected = HeldPrefix(0, 4, 0) if tier is Tier.CPU else HeldPrefix(0, 0, 4)
    assert made.match(keys(PROMPT), BLOCK)["a"] == expected
    assert made.waiting_bytes < 1_000


def test_blocks_without_tokens_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "EARLY_MAX", 10)
    made = index()
    for number in range(25):
        made.apply("a", in_store([number]))

    assert made.unknown_blocks_total == 15
    assert made.waiting_bytes == 10 * EARLY_BYTES


def test_stores_are_bounded() -> None:
    made = index()
    for number in range(STORES_MAX + 5):
        made.apply("a", in_store([1], f"nvme/{number:016x}"))

    assert made.shared_stores == STORES_MAX
    assert made.unknown_blocks_total == 5


def test_orphans_wait_for_their_parent() -> None:
    made = index()
    made.apply("a", stored([3], 2, PROMPT[8:12]))
    made.apply("a", stored([2], 1, PROMPT[4:8]))
    assert made.match(keys(PROMPT), BLOCK) == {}

    made.apply("a", stored([1], None, PROMPT[:4]))
    assert made.match(keys(PROMPT), BLOCK) == {"a": HeldPrefix(12, 0, 0)}


def test_orphans_are_bounded() -> None:
    made = index(orphans_max=3)
    for parent in range(10, 20):
        made.apply("a", stored([parent + 100], parent, PROMPT[:4]))

    assert made.orphans_dropped_total == 7


def test_orphans_are_part_of_the_bound_in_bytes() -> None:
    bytes_max = 4_000_000
    made = index(bytes_max=bytes_max, orphans_max=1_000_000)
    made.apply("b", stored([1], None, PROMPT[:4]))
    made.apply("b", stored([3], 2, PROMPT[8:12]))
    tracemalloc.start()
    try:
        for parent in range(1_000, 2_000):
            tokens = [parent * 1_000_003 % (1 << 31) + at for at in range(1_024)]
            made.apply("a", stored([parent + 5_000 + (at << 40) for at in range(256)], parent, tokens))
            assert made.estimated_bytes <= bytes_max
        taken_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()

    assert made.orphans_dropped_total > 900
    assert made.waiting_bytes // 2 < taken_bytes < bytes_max // WAITING_SHARE * 2
    made.apply("b", stored([2], 1, PROMPT[4:8]))  # what the other engine waits for was kept
    assert made.match(keys(PROMPT), BLOCK) == {"b": HeldPrefix(12, 0, 0)}


def test_tombstones_are_part_of_the_bound_in_bytes() -> None:
    made = index(bytes_max=100_000)
    for block in range(2_000):
        made.apply("a", stored([block], None, [block] * BLOCK))
        made.apply("a", BlockRemoved([block], Tier.DEVICE, 0))
        assert made.estimated_bytes <= 100_000

    assert 0 < made.waiting_bytes <= 100_000 // WAITING_SHARE


def test_a_very_long_chain_of_orphans_resolves() -> None:
    made = index(bytes_max=100_000_000, orphans_max=10_000)
    tokens = list(range(BLOCK * 5_000))
    for block in range(4_999, 0, -1):
        made.apply("a", stored([block], block - 1, tokens[block * BLOCK : (block + 1) * BLOCK]))
    made.apply("a", stored([0], None, tokens[:BLOCK]))

    assert made.match(keys(tokens), BLOCK) == {"a": HeldPrefix(len(tokens), 0, 0)}


def test_salt_adapter_and_images_never_cross() -> None:
    made = index()
    made.apply("a", stored([1], None, PROMPT[:4], extra=[["tenantA"]]))
    made.apply("a", stored([2], None, PROMPT[:4], lora="adapter", extra=[["adapter"]]))
    made.apply("b", stored([3], None, PROMPT[:4], extra=[[["image-hash", 0]]]))

    assert made.match(keys(PROMPT), BLOCK) == {}
    assert made.match(keys(PROMPT, salt="tenantA"), BLOCK) == {"a": HeldPrefix(4, 0, 0)}
    assert made.match(keys(PROMPT, salt="tenantB"), BLOCK) == {}
    assert made.match(keys(PROMPT, lora="adapter"), BLOCK) == {"a": HeldPrefix(4, 0, 0)}


def test_tagged_salt_of_newer_engines() -> None:
    made = index()
    made.apply("a", stored([1], None, PROMPT[:4], extra=[[["cache_salt", "tenantA"]]]))

    assert made.match(keys(PROMPT, salt="tenantA"), BLOCK) == {"a": HeldPrefix(4, 0, 0)}


def test_all_cleared_means_the_device_alone() -> None:
    made = index()
    made.apply("a", stored([1, 2], None, PROMPT[:8]))
    made.apply("a", stored([1], None, [], Tier.CPU))
    made.apply("a", AllBlocksCleared())

    assert made.match(keys(PROMPT), BLOCK) == {"a": HeldPrefix(0, 4, 0)}


def test_clearing_one_engine_leaves_the_other_and_hides_at_once() -> None:
    made = index()
    for name in ("a", "b"):
        made.apply(name, stored(list(range(3_000)), None, list(range(3_000 * BLOCK))))
    long_keys = keys(list(range(3_000 * BLOCK)))

    steps = made.clear_engine("a")
    next(steps)
    assert set(made.match(long_keys, BLOCK)) == {"b"}
    for _ in steps:
        pass

    assert made.match(long_keys, BLOCK) == {"b": HeldPrefix(3_000 * BLOCK, 0, 0)}
    made.apply("a", stored([1], None, list(range(BLOCK))))
    assert made.match(long_keys, BLOCK)["a"] == HeldPrefix(BLOCK, 0, 0)


def test_a_retired_engine_is_gone_at_once_and_freed_in_steps() -> None:
    made = index()
    for name in ("a", "b"):
        made.apply(name, stored(list(range(3_000)), None, list(range(3_000 * BLOCK))))
    long_keys = keys(list(range(3_000 * BLOCK)))

    steps = made.retire_engine("a")
    made.add_engine("a")  # another one under its name
    assert set(made.match(long_keys, BLOCK)) == {"b"}
    made.apply("a", stored([7], None, list(range(BLOCK))))
    assert made.match(long_keys, BLOCK)["a"] == HeldPrefix(BLOCK, 0, 0)
    assert len(list(steps)) == 3_000 // block_table.SWEEP_STEP
    assert made.match(long_keys, BLOCK)["a"] == HeldPrefix(BLOCK, 0, 0)
    assert made.estimated_bytes == 3_000 * ENTRY_BYTES + 3_001 * HOLDER_BYTES
    assert list(made.retire_engine("unknown")) == []


def test_blocks_are_nothing_to_the_garbage_collector() -> None:
    """The collector would visit the blocks on the event loop, and those of many events at once: evicted ones offset the
    new ones in the count that starts it."""
    made = index(bytes_max=1_000 * (ENTRY_BYTES + 2 * HOLDER_BYTES))
    made.apply("a", stored([0], None, list(range(BLOCK))))
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        for number in range(1, 5_000):
            for name in ("a", "b"):
                made.apply(name, stored([number], None, list(range(number * BLOCK, (number + 1) * BLOCK))))
        found = len(gc.get_objects()) - before
    finally:
        gc.enable()

    assert made.evicted_blocks_total > 1_000 and made.blocks > 500
    assert found < 100


def test_block_size_comes_from_events_and_partial_blocks_do_not_change_it() -> None:
    made = index()
    made.apply("a", stored([1], None, [1, 2], block=2))
    made.apply("a", stored([2], None, list(range(16)), block=16))
    made.apply("a", stored([3], None, [1, 2, 3], block=3))

    assert made.block_tokens == 16
    assert made.mismatched_blocks_total == 1


def test_engines_of_another_block_size_live_beside_the_others(caplog: pytest.LogCaptureFixture) -> None:
    made = index()
    made.add_engine("c")
    for name in ("a", "b"):
        made.apply(name, stored([1, 2, 3, 4], None, PROMPT))
    made.apply("c", stored([5], None, PROMPT, block=16))

    assert made.block_sizes == (BLOCK, 16)
    assert made.match(keys(PROMPT), BLOCK) == {"a": HeldPrefix(16, 0, 0), "b": HeldPrefix(16, 0, 0)}
    assert made.match(token_block_keys(namespace_key("m"), PROMPT, 16), 16) == {"c": HeldPrefix(16, 0, 0)}
    assert [made.block_tokens_of(name) for name in "abc"] == [BLOCK, BLOCK, 16]
    assert "different block sizes (4 tokens: a, b; 16 tokens: c)" in caplog.text


def test_the_block_size_of_most_engines_comes_first_through_a_rolling_change() -> None:
    made = index()
    for name in ("a", "b"):
        made.apply(name, stored([1], None, PROMPT[:4]))
    for name, sizes in (("a", (16, BLOCK)), ("b", (16,))):
        list(made.clear_engine(name))  # it restarts
        made.apply(name, stored([1], None, PROMPT, block=16))
        assert made.block_sizes == sizes

    assert made.match(keys(PROMPT), BLOCK) == {}


def test_no_engine_loads_shared_blocks_of_another_size() -> None:
    made = index()
    made.add_engine("c")
    made.apply("a", stored([1], None, PROMPT[:4]))
    made.apply("a", in_store([1]))
    made.apply("a", BlockRemoved([1], Tier.DEVICE, 0))
    made.apply("c", stored([5], None, PROMPT, block=16))
    for name in ("b", "c"):
        made.apply(name, in_store([]))

    assert made.match(keys(PROMPT), BLOCK) == {"a": HeldPrefix(0, 0, 4), "b": HeldPrefix(0, 0, 4)}


def test_other_cache_groups_are_left_out() -> None:
    made = index()
    made.apply("a", stored([1], None, PROMPT[:4], kind="sliding_window"))

    assert made.match(keys(PROMPT), BLOCK) == {}


def accept(made: PrefixIndex, engine: str, prompt: list[int], until: float | None) -> None:
    for _ in made.accepted(engine, prompt, until):
        pass


@pytest.mark.parametrize("by", ["routing", "acceptance"])
def test_a_routed_prompt_counts_until_it_expires(by: str) -> None:
    clock = Clock()
    made = index(clock=clock)
    if by == "routing":
        made.expect("a", keys(PROMPT), until=10.0)
    else:
        accept(made, "a", keys(PROMPT), until=10.0)
    assert made.match(keys(PROMPT), BLOCK) == {"a": HeldPrefix(16, 0, 0)}

    clock.now = 10.0
    assert made.match(keys(PROMPT), BLOCK) == {}


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 30), st.booleans()), max_size=60))
def test_never_above_the_bound(steps: list[tuple[str, int, bool]]) -> None:
    bytes_max = 5 * (ENTRY_BYTES + HOLDER_BYTES)
    made = index(bytes_max=bytes_max)
    for name, number, speculative in steps:
        tokens = list(range(number * 100, number * 100 + 12))
        if speculative:
            made.expect(name, keys(tokens), until=1.0)
            accept(made, name, keys(tokens), until=1.0)
        else:
            made.apply(name, stored([number * 3, number * 3 + 1, number * 3 + 2], None, tokens))
        assert made.estimated_bytes <= bytes_max


class IndexAgainstModel(RuleBasedStateMachine):
    """The index against a plain dictionary of what each engine holds, over prompts of a small alphabet."""

    def __init__(self) -> None:
        super().__init__()
        self.index = index()
        self.held: dict[tuple[str, tuple[int, ...]], set[Tier]] = {}  # (engine, whole prefix) -> tiers
        self.leaving: list[Iterator[None]] = []  # engines that are being retired
        self.sweep_step = block_table.SWEEP_STEP
        block_table.SWEEP_STEP = 1

    def teardown(self) -> None:
        """Freed to the last byte once all are retired."""
        block_table.SWEEP_STEP = self.sweep_step
        for name in "ab":
            self.leaving.append(self.index.retire_engine(name))
        for steps in self.leaving:
            for _ in steps:
                pass
        assert (self.index.blocks, self.index.estimated_bytes, self.index._held.slots) == (0, 0, {})

    prompts = st.lists(st.integers(0, 1), min_size=1, max_size=4)  # one digit per block

    def engine_key(self, prefix: tuple[int, ...]) -> int:
        return int("1" + "".join(map(str, prefix)))

    @rule(name=st.sampled_from("ab"), blocks=prompts, tier=st.sampled_from([Tier.DEVICE, Tier.CPU]))
    def store(self, name: str, blocks: list[int], tier: Tier) -> None:
        hashes = [self.engine_key(tuple(blocks[: at + 1])) for at in range(len(blocks))]
        tokens = [digit for digit in blocks for _ in range(BLOCK)]
        self.index.apply(name, stored(hashes, None, tokens, tier))
        for at in range(len(blocks)):
            self.held.setdefault((name, tuple(blocks[: at + 1])), set()).add(tier)

    @rule(name=st.sampled_from("ab"), blocks=prompts, tier=st.sampled_from([Tier.DEVICE, Tier.CPU]))
    def remove(self, name: str, blocks: list[int], tier: Tier) -> None:
        self.index.apply(name, BlockRemoved([self.engine_key(tuple(blocks))], tier, 0))
        self.held.get((name, tuple(blocks)), set()).discard(tier)

    @rule(name=st.sampled_from("ab"), blocks=prompts, accepted=st.booleans())
    def route(self, name: str, blocks: list[int], accepted: bool) -> None:
        """A prompt that is refused, or whose engine's events say what it holds, changes nothing."""
        prompt = keys([digit for digit in blocks for _ in range(BLOCK)])
        expected = self.index.expect(name, prompt, until=1.0)
        if accepted:
            for _ in self.index.accepted(name, prompt, None):
                pass
        self.index.withdraw(expected)

    @rule(name=st.sampled_from("ab"))
    def clear_device(self, name: str) -> None:
        self.index.apply(name, AllBlocksCleared())
        for (owner, _), tiers in self.held.items():
            if owner == name:
                tiers.discard(Tier.DEVICE)

    @rule(name=st.sampled_from("ab"))
    def clear_engine(self, name: str) -> None:
        for _ in self.index.clear_engine(name):
            pass
        for (owner, _), tiers in self.held.items():
            if owner == name:
                tiers.clear()

    @rule(name=st.sampled_from("ab"))
    def replace_engine(self, name: str) -> None:
        self.leaving.append(self.index.retire_engine(name))
        self.index.add_engine(name)
        for (owner, _), tiers in self.held.items():
            if owner == name:
                tiers.clear()

    @rule(at=st.integers(0, 3))
    def free_some(self, at: int) -> None:
        if self.leaving:
            next(self.leaving[at % len(self.leaving)], None)

    @invariant()
    def matches_agree(self) -> None:
        for bits in range(16):
            blocks = tuple(bits >> at & 1 for at in range(4))
            found = self.index.match(keys([digit for digit in blocks for _ in range(BLOCK)]), BLOCK)
            for name in "ab":
                assert found.get(name, HeldPrefix()) == self.expected(name, blocks)

    def expected(self, name: str, blocks: tuple[int, ...]) -> HeldPrefix:
        device = cpu = 0
        for at in range(4):
            tiers = self.held.get((name, blocks[: at + 1]), set())
            if Tier.DEVICE in tiers and not cpu:
                device += 1
            elif Tier.CPU in tiers:
                cpu += 1
            else:
                break
        return HeldPrefix(device * BLOCK, cpu * BLOCK, 0)


TestIndexAgainstModel = IndexAgainstModel.TestCase
TestIndexAgainstModel.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_two_groups_that_hold_a_block_are_taken_off_one_by_one() -> None:
    made = index()
    tokens = PROMPT[:4]
    for group in (0, 1):
        made.apply("a", BlockStored([7], None, tokens, BLOCK, Tier.DEVICE, None, [], group, None))
    made.apply("a", BlockRemoved([7], Tier.DEVICE, 0))
    assert made.match(keys(tokens), BLOCK) == {}
    made.apply("a", BlockRemoved([7], Tier.DEVICE, 1))

    assert (made.blocks, made.estimated_bytes) == (0, made.waiting_bytes)


def test_a_device_is_cleared_in_steps_and_hidden_at_once() -> None:
    made = index()
    for name in ("a", "b"):
        made.apply(name, stored(list(range(3_000)), None, list(range(3_000 * BLOCK))))
    made.apply("a", stored([0], None, [], Tier.CPU))
    long_keys = keys(list(range(3_000 * BLOCK)))

    steps = made.clear_device("a")
    next(steps)
    assert set(made.match(long_keys, BLOCK)) == {"b"}
    assert len(list(steps)) == 3_000 // block_table.SWEEP_STEP - 1

    assert made.match(long_keys, BLOCK)["a"] == HeldPrefix(0, BLOCK, 0)


def test_a_large_index_keeps_its_bound_and_its_order_of_use_over_many_shards() -> None:
    each = ENTRY_BYTES + HOLDER_BYTES
    made = index(bytes_max=block_table.SHARDED_BYTES_MIN)
    count = block_table.SHARDED_BYTES_MIN // each
    for number in range(count + count // 2):
        tokens = [number, *range(BLOCK - 1)]
        made.apply("a", stored([number], None, tokens))
        accept(made, "a", keys([0, *range(BLOCK - 1)]), None)  # always in use
        assert made.estimated_bytes <= made.bytes_max

    assert made.match(keys([0, *range(BLOCK - 1)]), BLOCK)
    assert not made.match(keys([1, *range(BLOCK - 1)]), BLOCK)
    assert all(made._shards)  # every one took part


def test_a_prompt_that_is_routed_evicts_nothing() -> None:
    each = ENTRY_BYTES + HOLDER_BYTES
    made = index(bytes_max=100 * each)
    for number in range(90):
        made.apply("a", stored([number], None, [number, *range(BLOCK - 1)]))
    before = made.blocks

    for number in range(50):
        made.expect("b", keys(list(range(1000 * number, 1000 * number + 400))), until=1.0)

    assert (made.blocks, made.evicted_blocks_total) == (before, 0)
    assert made.estimated_bytes <= made.bytes_max
    assert made.match(keys([0, *range(BLOCK - 1)]), BLOCK) == {"a": HeldPrefix(BLOCK, 0, 0)}


def test_a_prompt_that_was_not_accepted_is_not_held() -> None:
    made = index()
    refused = made.expect("a", keys(PROMPT), until=10.0)
    assert made.match(keys(PROMPT), BLOCK) == {"a": HeldPrefix(16, 0, 0)}

    made.withdraw(refused)

    assert (made.match(keys(PROMPT), BLOCK), made.blocks, made.estimated_bytes) == ({}, 0, 0)


@pytest.mark.parametrize("until", [None, 10.0])
def test_an_accepted_prompt_is_counted_in_short_steps(until: float | None) -> None:
    made = index(bytes_max=1000 * ENTRY_BYTES)
    long_keys = keys(list(range(4000 * BLOCK)))

    steps = 1
    blocks, evicted = made.blocks, made.evicted_blocks_total
    for _ in made.accepted("a", long_keys, until):
        steps += 1
        assert abs(made.blocks - blocks) <= STEP_BLOCKS
        assert made.evicted_blocks_total - evicted <= EVICTIONS_MAX
        blocks, evicted = made.blocks, made.evicted_blocks_total
    assert steps == -(-4000 // STEP_BLOCKS)
    assert (made.blocks > 0) == (until is not None)


def test_events_that_free_a_long_chain_of_orphans_are_applied_in_steps() -> None:
    """A step adds a bounded number of blocks, however many one event leads to."""
    made = index()
    tokens = list(range(2000 * BLOCK))
    for start in range(100, 2000, 100):
        hashes = list(range(start, start + 100))
        made.apply("a", stored(hashes, start - 1, tokens[start * BLOCK : (start + 100) * BLOCK]))

    blocks = [made.blocks]
    for _ in made.apply_in_steps("a", stored(list(range(100)), None, tokens[: 100 * BLOCK])):
        blocks.append(made.blocks)
    added = [after - before for before, after in itertools.pairwise([*blocks, made.blocks])]
    assert (sum(added), max(added)) == (2000, 100)


def test_a_smaller_bound_is_reached_over_several_events() -> None:
    made = index()
    made.apply("a", stored(list(range(5000)), None, list(range(5000 * BLOCK))))
    made.bound(10 * ENTRY_BYTES)

    before = made.blocks
    made.apply("a", stored([5000], None, [7] * BLOCK))
    assert before - made.blocks < EVICTIONS_MAX
    for number in range(5001, 5020):
        made.apply("a", stored([number], None, [number] * BLOCK))

    assert made.estimated_bytes <= made.bytes_max


def test_a_store_that_is_forgotten_takes_no_block_that_an_engine_announced_early() -> None:
    """The store's entries are freed in steps; a block that was added behind them would lead to an unused slot."""
    clock = Clock()
    made = index(clock=clock)
    made.add_engine("c")
    for engine in ("a", "b"):
        made.apply(engine, in_store([]))
    made.apply("b", in_store([1]))  # early: no event with tokens yet
    for number in range(500):
        made.apply("c", stored([number], None, [number, *range(BLOCK - 1)]))
    for engine in ("a", "b"):
        made.apply(engine, out_of_store([]))
    clock.now = UNUSED_SECONDS
    freeing = made.retire_engine("c")
    next(freeing)

    made.apply("b", stored([1], None, PROMPT[:4]))
    for _ in freeing:
        pass

    made.bound(1)
    made.apply("b", stored([2], None, PROMPT[:4]))
    assert made.blocks == 0
    assert set(made._held.slots) == {0, 1}


def test_a_block_of_a_wrong_size_does_not_change_the_engines_own() -> None:
    made = index()
    made.apply("a", stored(list(range(40)), None, list(range(40 * BLOCK))))
    for size in (1000, BLOCK // 2):
        made.apply("a", stored([100 + size], None, list(range(size)), block=size))

    made.apply("a", stored([40], 39, list(range(40 * BLOCK, 41 * BLOCK))))

    assert made.block_tokens_of("a") == BLOCK
    assert made.match(keys(list(range(41 * BLOCK))), BLOCK) == {"a": HeldPrefix(41 * BLOCK, 0, 0)}


def test_the_size_of_an_engine_whose_first_block_was_wrong_is_found() -> None:
    made = index()
    made.apply("a", stored([1000], None, list(range(1000)), block=1000))
    for _ in range(2):
        made.apply("a", stored(list(range(40)), None, list(range(40 * BLOCK))))

    assert made.block_tokens_of("a") == BLOCK
    assert made.match(keys(list(range(40 * BLOCK))), BLOCK) == {"a": HeldPrefix(40 * BLOCK, 0, 0)}
