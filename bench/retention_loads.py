"""The requests of bench/retention.py: who asks for which prompt and when, whatever a tier finds."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from blake3 import blake3
from traces.session import Segment, Session, Trace, Turn
from traces.synthetic import agents

CHUNK_TOKENS = 128
ANSWER_SECONDS = 8.0
PAUSE_SECONDS = 30.0
BRIEF_ANSWER_SECONDS = 2.5
BRIEF_RATIOS = (1.0, 1.5, 2.0)
LOOP_RATIOS = (0.8, 1.0, 1.25, 1.5, 2.0, 3.0)
PROMPT_TOKENS = 2_048  # of each of the prompts that are asked by chance, answered in a second
PROMPTS = 400
PROMPTS_PER_SECOND = 4.0
LIVE_TO_TIER = {
    "zipf_named": 8.0,
    "zipf_flat": 3.0,
    "zipf_moving": 8.0,
    "zipf_scan": 8.0,
    "bimodal": 6.0,
    "two_kinds": 3.0,
}

_made_keys: dict[str, list[bytes]] = {}


def _keys(name: str, count: int) -> list[bytes]:
    """The keys of a prefix, which are as long as vLLM's and made once."""
    made = _made_keys.setdefault(name, [])
    made += [blake3(f"{name}/{chunk}".encode()).digest() for chunk in range(len(made), count)]
    return made[:count]


@dataclass(frozen=True, slots=True)
class Request:
    """pause_seconds: from the end of its answer to the session's next request; None: it is the last. named: the session
    that the request names; None: the one that it belongs to."""

    session: str
    start_seconds: float
    prompt_tokens: int
    total_tokens: int
    common_tokens: int
    pause_seconds: float | None
    answer_seconds: float = ANSWER_SECONDS
    named: str | None = None

    @property
    def name(self) -> str:
        return self.named or self.session

    @property
    def end_seconds(self) -> float:
        return self.start_seconds + self.answer_seconds

    def chunks(self, tokens: int) -> list[bytes]:
        common = self.common_tokens // CHUNK_TOKENS
        chunks = tokens // CHUNK_TOKENS
        return _keys("common", min(common, chunks)) + _keys(self.session, chunks)[common:]


def requests_of(trace: Trace) -> list[Request]:
    """Requests of the trace in the order of their starts."""
    answer_seconds = BRIEF_ANSWER_SECONDS if trace.name == "brief" else ANSWER_SECONDS
    made: list[Request] = []
    for session in trace.sessions:
        at, context = session.start_seconds, 0
        common = session.turns[0].added[0].tokens if session.turns[0].added[0].seed.startswith("common") else 0
        for turn, following in zip(session.turns, [*session.turns[1:], None], strict=True):
            context += sum(segment.tokens for segment in turn.added)
            pause = None if following is None else following.pause_seconds
            total = context + turn.answer.tokens
            made.append(Request(session.name, at, context, total, common, pause, answer_seconds))
            context = total
            at += answer_seconds + (pause or 0.0)
    return sorted(made, key=lambda request: request.start_seconds)


def working_set_chunks(requests: Sequence[Request]) -> int:
    """The most that sessions have at one time, each from its first request to the end of its last."""
    moves: list[tuple[float, int]] = []
    before: dict[str, int] = {}
    for request in requests:
        own = (request.total_tokens - request.common_tokens) // CHUNK_TOKENS
        moves.append((request.start_seconds, own - before.get(request.session, 0)))
        before[request.session] = own
        if request.pause_seconds is None:
            moves.append((request.end_seconds, -own))
    most = now = 0
    for _, move in sorted(moves):
        now += move
        most = max(most, now)
    return most + max(request.common_tokens for request in requests) // CHUNK_TOKENS


def one_shot_sessions(seed: int, count: int, per_second: float, tokens: int) -> tuple[Session, ...]:
    rng = random.Random(seed)
    at, made = 0.0, []
    for number in range(count):
        at += rng.expovariate(per_second)
        turn = Turn((Segment(f"once-{seed}-{number}", tokens),), Segment(f"once-answer-{seed}-{number}", 256))
        made.append(Session(f"once-{seed}-{number}", at, (turn,)))
    return tuple(made)


def loads(sessions: int, seed: int) -> dict[str, Callable[[], list[Request]]]:
    """Return the requests of each trace."""
    by_chance: dict[str, Callable[[], list[Request]]] = {
        "zipf_named": lambda: zipf_prompts(seed, 1.0),
        "zipf_flat": lambda: zipf_prompts(seed, 0.6),
        "zipf_moving": lambda: zipf_prompts(seed, 1.0, moving=True),
        "zipf_scan": lambda: zipf_prompts(seed, 1.0, once=0.5),
        "one_name": lambda: one_name(requests_of(traces(sessions, seed)["steady"]())),
    }
    return {
        name: lambda make=make: requests_of(make())  # type: ignore[misc]
        for name, make in traces(sessions, seed).items()
    } | by_chance


def one_name(requests: list[Request], conversations: int = 4) -> list[Request]:
    """Let several conversations have one name, as programs that share a key do."""
    numbers: dict[str, int] = {}
    named = [f"key-{numbers.setdefault(request.session, len(numbers)) // conversations}" for request in requests]
    return [replace(request, named=name) for request, name in zip(requests, named, strict=True)]


def zipf_prompts(
    seed: int,
    exponent: float,
    *,
    prompts: int = PROMPTS,
    asked: int = 6_000,
    tokens: int = PROMPT_TOKENS,
    moving: bool = False,
    once: float = 0.0,
) -> list[Request]:
    """Prompts that are asked by chance, some more often than others, each with its own name.

    Args:
        moving: Which prompts are asked often changes all the time.
        once: The share of other prompts, which are asked once.
    """
    rng = random.Random(3 + seed)
    weights = list(accumulate((1 + rank) ** -exponent for rank in range(prompts)))
    at, made, last = 0.0, list[Request](), dict[str, int]()
    for number in range(asked):
        at += rng.expovariate(PROMPTS_PER_SECOND)
        prompt = rng.choices(range(prompts), cum_weights=weights)[0]
        if moving:
            prompt = (prompt + number * prompts // asked) % prompts
        name = f"once-{seed}-{number}" if rng.random() < once else f"zipf-{seed}-{prompt}"
        if (before := last.get(name)) is not None:
            made[before] = replace(made[before], pause_seconds=at - made[before].end_seconds)
        last[name] = number
        made.append(Request(name, at, tokens, tokens, 0, None, 1.0))
    return made


def traces(sessions: int, seed: int) -> dict[str, Callable[[], Trace]]:
    def steady() -> Trace:
        return agents(seed=6 + seed, sessions=sessions, sessions_per_second=0.1, pause_seconds=PAUSE_SECONDS)

    def regular() -> Trace:
        return replace(
            steady(),
            name="regular",
            sessions=tuple(
                replace(session, turns=tuple(replace(turn, pause_seconds=PAUSE_SECONDS) for turn in session.turns))
                for session in steady().sessions
            ),
        )

    def one_shot() -> Trace:
        trace = steady()
        added = sum(sum(s.tokens for s in turn.added) for one in trace.sessions for turn in one.turns)
        once = one_shot_sessions(seed, added // 32_000, added / 32_000 / (sessions * 10.0), 32_000)
        return replace(trace, name="one_shot", sessions=trace.sessions + once)

    def loop() -> Trace:
        return closed_loop(seed, agents_count=sessions // 4)

    return {
        "steady": steady,
        "at_once": lambda: agents(seed=6 + seed, name="at_once", sessions=sessions, sessions_per_second=sessions / 120),
        "regular": regular,
        "one_shot": one_shot,
        "bimodal": lambda: two_pauses(steady(), seed),
        "two_kinds": lambda: two_kinds(steady(), seed),
        **{f"loop_{ratio:g}": loop for ratio in LOOP_RATIOS},
        **{f"brief_{ratio:g}": lambda: brief_sessions(seed) for ratio in BRIEF_RATIOS},
    }


def two_pauses(trace: Trace, seed: int, brief: float = 10.0, long: float = 300.0, longs: float = 0.3) -> Trace:
    """Let each pause be brief or long, by chance."""
    rng = random.Random(5 + seed)

    def pause() -> float:
        return (long if rng.random() < longs else brief) * rng.uniform(0.8, 1.2)

    sessions = (
        replace(session, turns=tuple(replace(turn, pause_seconds=pause()) for turn in session.turns))
        for session in trace.sessions
    )
    return replace(trace, name="bimodal", sessions=tuple(sessions))


def two_kinds(trace: Trace, seed: int) -> Trace:
    """Let one half of the agents ask again soon, the other half late; both by chance."""
    rng = random.Random(7 + seed)
    sessions = []
    for number, session in enumerate(trace.sessions):
        mean = 10.0 if number % 2 else 120.0
        turns = tuple(replace(turn, pause_seconds=rng.expovariate(1 / mean)) for turn in session.turns)
        sessions.append(replace(session, turns=turns))
    return replace(trace, name="two_kinds", sessions=tuple(sessions))


def brief_sessions(seed: int, agents_count: int = 16, sessions: int = 5, turns: int = 12) -> Trace:
    """Agents whose sessions follow each other without a pause to speak of, and end without a word."""
    rng = random.Random(1 + seed)
    common = Segment(f"common-brief-{seed}", 4_096)
    made = []
    for agent in range(agents_count):
        at = rng.uniform(0.0, 8.0)
        for number in range(sessions):
            name, start, steps = f"brief-{seed}-{agent}-{number}", at, []
            for turn in range(turns if number else rng.randrange(turns // 3, turns + 1)):
                said = Segment(f"{name}-{turn}", 1_024 if turn else 7_168)
                pause = min(4.0, rng.expovariate(1.0)) if turn else 0.0
                steps.append(Turn((said,) if turn else (common, said), Segment(f"{name}-answer-{turn}", 64), pause))
                at += BRIEF_ANSWER_SECONDS + pause
            at += min(4.0, rng.expovariate(1.0))
            made.append(Session(name, start, tuple(steps)))
    return Trace("brief", f"{agents_count} agents, {sessions} sessions each, {turns} turns", tuple(made))


def closed_loop(seed: int, agents_count: int, turns: int = 30) -> Trace:
    """Agents of which each asks again about 30 seconds after its answer, from the first second to the last."""
    rng = random.Random(9 + seed)
    common = Segment(f"common-loop-{seed}", 4_096)
    made = []
    for number in range(agents_count):
        name = f"loop-{seed}-{number}"
        steps = []
        for at in range(turns):
            said = Segment(f"{name}-{at}", 6_144 if at == 0 else 128)
            pause = PAUSE_SECONDS * rng.uniform(0.9, 1.1) if at else 0.0
            steps.append(Turn((common, said) if at == 0 else (said,), Segment(f"{name}-answer-{at}", 128), pause))
        made.append(Session(name, rng.uniform(0.0, ANSWER_SECONDS + PAUSE_SECONDS), tuple(steps)))
    return Trace("loop", f"{agents_count} agents in a closed loop, {turns} turns", tuple(made))


def live_to_tier(trace: str) -> float:
    """The most tokens that unfinished sessions have, to those that the tier holds."""
    if trace in LIVE_TO_TIER:
        return LIVE_TO_TIER[trace]
    kind, _, ratio = trace.partition("_")
    return float(ratio) if kind in {"loop", "brief"} else 2.0
