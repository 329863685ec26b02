"""Decides whose prompts an engine's next step computes while one party floods the engine, and how many of their tokens.

A party is a session of a tenant; a tenant's requests that name no session are one party. Its attained service is the
prompt tokens that were computed for it, which count half a half-life later (least attained service, L. Kleinrock,
Queueing Systems, volume 2, 1976). A tenant floods the engine if it attained several times as much as another that was
there lately, about as much as the one that attained most, and more than a few full steps; a session does among those of
its tenant.

While others have a prompt to compute, a step computes none of a flood's, up to a few steps in a row; then one step is
the engine's own, so that the flood does not starve. While no other party has a prompt, only one step of the flood can
delay the next one that arrives: the step under way, and with asynchronous scheduling the one behind it if that is
planned. So a step of a flood's prompts takes about STEP_TIMES as long as one of very few tokens, by measured times of
steps. While a party that was there lately has no request in the engine, and so may ask at any time, the step has very
few tokens, and the next one is planned when most of its time is over. If others wait for blocks, which no short step
gives them, prompts of the flood that have begun get full steps, and no other prompt of the flood begins: it would take
the blocks that are freed.

A step of others' prompts leaves out the flood's requests that decode, too, so that it takes no longer than without the
flood; never two steps in a row do, and none does if the last such step had no room for others' prompts. All other
requests decode in every step.

If no party floods the engine, nothing changes.

Pure: no clock, no queue; times are arguments, in seconds.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from statistics import median
from typing import Generic, NamedTuple, TypeVar

HALF_LIFE_SECONDS = 60.0
LATELY_SECONDS = 60.0  # a party that neither came nor had a prompt computed for so long has left
FLOOD_TIMES = 4.0  # as much as another party, and at least that part of the most: two users differ by less
FLOOD_STEPS = 8  # full steps of prompts within about a half-life; a party that takes less disturbs no other
FLOOD_STEP_TOKENS = 256  # of a flood's prompts in one step, until steps were measured
LEAST_TOKENS = 64  # of a step that measures the least time that a step takes; two in a row of MEASURED_EVERY are such
MEASURED_EVERY = 64
LEAST_TIMES_KEPT = 5
STEP_TIMES = 1.2  # that least time
CHANGE = 1.05  # of the size of a flood's step, after each one that was measured
HELD_SHARE = 0.75  # of the least time that a step takes: the rest is for planning the next one and for launching it
HELD_SECONDS_MAX = 0.1
STEPS_WITHOUT_FLOOD_MAX = 3  # in a row, while a flood has a prompt to compute
STEPS_WITHOUT_DECODES_MAX = 1  # in a row: of a flood
PARTIES_MAX = 128  # followed at a time; the one that was served least lately is forgotten, and counts as not served


class Party(NamedTuple):
    """A session of a tenant. `session` None stands for all requests of the tenant that name no session."""

    tenant: bytes
    session: bytes | None = None


class Step(NamedTuple):
    """The parties whose prompts a step computes.

    tokens: the most of their tokens; None: as many as the engine's step takes.
    begins: whether prompts that wait may begin; else those that have begun are computed alone.
    pauses: whose requests that decode are left out.
    held_seconds: for how long the step behind this one shall not be planned, unless a party comes that is no flood.
    """

    parties: frozenset[Party]
    tokens: int | None
    begins: bool = True
    pauses: frozenset[Party] = frozenset()
    held_seconds: float = 0.0

    @property
    def is_floods(self) -> bool:
        return self.tokens is not None or not self.begins


_Key = TypeVar("_Key")


class _Attained(Generic[_Key]):
    """Prompt tokens that were computed for those who were there lately."""

    def __init__(self) -> None:
        self._found: OrderedDict[_Key, tuple[float, float]] = OrderedDict()  # (tokens, when that was true)

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[_Key]:
        return iter(self._found)

    def add(self, key: _Key, tokens: int, now: float) -> None:
        self._found[key] = self.of(key, now) + tokens, now
        self._found.move_to_end(key)
        if len(self._found) > PARTIES_MAX:
            self._found.popitem(last=False)

    def of(self, key: _Key, now: float) -> float:
        tokens, at = self._found.get(key, (0.0, now))
        return tokens * math.exp2((at - now) / HALF_LIFE_SECONDS)

    def forget(self, before: float) -> None:
        while self._found and next(iter(self._found.values()))[1] < before:
            self._found.popitem(last=False)


class _FloodSteps:
    """Number of a flood's tokens that a step computes, by what such steps take.

    The time between two plans is that of one of the two steps before them, since one may be under way while the next
    one is planned. So it counts if those two were alike and neither plan was held.
    """

    def __init__(self, step_tokens: int) -> None:
        self._most = float(step_tokens)
        self._tokens = min(float(FLOOD_STEP_TOKENS), self._most)
        self._asked = 0  # of the step that is planned; 0: it is no flood's, or the plan of the next one is held
        self._last_two = (0, 0)  # asked and computed
        self._number = 0
        self._planned_at = 0.0
        self._least_seconds: deque[float] = deque(maxlen=LEAST_TIMES_KEPT)

    def next(self, *, awaits: bool) -> tuple[int, float]:
        """Tokens of the next step, and for how long the plan behind it is held. awaits: others may come at any time."""
        measures = self._number % MEASURED_EVERY < 2
        self._number += 1
        if awaits and not measures and self._least_seconds:
            self._asked = 0
            # The wait is no longer than the last one says: steps may have become shorter, and a long wait costs
            # everybody.
            least_seconds = min(median(self._least_seconds), self._least_seconds[-1])
            return LEAST_TOKENS, min(HELD_SHARE * least_seconds, HELD_SECONDS_MAX)
        self._asked = LEAST_TOKENS if measures else int(self._tokens)
        return self._asked, 0.0

    def planned(self, tokens: int, now: float) -> None:
        """A step is planned with this number of prompt tokens."""
        seconds, (before, last) = now - self._planned_at, self._last_two
        if before == last == LEAST_TOKENS:
            self._least_seconds.append(seconds)
        elif min(before, last) > LEAST_TOKENS and self._least_seconds:
            short = seconds < STEP_TIMES * median(self._least_seconds)
            self._tokens = min(self._tokens * CHANGE, self._most) if short else self._tokens / CHANGE
            self._tokens = max(self._tokens, LEAST_TOKENS + 1.0)
        self._last_two = last, self._asked if tokens >= 0.75 * self._asked else 0
        self._asked, self._planned_at = 0, now


class StepShares:
    """The prompt tokens that an engine has computed for its parties. step_tokens: the most that the engine computes in
    one step."""

    def __init__(self, step_tokens: int) -> None:
        self._step_tokens = step_tokens
        self._flood_steps = _FloodSteps(step_tokens)
        self._tenants: _Attained[bytes] = _Attained()
        self._parties: _Attained[Party] = _Attained()
        self._steps_without = 0  # a flood, in a row
        self._steps_without_decodes = 0  # of a flood, in a row
        self._others: frozenset[Party] = frozenset()  # whose prompts the last step of others was to compute
        self._had_room = True  # and it computed some
        self._passed_over: set[Party] = set()  # their steps computed nothing, and none since has

    def came(self, party: Party, now: float) -> None:
        """A request of the party has arrived."""
        self._add(party, 0, now)

    def alone(self, now: float) -> bool:
        """Whether no more than one party was there lately."""
        self._tenants.forget(now - LATELY_SECONDS)
        self._parties.forget(now - LATELY_SECONDS)
        return len(self._parties) < 2

    def next_step(self, waiting: Collection[Party], now: float, present: Collection[Party] = ()) -> Step | None:
        """The party whose prompts the next step computes.

        Args:
            waiting: Those with a prompt to compute.
            present: Those with another request, one that decodes, say.

        Returns:
            None: any party's, as the engine makes it.
        """
        step = self._next_step(waiting, present, now)
        self._steps_without_decodes = self._steps_without_decodes + 1 if step is not None and step.pauses else 0
        return step

    def _next_step(self, waiting: Collection[Party], present: Collection[Party], now: float) -> Step | None:
        able = set(waiting) - self._passed_over
        here = {*waiting, *present}
        floods = {party for party in here if self.floods(party, now)} if able else set()
        if not floods:
            self._passed_over.clear()
            return None
        others, flooding = able - floods, able & floods
        if others and self._steps_without < STEPS_WITHOUT_FLOOD_MAX:
            self._steps_without += 1
            self._others = frozenset(others)
            pauses = self._had_room and self._steps_without_decodes < STEPS_WITHOUT_DECODES_MAX
            return Step(self._others, None, pauses=frozenset(floods.intersection(present if pauses else ())))
        self._steps_without = 0
        if others or not flooding:
            return None
        least = min(flooding, key=lambda each: (self._tenants.of(each.tenant, now), self._parties.of(each, now)))
        if not able.issuperset(waiting):
            return Step(frozenset({least}), None, begins=False)
        awaits = any(each not in here and not self.floods(each, now) for each in self._parties)
        tokens, held_seconds = self._flood_steps.next(awaits=awaits)
        return Step(frozenset({least}), tokens, held_seconds=held_seconds)

    def computed_alone(self, tokens: int, now: float) -> None:
        """A step has computed this number of tokens while at most one party had requests lately. Tokens of its answers
        may be among them, because telling them apart would cost every engine time in each step."""
        self._flood_steps.planned(tokens, now)
        for party in list(self._parties):
            self._add(party, tokens, now)

    def computed(self, tokens: Mapping[Party, int], now: float) -> None:
        """A step has computed these numbers of prompt tokens, by party."""
        self._flood_steps.planned(sum(tokens.values()), now)
        for party, count in tokens.items():
            if count:
                self._add(party, count, now)
                self._passed_over.clear()
                self._had_room |= party in self._others

    def passed_over(self, parties: Iterable[Party]) -> None:
        """Note that a step of these parties has computed nothing of them, because blocks are short or prefixes are
        looked up, for example. They get no step until another party has computed something, or until no party can."""
        self._passed_over.update(parties)
        self._had_room &= self._others.isdisjoint(self._passed_over)

    def _add(self, party: Party, tokens: int, now: float) -> None:
        self._tenants.add(party.tenant, tokens, now)
        self._parties.add(party, tokens, now)

    def floods(self, party: Party, now: float) -> bool:
        """Whether the party, or its tenant, floods the engine."""
        tenant = party.tenant
        return self._is_more(self._tenants, tenant, (each for each in self._tenants if each != tenant), now) or (
            self._is_more(
                self._parties, party, (each for each in self._parties if each.tenant == tenant and each != party), now
            )
        )

    def _is_more(self, attained: _Attained[_Key], key: _Key, others: Iterable[_Key], now: float) -> bool:
        found = attained.of(key, now)
        if found <= FLOOD_STEPS * self._step_tokens:
            return False  # most of the time, without a look at the others
        tokens = [attained.of(other, now) for other in others]
        return found > FLOOD_TIMES * min(tokens, default=math.inf) and found >= max(tokens, default=0.0) / FLOOD_TIMES
