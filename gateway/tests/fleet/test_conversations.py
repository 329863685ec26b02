from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from spillway_gateway.config.settings import EngineConfig, ModelConfig, RoutingConfig
from spillway_gateway.fleet import conversations as conversations_room
from spillway_gateway.fleet.conversations import (
    KNOWN_SECONDS,
    PASSED_MAX,
    RUN_BLOCKS,
    Conversation,
    Conversations,
)
from spillway_gateway.fleet.engine import EngineState
from spillway_gateway.fleet.load_averages import RequestMeans
from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.fleet.prefix_index import PrefixIndex
from spillway_gateway.fleet.sessions import SessionKey
from spillway_gateway.routing.fleet_view import EngineRates, EngineView
from spillway_gateway.routing.prefix import PromptBlocks
from spillway_settings.roles import EngineRole

ENGINES = ("e0", "e1", "e2")
TURN_SECONDS = 2.0


def view(name: str) -> EngineView:
    return EngineView(name, True, 0, 0, EngineRates(5000.0, 100_000.0, 40_000.0, 10.0))


def prompt_of(keys: Sequence[int], tail: int = 1) -> PromptBlocks:
    return PromptBlocks(keys, 128, 128 * len(keys) + tail, keys[0] if keys else 0)


def of_a_second() -> RequestMeans:
    means = RequestMeans()
    for _ in range(1000):
        means.finished(1.0)
    return means


MEANS = of_a_second()


def send(
    conversations: Conversations,
    keys: Sequence[int],
    engine: str = "e0",
    *,
    now: float = 0.0,
    tenant: str = "t",
    session: SessionKey | None = None,
    tail: int = 1,
    again: bool = False,
) -> Conversation | None:
    """The conversation that it continues. tail: tokens behind the last full block."""
    prompt = prompt_of(keys, tail)
    conversations.pass_on(tenant, now)
    found = conversations.of(tenant, session, prompt)
    conversations.routed(found, tenant, session, prompt, engine, now=now, means=MEANS, again=again)
    return found


def much_continued(entries_max: int = 100) -> Conversations:
    """Conversations of a model whose requests mostly continued one; all of them are over."""
    conversations = Conversations(entries_max)
    for turns in range(1, 100):
        send(conversations, range(turns), "gone", now=-10_000.0)
    conversations.pass_on("t", 0.0)
    assert not len(conversations)
    return conversations


class Fleet:
    """Engines, and prompts of 128 tokens a block that are sent to them."""

    def __init__(self, *engines: EngineConfig) -> None:
        self.now = 0.0
        index = PrefixIndex("m", bytes_max=10_000_000, orphans_max=10, default_block_tokens=128, clock=lambda: self.now)
        routing = RoutingConfig()
        model = ModelConfig("m", engines)
        self.model = ModelFleet(model, routing, index, clock=lambda: self.now)
        for engine in self.model.engines.values():
            engine.set_state(EngineState.READY, "ready")
            engine.events_live = True

    def ask(self, keys: Sequence[int], session: SessionKey | None = None) -> str:
        prompt = PromptBlocks(keys, 128, 128 * len(keys) + 1, keys[0])
        attempt = self.model.choose(prompt, frozenset(), session=session)
        attempt.accepted(self.now)
        attempt.first_byte(self.now, measures_prefill=False)
        attempt.close(self.now)
        return attempt.engine.name


def engines(count: int, role: EngineRole = EngineRole.BOTH) -> list[EngineConfig]:
    return [EngineConfig(f"e{at}", "http://127.0.0.1:1", role=role) for at in range(count)]


def chat(number: int, turns: int, common: int = 2) -> list[int]:
    """Keys of a conversation's prompt: common blocks, then five for each turn."""
    own = [1000 * (number + 1) + at for at in range(5 * turns)]
    return [*range(1, common + 1), *own]


@pytest.mark.parametrize("named", [False, True])
def test_conversations_that_start_one_after_the_other_are_spread_evenly_whatever_runs_at_their_first_moment(
    named: bool,
) -> None:
    fleet = Fleet(*engines(4))
    lots = random.Random(0)
    at: dict[int, str] = {}
    turns = Counter[int]()
    for number in range(16):
        others = list(range(number))
        for each in [number, *lots.sample(others, min(number, 3))]:  # some turns of others in between
            fleet.now += 0.2
            busy = lots.choice([*fleet.model.engines])  # which would decide alone
            waiting = fleet.model.choose(PromptBlocks([], 128, 250, number), frozenset(), only=busy)
            turns[each] += 1
            session = SessionKey.of("t", b"%d" % each) if named else None
            at[each] = fleet.ask(chat(each, turns[each]), session)
            waiting.close()
    assert max(Counter(at.values()).values()) <= 5


def test_prompts_that_nothing_continues_go_where_the_queue_is_shortest_in_the_end() -> None:
    fleet = Fleet(*engines(2))
    for number in range(300):
        fleet.now += 0.1
        fleet.ask([10_000 + number])
    conversations, means = fleet.model.conversations, RequestMeans()
    means.sent(64_000)  # a mean of 1,000 tokens: 200 ms
    assert conversations.later_ms(view("e0"), means) == 0.0


def test_an_engine_half_as_fast_gets_half_of_the_conversations() -> None:
    conversations, means = much_continued(), RequestMeans()
    means.sent(64_000)
    slow = structs.replace(view("slow"), rates=EngineRates(2500.0, 100_000.0, 40_000.0, 0.0))
    fast = structs.replace(view("fast"), rates=EngineRates(5000.0, 100_000.0, 40_000.0, 0.0))
    served = Counter[str]()
    for number in range(1, 13):
        chosen = min((fast, slow), key=lambda each: conversations.later_ms(each, means)).name
        send(conversations, [1000 + number], chosen)
        served[chosen] += 1
    assert served == {"fast": 8, "slow": 4}


def test_the_conversations_of_an_engine_that_died_are_spread_over_the_others() -> None:
    fleet = Fleet(*engines(4))
    before = {}
    for number in range(24):
        fleet.now += 0.1
        before[number] = fleet.ask(chat(number, 1))
        assert fleet.ask(chat(number, 2)) == before[number]
    fleet.model.engines["e3"].refused("it died")
    for _ in fleet.model.index.clear_engine("e3"):
        pass
    after = {}
    for number in range(24):
        fleet.now += 0.1
        after[number] = fleet.ask(chat(number, 3))
    assert all(after[number] == engine for number, engine in before.items() if engine != "e3")
    assert max(Counter(after.values()).values()) <= 9 and "e3" not in after.values()


@pytest.mark.parametrize("other", [[], [EngineConfig("p", "http://127.0.0.1:1", role=EngineRole.PREFILL)]])
def test_with_one_engine_or_with_roles_nothing_is_counted(other: list[EngineConfig]) -> None:
    fleet = Fleet(*engines(1), *other)
    fleet.ask(chat(0, 1))
    assert not len(fleet.model.conversations)


@given(st.sampled_from([1, 3, 5, 10]), st.integers(1, 30))
def test_a_place_has_a_price_if_and_only_if_most_requests_continue_another(turns: int, chats: int) -> None:
    conversations, means = Conversations(1000), RequestMeans()
    means.sent(1000)
    for number in range(chats):
        for turn in range(1, turns + 1):
            send(conversations, chat(number, turn))
    priced = conversations.later_ms(view("e0"), means) > 0.0
    assert priced == conversations.settles(None, {}, ()) == (turns > 2)


def test_a_turn_is_recognised_by_the_prompt_before_it_and_by_no_common_beginning() -> None:
    conversations = Conversations(100)
    send(conversations, chat(0, 1))
    found = conversations.of("t", None, prompt_of(chat(0, 3)))
    assert found is not None and found.engine == "e0"
    assert conversations.of("t", None, prompt_of(chat(1, 3))) is None  # the same system prompt
    assert conversations.of("other", None, prompt_of(chat(0, 3))) is None
    send(conversations, chat(0, 3), "e1")
    assert len(conversations) == 1 and conversations.of("t", None, prompt_of(chat(0, 1))) is None


@given(st.integers(1, 5 * RUN_BLOCKS), st.integers(1, 1000))
def test_a_turn_is_recognised_however_much_it_adds(first: int, added: int) -> None:
    conversations = Conversations(100)
    send(conversations, range(first))
    found = send(conversations, range(first + added))
    assert found is not None and len(conversations) == 1
    assert conversations.of("t", None, prompt_of(range(first + added + 1))) is found
    assert conversations.of("t", None, prompt_of(range(first))) is None
    assert sum(conversations._marks.values()) == 1, "nothing is left of its former end"


def test_prompts_that_differ_within_the_last_block_alone_are_no_turns_of_one_conversation() -> None:
    conversations, lots = Conversations(100), random.Random(0)
    for _ in range(100):
        send(conversations, chat(0, 1), tail=lots.randrange(128))
    assert not conversations.settles(None, {}, ())
    assert send(conversations, chat(0, 2)) is not None


def test_what_is_asked_again_and_a_turn_that_fills_no_block_are_no_turns() -> None:
    conversations = Conversations(100)
    send(conversations, chat(0, 1), tail=20)
    for tail in (20, 20, 60):
        found = send(conversations, chat(0, 1), tail=tail, now=1.0)
        assert found is not None and found.intervals == 0
    assert not conversations.settles(None, {}, ())
    found = send(conversations, chat(0, 2), now=3.0)
    assert found is not None and found.interval == 2.0


def test_a_request_that_is_sent_again_is_one_turn() -> None:
    conversations, means = much_continued(), RequestMeans()
    send(conversations, [1000], "e0")
    found = send(conversations, [1000], "e1", now=0.001, again=True)
    assert found is not None and found.intervals == 0
    means.sent(1000)
    assert conversations.later_ms(view("e0"), means) < conversations.later_ms(view("e1"), means)


def test_a_tenants_flood_takes_the_place_of_none_of_anothers() -> None:
    conversations = Conversations(100)
    for number in range(30):
        send(conversations, chat(number, 1), tenant="few")
    for number in range(1000):
        send(conversations, chat(number, 1), tenant="many", now=1.0)
        assert len(conversations) <= 100
    for number in range(30):
        assert send(conversations, chat(number, 2), tenant="few", now=2.0) is not None
    for number in range(100):
        send(conversations, chat(number, 1), tenant=f"tenant {number}", now=3.0)
    assert len(conversations) == 100
    assert send(conversations, chat(99, 2), tenant="tenant 99", now=4.0) is not None


def test_each_conversation_beyond_the_bound_is_taken_from_a_crowded_tenant_without_a_look_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = 0

    class Counted(OrderedDict[Any, Any]):
        def __len__(self) -> int:
            nonlocal looks
            looks += 1
            return super().__len__()

    monkeypatch.setattr(conversations_room, "OrderedDict", Counted)
    conversations = Conversations(1000)
    for number in range(900):
        send(conversations, chat(number, 1), tenant="many")
    for number in range(100):
        send(conversations, chat(number, 1), tenant=f"tenant {number}", now=1.0)
    looks = 0
    for number in range(100):
        send(conversations, chat(number + 1000, 1), tenant=f"tenant {number}", now=2.0)

    assert looks < 100 * 10
    assert len(conversations) == 1000
    for number in range(100):
        assert send(conversations, chat(number, 2), tenant=f"tenant {number}", now=3.0) is not None


steps_of_one = st.tuples(st.integers(0, 8), st.sampled_from(ENGINES), st.floats(0, 20), st.booleans(), st.booleans())
tenants = st.sampled_from(["ann", "bob", "eve"])


@given(st.lists(st.tuples(steps_of_one, tenants), max_size=80), st.integers(1, 6))
def test_what_counts_is_what_is_known_and_everything_is_forgotten_in_the_end(
    taken: list[tuple[tuple[int, str, float, bool, bool], str]], entries_max: int
) -> None:
    conversations, means = Conversations(entries_max), RequestMeans()
    means.sent(1000)
    now, turns = 0.0, Counter[int]()
    for (number, engine, later, named, again), tenant in taken:
        now += later
        turns[number] += 1
        session = SessionKey(tenant, number) if named else None
        keys = chat(number, turns[number])
        send(conversations, keys, engine, now=now, tenant=tenant, session=session, again=again)
        found = conversations.of(tenant, session, prompt_of(keys))
        assert found is not None and found.engine == engine and 0.0 <= found.running <= 1.0
        assert len(conversations) <= entries_max and len(conversations._due) <= entries_max
    for tenant in ("ann", "bob", "eve"):
        conversations.pass_on(tenant, now + KNOWN_SECONDS)
    assert not len(conversations) and not conversations._marks and not conversations._tenants
    assert len({conversations.later_ms(view(name), means) for name in ENGINES}) == 1  # nothing counts anywhere


def test_who_pauses_for_long_counts_no_more_but_is_known() -> None:
    conversations, means = Conversations(100), RequestMeans()
    means.sent(1000)
    for turn in range(1, 6):
        send(conversations, chat(0, turn), now=turn * TURN_SECONDS)
    counted = conversations.later_ms(view("e0"), means)
    conversations.pass_on("t", 5 * TURN_SECONDS + 2 * TURN_SECONDS)
    assert conversations.later_ms(view("e0"), means) == counted > conversations.later_ms(view("e1"), means)
    conversations.pass_on("t", 5 * TURN_SECONDS + 4 * TURN_SECONDS)
    assert conversations.later_ms(view("e0"), means) == conversations.later_ms(view("e1"), means)
    assert conversations.of("t", None, prompt_of(chat(0, 6))) is not None


def go_on(conversations: Conversations, number: int, turn: int, now: float, engine: str = "e0") -> bool:
    """Whether it was known."""
    return send(conversations, chat(number, turn), engine, now=now) is not None


@pytest.mark.parametrize("pause", [5.0, 20.0, 60.0, 300.0])
def test_conversations_are_recognised_however_long_all_of_them_pause(pause: float) -> None:
    conversations = Conversations(100)
    for turn in range(1, 5):
        for number in range(16):
            assert go_on(conversations, number, turn, (turn + number / 16) * pause) == (turn > 1)
    assert conversations.settles(None, {}, ())


def test_who_comes_back_after_a_long_pause_counts_no_longer_than_others() -> None:
    conversations, means = Conversations(100), RequestMeans()
    means.sent(1000)
    for turn in range(1, 20):
        go_on(conversations, 0, turn, turn * TURN_SECONDS)
    back = 19 * TURN_SECONDS + 5 * TURN_SECONDS
    go_on(conversations, 0, 20, back)
    assert conversations.later_ms(view("e0"), means) > conversations.later_ms(view("e1"), means)
    conversations.pass_on("t", back + 5 * TURN_SECONDS)
    assert conversations.later_ms(view("e0"), means) == conversations.later_ms(view("e1"), means)


def test_a_flood_of_prompts_takes_the_place_of_none_that_goes_on() -> None:
    conversations = Conversations(10)
    for turn in range(1, 100):
        assert go_on(conversations, 0, turn, 0.2 * turn) == (turn > 1)
        go_on(conversations, turn, 1, 0.2 * turn)


def test_a_request_that_comes_after_a_long_silence_deals_with_a_part_of_those_that_paused() -> None:
    conversations = Conversations(1000)
    for number in range(5 * PASSED_MAX):
        send(conversations, [number])
    for left in (4, 3, 2, 1, 0):
        conversations.pass_on("t", KNOWN_SECONDS)
        assert len(conversations) == len(conversations._due) == left * PASSED_MAX
