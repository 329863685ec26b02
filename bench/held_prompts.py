"""Benefit of retention to those who ask for it, and its cost to others, in one full CPU tier. Simulated.

    python bench/held_prompts.py [--sessions 40] [--seed 0]

The agents of bench/retention.py (trace `steady`) ask for nothing. Beside them eight users come back every 500 seconds,
with 10,000 tokens of their own behind the common ones and 2,048 more each time, and ask to retain their prompts for an
hour. Printed for each share of the tier that their tenant may hold: the hit ratio of the users' later turns, and of the
agents. Time is virtual, the CPU tier is the connector's own, tokens are not computed.
"""

from __future__ import annotations

import argparse
import heapq
import sys
from collections.abc import Sequence

from retention import ROW_BYTES, Rows
from retention_loads import CHUNK_TOKENS, Request, live_to_tier, loads, working_set_chunks

from spillway_connector.testing.generation import make_cpu_tier
from spillway_connector.testing.memory import unnamed_region

USERS, TURNS, PAUSE_SECONDS = 8, 3, 500.0
COMMON_TOKENS, OWN_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 20_000, 10_000, 2_048, 512
HELD_SECONDS = 3600.0
SHARES = (0.0, 0.05, 0.1, 0.25, 0.5)
TENANT = b"users"


def users() -> list[Request]:
    made: list[Request] = []
    for user in range(USERS):
        prompt = COMMON_TOKENS + OWN_TOKENS
        for turn in range(TURNS):
            start = 60.0 + 15.0 * user + turn * PAUSE_SECONDS
            pause = None if turn == TURNS - 1 else PAUSE_SECONDS
            made.append(Request(f"user-{user}", start, prompt, prompt + ANSWER_TOKENS, COMMON_TOKENS, pause))
            prompt += ANSWER_TOKENS + TURN_TOKENS
    return made


def measured(requests: Sequence[Request], chunks_max: int, share: float) -> tuple[float, float]:
    """The hit ratio of the users' later turns, and of the agents."""
    region = unnamed_region(chunks_max, ROW_BYTES)
    tier = make_cpu_tier(chunks_max, region, "lru", enable_events=False)
    rows = Rows(chunks_max, tier, lambda request: None)
    hit, asked = [0, 0], [0, 0]
    running: list[tuple[float, int]] = []
    try:
        for number, request in enumerate(requests):
            while running and running[0][0] <= request.start_seconds:
                rows.end(requests[heapq.heappop(running)[1]])
            found = min(rows.begin(request) * CHUNK_TOKENS, request.prompt_tokens - 1)
            is_agent = not request.session.startswith("user-")
            if is_agent or request.start_seconds >= PAUSE_SECONDS:
                hit[is_agent] += found
                asked[is_agent] += request.prompt_tokens
            if not is_agent:
                tier.hold(TENANT, share, HELD_SECONDS, request.chunks(request.prompt_tokens))
            heapq.heappush(running, (request.end_seconds, number))
    finally:
        tier.shutdown()
    return hit[0] / asked[0], hit[1] / asked[1]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    agents = loads(options.sessions, options.seed)["steady"]()
    requests = sorted([*agents, *users()], key=lambda request: request.start_seconds)
    chunks_max = int(working_set_chunks(agents) / live_to_tier("steady"))
    held = (COMMON_TOKENS + USERS * (OWN_TOKENS + (TURNS - 1) * (TURN_TOKENS + ANSWER_TOKENS))) // CHUNK_TOKENS
    print(f"{chunks_max} chunks; the users' prompts have {held} at the end, {held / chunks_max:.2f} of them")
    for share in SHARES:
        of_users, of_agents = measured(requests, chunks_max, share)
        print(f"share {share:4.2f}: users {100 * of_users:5.1f} %, agents {100 * of_agents:5.1f} %", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
