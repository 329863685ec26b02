"""The conversations that a model's engines have, and what the later turns of a new one would wait for on each.

A new conversation finds the same on every engine, so the queue of the moment would decide where all of its turns go.
What waits at the moment says little about its later turns: they wait for the conversations that the engine has. So one
that begins costs, beside its first turn's time,

    later = 2 x turns x running x turn

turns: how many follow the first one, less one, by the share of the model's requests that continue a conversation. If
less than half of them do, the price is 0: most prompts get one answer, and have no later turns. running: how many
requests the engine's conversations have there on average, this one included; each of them the time that a request
takes over the time from one of its turns to the next, times that share, as some have had their last turn. turn: for how
long a request of the model keeps the engine busy. So an engine that computes half as fast gets half of them, one in its
slow start few. Twice, as those that it waits for wait for it as well.

A client may name its session. Else the last block of a prompt names the conversation, as the next turn begins with the
same blocks. A prompt that ends with the same block and is no shorter may be the same one, asked again, or a turn that
filled no block: it is the same conversation and counts as none of its turns. A shorter one begins another.

One that pauses for longer than usual is not counted, as most conversations end without a word. It is known for longer
than it counts: pauses are measured on those that come back while they are known, so a time that followed from the
pauses of others would never learn of longer ones.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection, Mapping
from itertools import count

from spillway_gateway.fleet.engine import Engine
from spillway_gateway.fleet.load_averages import RequestMeans
from spillway_gateway.fleet.sessions import SessionKey
from spillway_gateway.routing.fleet_view import EngineView
from spillway_gateway.routing.prefix import PromptBlocks

# The block that begins the run with a conversation's end marks it, so that a prompt is searched a run at a time.
RUN_BLOCKS = 64
COUNTED_INTERVALS = 3.0  # of its turns; one in 20 exponential pauses is longer
COUNTED_SECONDS_MIN = 1.0
COUNTED_SECONDS_MAX = 300.0
KNOWN_SECONDS = 600.0  # after its last request
PASSED_MAX = 64  # at each request, of which each adds one at most; a hundred thousand may have paused since the last
OWN_INTERVALS = 4.0  # of a conversation, which say as much of it as the mean of all
MEAN_WEIGHT = 1 / 64  # of the latest interval
CONTINUED_WEIGHT = 1 / 32  # of the latest request: if none continues another, the price is gone within a hundred
CONTINUED_MIN = 0.5  # one turn follows on average
CONTINUED_MAX = 0.9  # turns are unbounded at 1, and the share is an estimate


class Conversation:
    """A known conversation."""

    __slots__ = (
        "at",
        "counted_seconds",
        "counts",
        "engine",
        "interval",
        "intervals",
        "key",
        "mark",
        "prompt_tokens",
        "running",
    )

    def __init__(self, engine: str, now: float) -> None:
        self.key: SessionKey | int = 0
        self.mark: int | None = None  # the key of the block that begins the run with its end
        self.prompt_tokens = 0
        self.engine = engine  # that its last request was sent to
        self.at = now  # of that request; monotonic seconds
        self.interval = 0.0  # seconds from one turn to the next, on average
        self.intervals = 0
        self.counts = False  # it has not paused for long
        self.running = 0.0  # requests that it has on its engine, on average; 0 if it does not count
        self.counted_seconds = 0.0  # for which it counts after a request


_Known = OrderedDict[SessionKey | int, Conversation]


class Conversations:
    """The conversations of one model. On the event loop. now: monotonic seconds.

    entries_max: how many are known at most, about 400 bytes each. Beyond it a tenant that has more than an equal share
    loses the one whose last request is longest ago.
    """

    def __init__(self, entries_max: int) -> None:
        self._entries_max = entries_max
        self._tenants: OrderedDict[str, _Known] = OrderedDict()  # both by their last requests
        self._entries = 0
        self._crowded = ""  # the tenant that lost a conversation last because it has more than its share
        self._marks: dict[int, int] = {}  # how many conversations have each
        # A heap, each conversation that counts once, by the time at which it may have stopped counting.
        self._due: list[tuple[float, int, Conversation]] = []
        self._numbers = count()
        self._running: dict[str, float] = {}  # by engine
        self._requests = 0
        self._continued_share = 0.0  # of requests, those that continue a conversation
        self._interval = 0.0  # seconds from one turn to the next, of all conversations
        self._intervals = 0

    def __len__(self) -> int:
        return self._entries

    def of(self, tenant: str, session: SessionKey | None, prompt: PromptBlocks) -> Conversation | None:
        """Return the conversation that a prompt continues."""
        known = self._tenants.get(tenant)
        if known is None:
            return None
        if session is not None:
            return known.get(session)
        marks, keys = self._marks, prompt.keys
        for start in range((len(keys) - 1) // RUN_BLOCKS * RUN_BLOCKS, -1, -RUN_BLOCKS):
            if keys[start] in marks:
                key = next(filter(known.__contains__, reversed(keys[start : start + RUN_BLOCKS])), None)
                if key is not None:
                    found = known[key]
                    begins = key == keys[-1] and prompt.prompt_tokens < found.prompt_tokens
                    return None if begins else found
        return None

    def settles(self, conversation: Conversation | None, engines: Mapping[str, Engine], tried: Collection[str]) -> bool:
        """Whether a request's further turns, if they have a price, will follow it to an engine that has none of them:
        it begins a conversation (None), or the engine that has it cannot take it. engines: by name. tried: those that
        failed for the request."""
        if self._continued_share <= CONTINUED_MIN:
            return False
        engine = engines.get(conversation.engine) if conversation is not None else None
        return engine is None or not engine.routable or engine.name in tried

    def later_ms(self, engine: EngineView, means: RequestMeans) -> float:
        """Return the wait of the later turns of a conversation that begins on the engine: the formula above."""
        share = min(CONTINUED_MAX, max(CONTINUED_MIN, self._continued_share))
        running = self._running.get(engine.name, 0.0) + share * _running(means.seconds, self._interval)
        turn_ms = 1000.0 * means.uncached_tokens / engine.rates.prefill_tokens_per_second
        return 2.0 * (share / (1.0 - share) - 1.0) * running * (turn_ms + engine.rates.running_request_ms)

    def routed(
        self,
        conversation: Conversation | None,
        tenant: str,
        session: SessionKey | None,
        prompt: PromptBlocks,
        engine: str,
        *,
        now: float,
        means: RequestMeans,
        again: bool,
    ) -> None:
        """A request goes to this engine.

        Args:
            conversation: the conversation that it continues; None: it begins one.
            tenant: the request's tenant.
            session: the session that it names.
            prompt: the prompt; without a session and without a block nothing is known of its conversation.
            engine: by name.
            now: monotonic seconds.
            means: the means of the model's requests.
            again: it was sent to another engine before.
        """
        keys = prompt.keys
        if session is None and not keys:
            return
        key: SessionKey | int = keys[-1] if session is None else session
        mark = keys[(len(keys) - 1) // RUN_BLOCKS * RUN_BLOCKS] if session is None else None
        counts = not again and (session is not None or conversation is None or conversation.key != key)
        if counts:
            self._requests += 1
            weight = CONTINUED_WEIGHT if self._requests * CONTINUED_WEIGHT > 1 else 1 / self._requests
            self._continued_share += weight * ((conversation is not None) - self._continued_share)
        tenants = self._tenants
        if conversation is None:
            conversation = Conversation(engine, now)
            known = tenants.setdefault(tenant, OrderedDict())
            self._entries += 1
        else:
            known = tenants[tenant]
            del known[conversation.key]
            if counts:
                self._took_turn(conversation, now - conversation.at)
            if conversation.engine != engine:
                self._count(conversation, -conversation.running)
                conversation.engine = engine
                conversation.running = 0.0
            conversation.at = now
        if mark != conversation.mark:
            self._mark(conversation, mark)
        if key in known:  # it still counts for as long as it would have
            self._mark(known.pop(key), None)
            self._entries -= 1
        conversation.key = key
        conversation.prompt_tokens = prompt.prompt_tokens
        known[key] = conversation
        tenants.move_to_end(tenant)
        if self._entries > self._entries_max:
            share = max(1, self._entries_max // len(tenants))
            if len(tenants.get(self._crowded, ())) <= share:  # else there is no need to look at every tenant again
                over = (name for name in reversed(tenants) if len(tenants[name]) > share)
                self._crowded = next(over, next(iter(tenants)))
            self._forget(self._crowded, next(iter(tenants[self._crowded].values())))
        own, request_seconds = conversation.intervals, means.seconds
        interval = (OWN_INTERVALS * self._interval + own * conversation.interval) / (OWN_INTERVALS + own)
        running = self._continued_share * _running(request_seconds, interval)
        counted_seconds = COUNTED_INTERVALS * (interval if interval > request_seconds else request_seconds)
        conversation.counted_seconds = min(COUNTED_SECONDS_MAX, max(COUNTED_SECONDS_MIN, counted_seconds))
        self._count(conversation, running - conversation.running)
        conversation.running = running
        if not conversation.counts:
            conversation.counts = True
            heapq.heappush(self._due, (now + conversation.counted_seconds, next(self._numbers), conversation))
            if len(self._due) > self._entries_max:  # those that are forgotten wait there for their time
                self._count_no_more(heapq.heappop(self._due)[2])

    def _took_turn(self, conversation: Conversation, seconds: float) -> None:
        seconds = min(COUNTED_SECONDS_MAX, seconds)  # it did not count for longer
        conversation.intervals += 1
        conversation.interval += (seconds - conversation.interval) / conversation.intervals
        self._intervals += 1
        weight = MEAN_WEIGHT if self._intervals * MEAN_WEIGHT > 1 else 1 / self._intervals
        self._interval += weight * (seconds - self._interval)

    def _count(self, conversation: Conversation, running: float) -> None:
        left = self._running.get(conversation.engine, 0.0) + running
        if left > 1e-9:
            self._running[conversation.engine] = left
        else:  # engines come and go under new names
            self._running.pop(conversation.engine, None)

    def _count_no_more(self, conversation: Conversation) -> None:
        self._count(conversation, -conversation.running)
        conversation.running = 0.0
        conversation.counts = False

    def _mark(self, conversation: Conversation, mark: int | None) -> None:
        marks, before = self._marks, conversation.mark
        conversation.mark = mark
        if mark is not None:
            marks[mark] = marks.get(mark, 0) + 1
        if before is not None:
            left = marks[before] - 1
            if left:
                marks[before] = left
            else:
                del marks[before]

    def _forget(self, tenant: str, conversation: Conversation) -> None:
        del self._tenants[tenant][conversation.key]
        if not self._tenants[tenant]:
            del self._tenants[tenant]
        self._entries -= 1
        self._mark(conversation, None)
        self._count(conversation, -conversation.running)
        conversation.running = conversation.counted_seconds = 0.0  # it leaves the heap when it is first

    def pass_on(self, tenant: str, now: float) -> None:
        """Stop counting those that have paused for too long, and forget those that did so long ago: of the tenant that
        asks, and of the one that has not asked for longest."""
        due, tenants = self._due, self._tenants
        passed = 0
        while due and due[0][0] <= now and passed < PASSED_MAX:
            passed += 1
            _, number, conversation = due[0]
            at = conversation.at + conversation.counted_seconds
            if at > now:
                heapq.heapreplace(due, (at, number, conversation))
            else:
                heapq.heappop(due)
                self._count_no_more(conversation)
        if tenants:
            idlest = next(iter(tenants))
            self._forget_oldest(idlest, now)
            if idlest != tenant and tenant in tenants:
                self._forget_oldest(tenant, now)

    def _forget_oldest(self, tenant: str, now: float) -> None:
        known = self._tenants[tenant]
        passed = 0
        while known and passed < PASSED_MAX and (oldest := next(iter(known.values()))).at + KNOWN_SECONDS <= now:
            self._forget(tenant, oldest)
            passed += 1


def _running(request_seconds: float, interval: float) -> float:
    """Requests that a conversation has on its engine on average; 1 if it is not known what a request takes."""
    return request_seconds / interval if 0.0 < request_seconds < interval else 1.0
