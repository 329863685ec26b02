"""The chunks that a shared tier is given, and when: few rows are pinned, and prefixes come whole."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import count, islice
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from spillway_connector import metrics
from spillway_connector.engine.ipc.samples import Samples, sample_key
from spillway_connector.engine.manager import spills
from spillway_connector.engine.manager.spills import IN_HAND_LEAST, UNPAID_SECONDS, AllSpills, Spills
from spillway_connector.engine.requests.tenancy import TenantContext
from spillway_connector.plan.holds import RetentionHint
from spillway_connector.plan.sessions import SessionHint

ROWS = 100
CHUNKS = IN_HAND_LEAST + 8  # of a prefix: more than may be in hand


class Rig:
    """A full CPU tier and a shared tier that takes nothing by itself."""

    def __init__(self, *, free_rows: int = 0) -> None:
        self.ready: set[OffloadKey] = set()
        self.stored: set[OffloadKey] = set()
        self.in_hand: list[OffloadKey] = []
        self.given: list[OffloadKey] = []
        self.pays, self.now = True, 100.0
        cpu_tier = SimpleNamespace(ready=self.ready, free_rows=lambda: free_rows)
        tier = SimpleNamespace(known=self._known, stores_in_hand=lambda: len(self.in_hand), tier_type="nvme")
        self.spills = Spills(
            cast(Any, tier), cast(Any, cpu_tier), self._submit, lambda: self.pays, lambda: self.now, rows=ROWS
        )

    def _known(self, keys: Sequence[OffloadKey]) -> set[OffloadKey]:
        return (self.stored | set(self.in_hand)).intersection(keys)

    def _submit(self, keys: Collection[OffloadKey], context: ReqContext) -> None:
        assert self.ready.issuperset(keys), "a row that holds something else"
        self.given += keys
        self.in_hand += [key for key in keys if key not in self._known(list(keys))]

    def take(self, chunks: int) -> None:
        """The shared tier has stored so many."""
        self.stored.update(self.in_hand[:chunks])
        del self.in_hand[:chunks]

    def arrive(self, prompt: int, *, reverse: bool = False, chunks: int = CHUNKS) -> None:
        """A request of its own conversation ends, and the CPU tier receives its chunks."""
        keys = prefix(prompt, chunks)
        context = context_of(prompt, prefix=keys)
        self.spills.use(context)
        self.ready.update(keys)
        self.spills.offer(keys[::-1] if reverse else keys, context)

    def drain(self) -> None:
        """Wait until no spill is queued or in hand."""
        for _ in range(100):
            self.spills.give()
            self.take(IN_HAND_LEAST)

    def report(self) -> dict[str, float]:
        stats = Samples()
        self.spills.add_to(stats)
        outcomes = ("at_once", "deferred", "later")
        samples = stats.samples()
        named = {one: samples.get(sample_key(metrics.TIER_OFFERED, "nvme", one), 0.0) for one in outcomes}
        return named | {"wait": samples[sample_key(metrics.TIER_STORES_WAIT, "nvme")]}


def prefix(prompt: int, chunks: int = CHUNKS) -> list[OffloadKey]:
    return [OffloadKey(bytes([prompt, at]) * 18) for at in range(chunks)]


def context_of(prompt: int, **fields: Any) -> TenantContext:
    return TenantContext(f"r{prompt}", session=SessionHint(b"s%d" % prompt), **fields)


def test_a_tier_that_keeps_up_gets_everything_at_once():
    rig = Rig()
    for prompt in range(5):
        rig.arrive(prompt, chunks=IN_HAND_LEAST)
        assert rig.spills.keeps_up
        rig.take(IN_HAND_LEAST)
    assert rig.given == [key for prompt in range(5) for key in prefix(prompt, IN_HAND_LEAST)]
    assert rig.report() == {"at_once": 5.0 * IN_HAND_LEAST, "deferred": 0.0, "later": 0.0, "wait": 0.0}


def test_free_rows_are_taken_from_nobody_so_all_goes_at_once():
    rig = Rig(free_rows=1)
    for prompt in range(5):
        rig.arrive(prompt)
    assert len(rig.given) == 5 * CHUNKS


def test_what_was_used_longest_ago_goes_first_from_the_head_of_its_prefix_on():
    rig = Rig()
    for prompt in range(3):
        rig.arrive(prompt, reverse=True)  # as a device frees a prefix
    rig.spills.use(context_of(0, prefix=prefix(0)))
    assert not rig.spills.keeps_up
    order: list[OffloadKey] = []
    for _ in range(3 * CHUNKS):
        rig.spills.give()
        assert len(rig.in_hand) <= IN_HAND_LEAST
        rig.take(IN_HAND_LEAST)
    order = rig.given
    assert order == prefix(1) + prefix(2) + prefix(0)
    assert rig.spills.keeps_up
    assert rig.report() == {"at_once": 0.0, "deferred": 3.0 * CHUNKS, "later": 3.0 * CHUNKS, "wait": 0.0}


def test_nothing_is_given_behind_a_chunk_that_no_tier_holds():
    rig = Rig()
    rig.arrive(0)
    rig.ready.discard(prefix(0)[3])
    rig.spills.give()
    assert rig.given == prefix(0)[:3]
    assert rig.spills.keeps_up, "what cannot be loaded is not waited for"


def test_what_waits_and_leaves_the_cpu_tier_is_forgotten():
    rig = Rig()
    rig.arrive(0)
    rig.ready.clear()
    rig.spills.give()
    assert not rig.given
    assert rig.spills.keeps_up


@pytest.mark.parametrize("fields", [{"hand_over": True}, {"retention": RetentionHint(0.25, ())}])
def test_what_another_engine_or_a_client_waits_for_goes_at_once(fields: dict[str, Any]):
    rig = Rig()
    rig.arrive(0)
    keys = prefix(1)
    rig.ready.update(keys)
    rig.spills.offer(keys, context_of(1, **fields))
    assert rig.given == keys


def test_branches_of_one_conversation_all_reach_the_tier():
    rig = Rig()
    branches = [prefix(number) for number in range(3)]
    for keys in branches:  # the last one is the conversation's prefix when the tier takes the first
        context = context_of(0, prefix=keys)
        rig.spills.use(context)
        rig.ready.update(keys)
        rig.spills.offer(keys, context)
    rig.drain()
    assert rig.stored == {key for keys in branches for key in keys}


def test_what_waits_of_a_prompt_that_is_handed_over_goes_at_once():
    rig = Rig()
    rig.arrive(0)
    rig.arrive(1)
    assert not rig.given
    rig.spills.use(context_of(1, hand_over=True, prefix=prefix(1)))
    assert rig.given == prefix(1)


def test_an_idle_tier_catches_up_with_many_short_conversations():
    rig = Rig()
    rig.arrive(0)
    assert not rig.spills.keeps_up
    names = count(1)
    for _ in range(20):
        for name in islice(names, IN_HAND_LEAST // 2):
            keys = [OffloadKey(b"%036d" % name)]
            context = TenantContext(f"short-{name}", prefix=keys)
            rig.spills.use(context)
            rig.ready.update(keys)
            rig.spills.offer(keys, context)
        rig.take(IN_HAND_LEAST)
        rig.spills.give()
    assert rig.spills.keeps_up


def test_no_more_waits_than_the_cpu_tier_holds_however_long_the_tier_takes_nothing():
    rig = Rig()
    rig.pays = False
    for number in range(100):  # one conversation, of which the CPU tier keeps the last prompt alone
        keys = [OffloadKey(b"%018d%018d" % (number, at)) for at in range(10)]
        context = context_of(0, prefix=keys)
        rig.spills.use(context)
        rig.ready.clear()
        rig.ready.update(keys)
        rig.spills.offer(keys, context)
    rig.pays = True
    assert len(rig.ready) <= rig.spills.waiting_chunks <= 2 * ROWS


def test_while_loads_do_not_pay_one_batch_is_given_now_and_then():
    rig = Rig()
    rig.pays = False
    rig.arrive(0, chunks=IN_HAND_LEAST)
    rig.arrive(1, chunks=IN_HAND_LEAST)
    for _ in range(10):
        rig.spills.give()
        rig.take(IN_HAND_LEAST)
    assert rig.given == prefix(0, IN_HAND_LEAST)
    assert not rig.spills.waiting_chunks, "an engine without work does not step for it"
    rig.now += UNPAID_SECONDS
    rig.spills.give()
    assert rig.given == prefix(0, IN_HAND_LEAST) + prefix(1, IN_HAND_LEAST)
    assert rig.report()["wait"] == 1.0


def test_chunks_that_the_tier_holds_are_not_deferred_again():
    rig = Rig()
    rig.stored.update(prefix(0))
    rig.arrive(0)
    assert rig.spills.keeps_up
    assert not rig.given


@pytest.mark.parametrize("tiers", [0, 1, 2])
def test_contexts_that_late_stores_keep_hold_few_prefixes(tiers: int, monkeypatch: pytest.MonkeyPatch):
    """Each chunk that only the device holds has its request's context, which is one of thousands."""
    monkeypatch.setattr(spills, "PREFIX_CHUNKS_MAX", 10 * CHUNKS)
    cpu_tier, given = SimpleNamespace(ready=set(), free_rows=lambda: 1), cast(Any, lambda *_: None)
    pays = {cast(Any, object()): lambda: True for _ in range(tiers)}
    every = AllSpills(pays, cast(Any, cpu_tier), given, lambda: 0.0, rows=ROWS, follows_tiers=True)
    requests = [(prefix(number), context_of(number)) for number in range(100)]
    for _ in range(2):
        for keys, context in requests:
            for _ in ("it begins", "it ends"):
                every.use(keys, context)
            assert not tiers or context.prefix == keys
    assert [number for number, (_, context) in enumerate(requests) if context.prefix] == [*range(90, 100)] * bool(tiers)


actions = st.lists(st.tuples(st.sampled_from(["arrive", "take", "give", "evict", "pay"]), st.integers(0, 5)))


@given(actions)
def test_rows_in_hand_stay_bounded_and_an_end_is_reached(plan: list[tuple[str, int]]):
    rig = Rig()
    for action, number in plan:
        if action == "arrive":
            rig.arrive(number, reverse=number % 2 == 0)
        elif action == "take":
            rig.take(10 * number)
        elif action == "give":
            rig.spills.give()
        elif action == "evict":
            rig.ready.difference_update(prefix(number)[number:])
            rig.ready.update(rig.in_hand)  # rows in hand are pinned
        else:
            rig.pays = number > 2
        assert len(rig.in_hand) <= IN_HAND_LEAST
    rig.pays = True
    for _ in range(30):
        rig.take(IN_HAND_LEAST)
        rig.spills.give()
    assert rig.spills.keeps_up
    assert not rig.spills.waiting_chunks
