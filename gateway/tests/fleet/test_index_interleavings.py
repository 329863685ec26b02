"""No exception leaves the index, whatever engines announce and however steps interleave; its books agree, and what it
remembers of runs of blocks is what it would read.

Events, prompts, departures and clears take turns in steps of one block, as they do on the event loop with steps of
hundreds. An exception here would end a request or the task that follows an engine's events.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spillway_gateway.fleet import block_holders, block_runs, block_table, prefix_index
from spillway_gateway.fleet.block_runs import read_spans
from spillway_gateway.fleet.block_table import Entry
from spillway_gateway.fleet.event_decoder import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, Tier
from spillway_gateway.fleet.prefix_index import PrefixIndex
from spillway_gateway.fleet.shared_stores import UNUSED_SECONDS
from spillway_gateway.routing.prefix import namespace_key, token_block_keys

BLOCK = 2
ENGINES = ("a", "b", "c")
STORES = ("redis/00000000000000aa", "nvme/00000000000000bb")
HASHES = 6  # an engine key's tokens are a function of it, so chains meet
PROMPTS = ([1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [1, 2, 3, 5], [5, 6], [1])


def tokens_of(hashes: list[int]) -> list[int]:
    return [number % 4 for number in hashes for _ in range(BLOCK)]


def keys_of(hashes: list[int]) -> list[int]:
    return token_block_keys(namespace_key("m"), tokens_of(hashes), BLOCK)


def with_tokens(hashes: list[int], parent: int | None, tier: Tier, group: int) -> BlockStored:
    tokens = tokens_of(hashes)
    return BlockStored(hashes, parent, tokens, BLOCK if tokens else 0, tier, None, [], group, None)


def without_tokens(hashes: list[int], store: str | None, group: int) -> BlockStored:
    """Event of blocks in a store, or below the engine's device. No hashes: the engine loads from the store."""
    return BlockStored(hashes, None, [], 0, Tier.SHARED if store else Tier.CPU, None, [], group, None, store=store)


def removed(hashes: list[int], store: str | None, group: int) -> BlockRemoved:
    """No hashes: the engine no longer loads from the store."""
    return BlockRemoved(hashes, Tier.SHARED if store else Tier.DEVICE, group, store=store)


hash_lists = st.lists(st.integers(1, HASHES), max_size=3)
groups = st.sampled_from([0, 0, 0, 1])
stores = st.sampled_from(STORES)
events: st.SearchStrategy[KvEvent] = st.one_of(
    st.builds(with_tokens, hash_lists, st.none() | st.integers(1, HASHES), st.sampled_from(Tier), groups),
    st.builds(with_tokens, hash_lists, st.none(), st.just(Tier.DEVICE), st.just(0)),
    st.builds(with_tokens, st.sampled_from(PROMPTS), st.none(), st.sampled_from(Tier), st.just(0)),
    st.builds(with_tokens, st.sampled_from(PROMPTS), st.none(), st.just(Tier.DEVICE), st.just(0)),
    st.builds(without_tokens, hash_lists, stores | st.none(), groups),
    st.builds(removed, hash_lists, stores | st.none(), groups),
    st.builds(removed, st.just([]), stores, st.just(0)),
    st.just(AllBlocksCleared()),
)
names = st.sampled_from(ENGINES)
actions = st.one_of(
    st.tuples(st.just("event"), names, events),
    st.tuples(st.just("event"), names, events),
    st.tuples(st.just("steps"), st.integers(0, 9), st.integers(1, 8)),
    st.tuples(st.just("steps"), st.just(0), st.just(8)),
    st.tuples(st.just("clear"), names, st.none()),
    st.tuples(st.just("depart"), names, st.booleans()),
    st.tuples(st.just("prompt"), names, st.booleans()),
    st.tuples(st.just("leave"), stores, st.integers(0, 9)),
    st.tuples(st.just("bytes"), st.sampled_from([1_000, 2_000, 20_000, 1_000_000]), st.none()),
)


class Interleaved:
    """One index, and the steps that are under way on it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.index = PrefixIndex(
            "m", bytes_max=1_000_000, orphans_max=3, default_block_tokens=BLOCK, clock=lambda: self.now
        )
        self.under_way: list[Iterator[object]] = []
        self.applied: dict[str, Iterator[object]] = {}  # an engine's event, before whose end no other one may begin
        for name in ENGINES:
            self.index.add_engine(name)

    def begin(self, steps: Iterator[object]) -> None:
        self.under_way.append(steps)
        self.step(len(self.under_way) - 1)

    def step(self, at: int) -> None:
        steps = self.under_way[at % len(self.under_way)]
        if next(steps, self) is self:
            self.under_way.remove(steps)
            self.applied = {name: event for name, event in self.applied.items() if event is not steps}

    def event(self, name: str, event: KvEvent) -> None:
        if name not in self.applied:
            self.applied[name] = self.index.apply_in_steps(name, event)
            self.begin(self.applied[name])

    def steps(self, at: int, count: int) -> None:
        for _ in range(count):
            if self.under_way:
                self.step(at)

    def clear(self, name: str, _: None) -> None:
        if name not in self.applied:
            self.begin(self.index.clear_engine(name))

    def depart(self, name: str, comes_back: bool) -> None:
        following = self.applied.pop(name, None)
        if following is not None:
            self.under_way.remove(following)
            following.close()  # type: ignore[attr-defined]
        self.begin(self.index.retire_engine(name))
        if comes_back:
            self.index.add_engine(name)

    def prompt(self, name: str, has_events: bool) -> None:
        keys = keys_of([1, 2, 3, 4])
        found = self.index.match(keys, BLOCK).get(name)
        self.index.in_a_store(keys)
        on_device = 0 if found is None else found.device_tokens // BLOCK
        expected = self.index.expect(name, keys, self.now + 10.0, on_device=on_device)
        self.begin(self.index.accepted(name, keys, None if has_events else self.now + 10.0))
        if has_events:  # else it stays expected
            self.index.withdraw(expected)
        self.begin(self.index.held_alone({each: each for each in ENGINES}))

    def leave(self, store: str, steps: int) -> None:
        """Let all engines leave the store after so many steps of what is under way, so that it may be forgotten."""
        self.steps(0, steps)
        for name in ENGINES:
            self.event(name, removed([], store, 0))
        self.now += UNUSED_SECONDS + 1.0

    def bytes(self, bytes_max: int, _: None) -> None:
        self.index.bound(bytes_max)

    def agree(self) -> None:
        """Each key of a holder has its block and each block of a holder its key, and both are counted."""
        held = self.index._held
        entries = {key: entry for shard in held.table.shards for key, entry in shard.items()}
        of_holders = {
            (slot, scoped, key) for slot, holder in held.slots.items() for scoped, key in holder.request_keys.items()
        }
        assert of_holders == {
            (each.slot, each.scoped, key) for key, entry in entries.items() for each in entry.holder_keys()
        }
        assert (held.keys, held.table.entries) == (len(of_holders), len(entries))
        for prompt in PROMPTS:
            self.agree_on(keys_of(prompt), entries)

    def agree_on(self, keys: list[int], entries: Mapping[int, Entry]) -> None:
        """The holders of a prompt's blocks are read as they are, whatever was read before."""
        table, expected = self.index._held.table, self.index._expected.by_key
        spans = read_spans(table.shards, table.shard_mask, keys, expected, self.now)
        held = []
        for key in keys:
            entry, routed = entries.get(key), expected.get(key)
            if entry is None and routed is None:
                break
            entry = entry or Entry()
            device = entry.mask
            device |= entry.speculative_mask if entry.speculative_until > self.now else 0
            device |= routed.mask if routed is not None and routed.until > self.now else 0
            held.append((device, entry.mask))
        assert [(span.device, span.mask) for span in spans for _ in range(span.blocks)] == held


@pytest.fixture(autouse=True, scope="module")
def small_steps() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_index, "STEP_BLOCKS", 1)
        patch.setattr(block_runs, "RUN_BLOCKS", 4)
        patch.setattr(block_runs, "SHORT_RUN_BLOCKS", 2)
        patch.setattr(block_holders, "EVICTIONS_MAX", 2)
        patch.setattr(block_table, "SWEEP_STEP", 1)
        patch.setattr(block_table, "COMPACT_EVICTIONS_MIN", 1)
        yield


@settings(max_examples=5 * settings.default.max_examples, deadline=None)
@given(st.lists(actions, min_size=8, max_size=40))
def test_nothing_leaves_the_index_and_its_books_agree(taken: list[tuple[str, object, object]]) -> None:
    made = Interleaved()
    for action, first, second in taken:
        getattr(made, action)(first, second)
        made.agree()
    while made.under_way:
        made.step(0)
    for name in ENGINES:
        for _ in made.index.retire_engine(name):
            pass
    made.agree()


def test_an_early_block_of_a_store_that_was_forgotten_meanwhile_is_no_key() -> None:
    made = Interleaved()
    made.event("a", without_tokens([5], STORES[0], 0))
    made.leave(STORES[0], 9)
    made.depart("b", False)  # which forgets the stores that no engine uses
    assert made.index.shared_stores == 0

    made.event("a", with_tokens([5], None, Tier.DEVICE, 0))
    made.steps(0, 9)
    made.agree()
