"""Synthetic traces: multi-turn chat, shared system prompts, and prompts that share nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator

from traces.session import Segment, Session, Trace, Turn


def _poisson(rng: random.Random, per_second: float) -> Iterator[float]:
    at = 0.0
    while True:
        at += rng.expovariate(per_second)
        yield at


def _around(rng: random.Random, mean: int) -> int:
    """Half to one and a half of the mean, so that lengths of requests differ in their last block."""
    return rng.randint(max(1, mean // 2), mean + mean // 2)


def multi_turn(
    *,
    seed: int = 1,
    sessions: int = 600,
    sessions_per_second: float = 6.0,
    system_prompts: int = 8,
    system_tokens: int = 1_000,
    opening_tokens: int = 5_000,
    turn_tokens: int = 400,
    answer_tokens: int = 250,
    turns_mean: int = 5,
    pause_seconds: float = 8.0,
) -> Trace:
    """Chats that open with a private long document behind one of a few system prompts."""
    rng = random.Random(seed)
    starts = _poisson(rng, sessions_per_second)
    made = []
    for number in range(sessions):
        name = f"chat-{seed}-{number}"
        system = Segment(f"system-{seed}-{rng.randrange(system_prompts)}", system_tokens)
        turns = []
        for at in range(_around(rng, turns_mean)):
            said = Segment(f"{name}-{at}", _around(rng, opening_tokens if at == 0 else turn_tokens))
            turns.append(
                Turn(
                    (system, said) if at == 0 else (said,),
                    Segment(f"{name}-answer-{at}", _around(rng, answer_tokens)),
                    rng.expovariate(1 / pause_seconds) if at else 0.0,
                )
            )
        made.append(Session(name, next(starts), tuple(turns)))
    about = f"{sessions} chats, {sessions_per_second:g}/s, about {turns_mean} turns on {opening_tokens} private tokens"
    return Trace("multi_turn", about, tuple(made))


def agents(
    *,
    seed: int = 6,
    name: str = "agents",
    sessions: int = 272,
    sessions_per_second: float = 2.0,
    common_tokens: int = 20_000,
    opening_tokens: int = 10_000,
    turn_tokens: int = 2_048,
    answer_tokens: int = 256,
    turns: int = 30,
    pause_seconds: float = 30.0,
) -> Trace:
    """Agents behind one long common prompt; each turn adds what a tool returned. turn_tokens: the answer included."""
    rng = random.Random(seed)
    starts = _poisson(rng, sessions_per_second)
    common = Segment(f"common-{seed}", common_tokens)
    made = []
    for number in range(sessions):
        agent = f"agent-{seed}-{number}"
        steps = [
            Turn(
                (common, Segment(f"{agent}-0", opening_tokens))
                if at == 0
                else (Segment(f"{agent}-{at}", turn_tokens - answer_tokens),),
                Segment(f"{agent}-answer-{at}", answer_tokens),
                rng.expovariate(1 / pause_seconds) if at else 0.0,
            )
            for at in range(turns)
        ]
        made.append(Session(agent, next(starts), tuple(steps)))
    about = f"{sessions} agents, {turns} turns of {turn_tokens} on {opening_tokens} tokens, {common_tokens} common"
    return Trace(name, about, tuple(made))


def shared_prompts(
    *,
    seed: int = 2,
    name: str = "many_groups",
    requests: int = 3_600,
    requests_per_second: float = 60.0,
    groups: int = 900,
    group_tokens: int = 6_000,
    question_tokens: int = 1_200,
    answer_tokens: int = 200,
) -> Trace:
    """Groups of requests with one system prompt each; with many groups, more than the devices hold."""
    rng = random.Random(seed)
    starts = _poisson(rng, requests_per_second)
    made = []
    for number in range(requests):
        group = rng.randrange(groups)
        added = (
            Segment(f"group-{seed}-{group}", group_tokens),
            Segment(f"question-{seed}-{number}", _around(rng, question_tokens)),
        )
        answer = Segment(f"answer-{seed}-{number}", _around(rng, answer_tokens))
        made.append(Session(f"{name}-{number}", next(starts), (Turn(added, answer),)))
    about = f"{requests} requests, {requests_per_second:g}/s, {groups} system prompts of {group_tokens} tokens"
    return Trace(name, about, tuple(made))


def hot_group(*, seed: int = 3, requests: int = 3_600, requests_per_second: float = 100.0) -> Trace:
    """One system prompt for all requests, at a rate that no single engine can serve."""
    return shared_prompts(
        seed=seed,
        name="hot_group",
        requests=requests,
        requests_per_second=requests_per_second,
        groups=1,
        question_tokens=600,
    )


def bursts(
    *,
    seed: int = 8,
    count: int = 60,
    per_second: float = 2.0,
    requests: int = 50,
    prefix_tokens: int = 10_240,
    question_tokens: int = 400,
    answer_tokens: int = 64,
) -> Trace:
    """Agents that each send many calls within a tenth of a second, behind a common prefix that is new."""
    rng = random.Random(seed)
    starts = _poisson(rng, per_second)
    made = []
    for number in range(count):
        begin = next(starts)
        prefix = Segment(f"burst-{seed}-{number}", prefix_tokens)
        for call in range(requests):
            name = f"burst-{seed}-{number}-{call}"
            question = Segment(f"{name}-question", _around(rng, question_tokens))
            turn = Turn((prefix, question), Segment(f"{name}-answer", _around(rng, answer_tokens)))
            made.append(Session(name, begin + 0.1 * rng.random(), (turn,)))
    about = f"{count} bursts of {requests} calls behind {prefix_tokens} cold tokens each, {per_second:g} bursts/s"
    return Trace("bursts", about, tuple(made))


def unique_prompts(
    *,
    seed: int = 4,
    requests: int = 2_400,
    requests_per_second: float = 50.0,
    prompt_tokens: int = 4_000,
    answer_tokens: int = 200,
) -> Trace:
    """No prompts share a prefix: prefix routing can only do harm."""
    rng = random.Random(seed)
    starts = _poisson(rng, requests_per_second)
    made = []
    for number in range(requests):
        prompt = Segment(f"unique-{seed}-{number}", _around(rng, prompt_tokens))
        answer = Segment(f"unique-answer-{seed}-{number}", _around(rng, answer_tokens))
        made.append(Session(f"unique-{number}", next(starts), (Turn((prompt,), answer),)))
    about = f"{requests} requests, {requests_per_second:g}/s, about {prompt_tokens} tokens, nothing shared"
    return Trace("unique", about, tuple(made))
