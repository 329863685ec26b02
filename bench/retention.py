"""Hit ratio of one full tier on agents' sessions, by order of eviction and by what clients say of their sessions.

    python bench/retention.py [--traces steady ...] [--policies lru ...] [--sessions 120] [--seed 0]

Agents share 20,000 tokens; each has 10,000 of its own and 2,048 more a turn, 30 turns. The tier holds half the working
set: the most tokens that unfinished sessions have at one time, the common ones counted once. An answer takes 8 seconds,
whatever is hit, so every policy sees the same requests at the same times. Time is virtual, tokens are not computed.

    steady      one agent starts every 10 seconds; pauses are exponential around 30 seconds
    at_once     all agents start within two minutes; pauses the same
    regular     as steady, but every pause is 30 seconds
    one_shot    as steady, and as many tokens again of requests with a session name that never comes back

Hit ratio: tokens in the leading run of a prompt's chunks that are in the tier, over tokens asked for.

    loop_R              as many agents all the time, each with pauses of 27 to 33 seconds, and R times as many tokens
                        as the tier holds
    brief_R             16 agents whose sessions have 12 turns, answers of 2.5 seconds and pauses of about 1 second, and
                        which begin another session then; R as above

    bimodal             as steady, but 70 % of the pauses are about 10 seconds and 30 % about 300
    two_kinds           as steady, but one half of the agents pauses 10 seconds, the other 120; exponential
    one_name            as steady, but each four agents name the same session
    zipf_named          400 prompts of 2,048 tokens, four requests a second, by Zipf's law with exponent 1; each prompt
                        names its own session
    zipf_flat           the same with an exponent of 0.6
    zipf_moving         as zipf_named, but which prompts are frequent changes all the time
    zipf_scan           as zipf_named, but half of the requests have a prompt and a session of their own, asked once

The tier holds a sixth of the working set of bimodal, a third of two_kinds and zipf_flat, an eighth of the others by
Zipf.

    lru, arc            the CPU tier's rows without sessions; ARC is vLLM's
    fifo                first in, first out
    slab                S3-FIFO behind the slab tier's admission: when full, chunks that were requested twice
    retained_*, slab_*  the CPU tier's rows, the slab tier's order and admission, with sessions:
      recognised        requests say nothing; their prompts tell which conversation they go on with
      names             requests name their session, and nothing else
      ends              and mark the last one
      mean              and announce the mean pause
      half              and announce the pause, wrong by up to half of it
      announced         and announce the pause
    limit               Belady's order: what is used again last leaves first, ends and pauses known

Prints a table and writes build/bench/retention.json (flat; ratios are 0 to 1).
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import sys
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from bench_report import write_report
from retention_loads import CHUNK_TOKENS, PAUSE_SECONDS, Request, live_to_tier, loads, working_set_chunks
from vllm.v1.kv_offload.base import OffloadKey

from spillway_connector.engine.cpu_tier.tier import CpuTier
from spillway_connector.engine.requests.tenancy import TenantContext
from spillway_connector.plan.conversations import Conversations
from spillway_connector.plan.request_frequency import FrequencySketch
from spillway_connector.plan.sessions import SessionFollower, SessionHint, SessionUse, session_tag
from spillway_connector.testing.generation import make_cpu_tier
from spillway_connector.testing.memory import unnamed_region
from spillway_connector.tiers.disk.slab.layout import SESSION_COLUMNS, SizeClassShape
from spillway_connector.tiers.disk.slab.policy import (
    FREQUENCY_MAX,
    LIVE,
    MAIN,
    SMALL,
    QueueArrays,
    S3Fifo,
    ghost_of,
    recently_evicted,
)
from spillway_connector.tiers.disk.slab.session_order import EntryArrays, SessionArrays, SessionOrder
from spillway_connector.tiers.frame import PAGE_BYTES
from spillway_connector.tiers.tier import NO_TENANT

ROW_BYTES = 4096  # of the mapping behind the rows, which is never written
STEP_CHUNKS = 16  # stored at a time, as a prefill of 2,048 tokens a step does
OUTPUT = Path("build/bench/retention.json")


class Cache(ABC):
    """A tier under one policy. begin and end: of each request, in order of time."""

    def __init__(self, chunks_max: int) -> None:
        self.chunks_max = chunks_max

    @abstractmethod
    def begin(self, request: Request) -> int:
        """The chunks hit; then the prompt's others are stored."""

    @abstractmethod
    def end(self, request: Request) -> None:
        """The answer's chunks are stored."""


class Rows(Cache):
    """The CPU tier of this vLLM, driven as the scheduler drives it. hint: what a request says; None: no session."""

    def __init__(self, chunks_max: int, tier: CpuTier, hint: Callable[[Request], SessionHint | None]) -> None:
        super().__init__(chunks_max)
        self._tier = tier
        self._hint = hint
        self._contexts: dict[Request, TenantContext] = {}
        self.now = 0.0
        if hasattr(tier, "_clock"):
            tier._clock = lambda: self.now

    def begin(self, request: Request) -> int:
        self.now = request.start_seconds
        name = f"{request.session}@{request.start_seconds}"
        context = self._contexts[request] = TenantContext(name, session=self._hint(request))
        tier, keys = self._tier, request.chunks(request.prompt_tokens)
        tier.on_new_request(context)
        hit = next((at for at, key in enumerate(keys) if key not in tier.ready), len(keys))
        tier.touch(keys, context)
        if hit:
            tier.prepare_load(keys[:hit], context)
            tier.complete_load(keys[:hit], context)
        self._store(keys[hit:], context)
        return hit

    def end(self, request: Request) -> None:
        self.now = request.end_seconds
        context = self._contexts.pop(request)
        keys = request.chunks(request.total_tokens)
        self._store(keys[request.prompt_tokens // CHUNK_TOKENS :], context)
        self._tier.on_request_finished(context)

    def _store(self, keys: Sequence[OffloadKey], context: TenantContext) -> None:
        for first in range(0, len(keys), STEP_CHUNKS):
            stored = self._tier.prepare_store(keys[first : first + STEP_CHUNKS], context)
            if stored is not None:
                self._tier.complete_store(stored.keys_to_store, context)


class Fifo(Cache):
    def __init__(self, chunks_max: int) -> None:
        super().__init__(chunks_max)
        self._chunks: OrderedDict[OffloadKey, None] = OrderedDict()

    def begin(self, request: Request) -> int:
        keys = request.chunks(request.prompt_tokens)
        hit = next((at for at, key in enumerate(keys) if key not in self._chunks), len(keys))
        self._store(keys[hit:])
        return hit

    def end(self, request: Request) -> None:
        self._store(request.chunks(request.total_tokens)[request.prompt_tokens // CHUNK_TOKENS :])

    def _store(self, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            if key not in self._chunks:
                self._chunks[key] = None
                if len(self._chunks) > self.chunks_max:
                    self._chunks.popitem(last=False)


class Slab(Cache):
    """The slab tier's own policies over arrays, without its files. Loads count as hits, as in the tier; so does each
    request's first mention of a chunk in the admission. hint: what a request says; None: no session."""

    def __init__(self, chunks_max: int, hint: Callable[[Request], SessionHint | None]) -> None:
        super().__init__(chunks_max)
        self._hint = hint
        self._arrays = QueueArrays.zeros(chunks_max)
        self._policy = S3Fifo(self._arrays, self._put)
        self._generation = np.zeros(chunks_max, np.uint32)
        shape = SizeClassShape(2 * PAGE_BYTES, chunks_max, 1)
        rows = {column.name: np.zeros(shape.rows(column), column.dtype) for column in SESSION_COLUMNS}
        self._session_arrays = SessionArrays(**rows)
        entries = EntryArrays(self._arrays.state, np.zeros(chunks_max, np.uint64), self._generation, self._arrays.order)
        self._sessions = SessionOrder(self._session_arrays, entries, self._put_session)
        self._follower = SessionFollower()
        self._now = 0.0
        self._slots: dict[OffloadKey, int] = {}
        self._keys: list[OffloadKey] = []  # by slot
        self._ghosts = np.zeros(2 * chunks_max, np.uint64)
        self._evictions = 1
        self._frequency = FrequencySketch()

    def _put_session(self, name: str, at: int, value: int) -> None:
        getattr(self._session_arrays, name)[at] = value

    def _put(self, name: str, at: int, value: int) -> None:
        getattr(self._arrays, name)[at] = value

    def begin(self, request: Request) -> int:
        keys = request.chunks(request.prompt_tokens)
        hit = next((at for at, key in enumerate(keys) if key not in self._slots), len(keys))
        frequency = self._arrays.frequency
        for key in keys[:hit]:
            slot = self._slots[key]
            frequency[slot] = min(int(frequency[slot]) + 1, FREQUENCY_MAX)
        self._frequency.note(keys)
        self._now = request.start_seconds
        hint = self._hint(request)
        if hint is not None:
            self._follower.begin_request(NO_TENANT, hint, self._now)
            self._use(hint, keys)
        self._store(keys[hit:], hint)
        return hit

    def end(self, request: Request) -> None:
        self._now = request.end_seconds
        hint = self._hint(request)
        keys = request.chunks(request.total_tokens)
        answer = keys[request.prompt_tokens // CHUNK_TOKENS :]
        self._frequency.note(answer)
        self._store(answer, hint)
        if hint is not None:
            self._use(hint, keys)
            self._take_in(self._follower.end_request(NO_TENANT, hint, self._now))

    def _use(self, hint: SessionHint, keys: Sequence[OffloadKey]) -> None:
        self._take_in(self._follower.use(NO_TENANT, hint, keys, self._now))

    def _take_in(self, use: SessionUse) -> None:
        """Record the use in the sessions' table, in whole seconds as the tier does."""
        now_s = int(self._now)
        row = self._sessions.use(
            0,
            int.from_bytes(use.session, "little"),
            ended=use.ended,
            due_s=None if use.due_seconds is None else now_s + round(use.due_seconds),
            late_s=None if use.late_seconds is None else now_s + round(use.late_seconds),
            now_s=now_s,
        )
        slots = np.array([self._slots.get(key, -1) for key in use.keys], np.int64)
        places = np.flatnonzero(slots >= 0)
        self._sessions.own(row, slots[places], places)

    def _store(self, keys: Sequence[OffloadKey], hint: SessionHint | None) -> None:
        full = len(self._keys) == self.chunks_max
        expected = hint is not None and self._follower.is_expected(NO_TENANT, hint)
        row = None if hint is None else self._sessions.find(0, int.from_bytes(session_tag(hint), "little"))
        for key, times in zip(keys, self._frequency.estimate(keys).tolist(), strict=True):
            rare = full and times < 2
            if key in self._slots or (rare and not expected):
                continue
            if len(self._keys) < self.chunks_max:
                slot: int | None = len(self._keys)
                self._keys.append(key)
            else:
                slot = self._victim(row, rare)
                if slot is None:
                    continue
                self._evict(slot)
                self._keys[slot] = key
            assert slot is not None
            fingerprint = hash(key) & (1 << 64) - 1
            known = recently_evicted(self._ghosts, fingerprint, self._evictions, self.chunks_max)
            self._arrays.state[slot] = LIVE
            self._generation[slot] += 1
            self._policy.enter(slot, MAIN if known else SMALL)
            self._slots[key] = slot
            if row is not None:
                self._sessions.claimed(row, slot)

    def _victim(self, row: int | None, rare: bool) -> int | None:
        """Choose the slot to evict, as SlotClaims does."""
        now_s = int(self._now)
        if rare:
            assert row is not None
            return self._sessions.own_room(row, now_s)
        ended = self._sessions.ended_entry(now_s)
        if ended is not None:
            return ended
        victim = self._policy.victim(self.chunks_max)
        assert victim is not None
        leaving = self._sessions.in_place_of(victim, now_s, row)
        if leaving != victim:
            self._policy.spare(victim)
        return leaving

    def _evict(self, slot: int) -> None:
        self._policy.remove(slot)
        gone = hash(self._keys[slot]) & (1 << 64) - 1
        self._ghosts[gone % len(self._ghosts)] = ghost_of(gone, self._evictions)
        self._evictions += 1
        del self._slots[self._keys[slot]]


class Limit(Cache):
    """Belady's order: of all sessions the one that is used again last gives up its end, the present one included. The
    common tokens stay."""

    def __init__(self, chunks_max: int) -> None:
        super().__init__(chunks_max)
        self._held: dict[str, int] = {}  # by session: its own chunks, from the first on
        self._next: dict[str, float] = {}
        self._common = 0

    def begin(self, request: Request) -> int:
        common, asked = request.common_tokens // CHUNK_TOKENS, request.prompt_tokens // CHUNK_TOKENS
        seen = self._common >= common
        hit = common + min(self._held.get(request.session, 0), asked - common) if seen else 0
        self._keep(request, asked)
        return hit

    def end(self, request: Request) -> None:
        self._keep(request, request.total_tokens // CHUNK_TOKENS)

    def _keep(self, request: Request, chunks: int) -> None:
        self._common = max(self._common, request.common_tokens // CHUNK_TOKENS)
        self._held[request.session] = chunks - request.common_tokens // CHUNK_TOKENS
        pause = request.pause_seconds
        self._next[request.session] = math.inf if pause is None else request.end_seconds + pause
        excess = sum(self._held.values()) + self._common - self.chunks_max
        while excess > 0:
            last = max(self._held, key=self._next.__getitem__)
            given = min(excess, self._held[last])
            self._held[last] -= given
            excess -= given
            if not self._held[last]:
                del self._held[last]


class Recognised:
    """Sessions that the engine recognises in requests that name none."""

    def __init__(self) -> None:
        self._conversations = Conversations()
        self._hints: dict[Request, SessionHint | None] = {}

    def __call__(self, request: Request) -> SessionHint | None:
        if request not in self._hints:
            self._hints[request] = self._conversations.session_of(request.chunks(request.prompt_tokens))
        return self._hints[request]


def _names(request: Request) -> SessionHint:
    return SessionHint(request.name.encode())


def _ends(request: Request) -> SessionHint:
    return SessionHint(request.name.encode(), request.pause_seconds is None)


def _announced(request: Request) -> SessionHint:
    return _ends(request)._replace(return_seconds=request.pause_seconds)


def _mean(request: Request) -> SessionHint:
    return _ends(request)._replace(return_seconds=None if request.pause_seconds is None else PAUSE_SECONDS)


def _half(request: Request) -> SessionHint:
    if request.pause_seconds is None:
        return _ends(request)
    wrong = random.Random(f"{request.session}{request.start_seconds}").uniform(0.5, 1.5)
    return _ends(request)._replace(return_seconds=request.pause_seconds * wrong)


Hint = Callable[[Request], SessionHint | None]
HINTS: dict[str, Callable[[], Hint]] = {
    "lru": lambda: lambda request: None,
    "retained_recognised": Recognised,
    "retained_names": lambda: _names,
    "retained_ends": lambda: _ends,
    "retained_mean": lambda: _mean,
    "retained_half": lambda: _half,
    "retained_announced": lambda: _announced,
}
SLAB_HINTS = {"slab": HINTS["lru"]} | {
    name.replace("retained", "slab"): make for name, make in HINTS.items() if name != "lru"
}
MODELS: dict[str, type[Cache]] = {"fifo": Fifo, "limit": Limit}  # type: ignore[type-abstract]
POLICIES = ("fifo", "arc", *HINTS, *SLAB_HINTS, "limit")


@contextmanager
def opened(policy: str, chunks_max: int) -> Iterator[Cache]:
    if policy in MODELS:
        yield MODELS[policy](chunks_max)
        return
    if policy in SLAB_HINTS:
        yield Slab(chunks_max, SLAB_HINTS[policy]())
        return
    region = unnamed_region(chunks_max, ROW_BYTES)
    tier = make_cpu_tier(chunks_max, region, "arc" if policy == "arc" else "lru", enable_events=False)
    try:
        yield Rows(chunks_max, tier, HINTS.get(policy, HINTS["lru"])())
    finally:
        tier.shutdown()


def hit_ratio(cache: Cache, requests: Sequence[Request]) -> float:
    """The hit ratio of all requests. Answers end in the order of time among the starts."""
    running: list[tuple[float, int]] = []
    hit_tokens = 0
    for number, request in enumerate(requests):
        while running and running[0][0] <= request.start_seconds:
            cache.end(requests[heapq.heappop(running)[1]])
        hit_tokens += min(cache.begin(request) * CHUNK_TOKENS, request.prompt_tokens - 1)
        heapq.heappush(running, (request.end_seconds, number))
    return hit_tokens / sum(request.prompt_tokens for request in requests)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=120)
    parser.add_argument("--traces", nargs="+", choices=list(loads(1, 0)))
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args(arguments)
    figures: dict[str, float] = {"sessions": options.sessions, "seed": options.seed}
    made = loads(options.sessions, options.seed)
    chosen = options.traces or list(made)
    print(f"hit ratio, %\n{'':>20}" + "".join(f"{name:>10}" for name in chosen), flush=True)
    requests = {name: made[name]() for name in chosen}
    for policy in options.policies:
        cells = ""
        for name in chosen:
            chunks_max = int(working_set_chunks(requests[name]) / live_to_tier(name))
            with opened(policy, chunks_max) as cache:
                ratio = hit_ratio(cache, requests[name])
            figures[f"{name}_tier_tokens"] = chunks_max * CHUNK_TOKENS
            figures[f"{name}_{policy}_hit_ratio"] = round(ratio, 4)
            cells += f"{100 * ratio:>10.1f}"
        print(f"{policy:>20}{cells}", flush=True)
    write_report(figures, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
