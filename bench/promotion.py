"""First tokens of requests that queued in an engine, with their prefix promoted meanwhile and without; and what
promotions cost that are of no use.

    python bench/promotion.py [--runs 12] [--tokens 4096] [--rounds 8] [--parts turn waste] [--arms ahead at_turn]

turn: one engine computes prompts, another one, which runs one request at a time, is asked for them while it works on
something else for longer than the load takes. Measured is the time from the end of that work to the first token, with
the prefix in the shared tier (NVMe) and, in the other half of a pair, in the CPU tier; once with
`promotionAheadFraction` as it is by default, and once with 0, where the load begins at the request's turn. A few
prompts are asked again and again, as the caches are emptied before each, and each pair begins with the other tier.

waste: three clients keep that engine busy, and its queue never empty, while requests join the queue and are given up
before their turn. Half of a round's prompts are in the shared tier, so each is promoted without use; the other half are
prompts that no engine has seen. The price is the ratio of the tokens that the three clients got in both halves.

Prints tables, writes build/bench/promotion.json (flat; units are in the keys).
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench_report import BenchError, run, write_report
from first_token import (
    ALWAYS_LOAD,
    BLOCK_TOKENS,
    REQUEST_SECONDS,
    TAIL_TOKENS,
    free_port,
    make_prompt,
    processor,
    stored_counter,
    wait_stored,
)
from metrics_page import reading
from paired_rounds import paired_ratio

from spillway_stack.local_stack import LocalStack
from spillway_stack.settings import StackSettings

DEVELOPMENT_MODE = 'extraEnv.VLLM_SERVER_DEV_MODE="1"'  # for resets of the caches
WORK_TOKENS = 96  # of the answer that the engine works on while the measured request queues
QUEUED_SECONDS_LEAST = 0.5  # longer than a load
CLIENTS, CLIENT_TOKENS = 3, 32
ROUND_SECONDS, GUESSES_PER_ROUND, GUESS_SECONDS, GUESS_TOKENS = 10.0, 16, 0.4, 2048
AHEAD = "spillway_promoted_ahead_blocks_total"
OUTPUT = Path("build/bench/promotion.json")
PARTS = ("turn", "waste")
ARMS = {"ahead": None, "at_turn": 0.0}  # promotionAheadFraction; None: by default
PROMPTS = 3  # that are asked again and again


@dataclass
class Streamed:
    """One completion: when it was asked for, when its tokens came, when it ended (perf_counter seconds)."""

    begun: float
    arrivals: list[float]
    ended: float = 0.0
    cached_tokens: int = 0


class Engine:
    """One engine of the stack, asked directly."""

    def __init__(self, url: str, model: str) -> None:
        self.port = int(url.rsplit(":", 1)[1])
        self._model = model

    def stream(self, prompt: Sequence[int], tokens: int, given_up_after: float | None = None) -> Streamed:
        """One streamed greedy completion. given_up_after: seconds, then the client disconnects."""
        body = {"model": self._model, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        wait = REQUEST_SECONDS if given_up_after is None else given_up_after
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=wait)
        found = Streamed(time.perf_counter(), [])
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise BenchError(f"the engine answered {response.status}: {response.read(500)!r}")
            for line in response:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if event.get("choices"):
                        found.arrivals.append(time.perf_counter())
                    details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
                    found.cached_tokens = details.get("cached_tokens") or found.cached_tokens
        except TimeoutError:
            if given_up_after is None:
                raise
        finally:
            connection.close()
        found.ended = time.perf_counter()
        return found

    def counters(self, name: str, label: str) -> dict[str, float]:
        page = reading(f"http://127.0.0.1:{self.port}")
        return {dict(labels).get(label, ""): value for (found, labels), value in page.items() if found == name}

    def running(self) -> float:
        return sum(self.counters("vllm:num_requests_running", "").values())

    def reset(self, *, cpu_tier: bool) -> None:
        """Empty the device's prefix cache, and the CPU tier too if asked."""
        self.stream([7, 7, 7], 1)
        url = f"http://127.0.0.1:{self.port}/reset_prefix_cache?reset_external={str(cpu_tier).lower()}"
        with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=60):
            pass


@dataclass(frozen=True, slots=True)
class Pair:
    """The two engines of one stack: the first computes, the second is measured."""

    first: Engine
    second: Engine
    stack: LocalStack


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Promotion while a request queues.")
    parser.add_argument("--runs", type=int, default=12, help="pairs per figure (default 12)")
    parser.add_argument("--tokens", type=int, default=4096, help="prompt length (default 4096)")
    parser.add_argument("--rounds", type=int, default=8, help="of useless promotions (default 8)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="of turn")
    given = parser.parse_args(arguments)
    report: dict[str, float | int | str] = {"processor": processor()}
    if "turn" in given.parts:
        report |= {"prompt_tokens": given.tokens, "runs_per_figure": given.runs}
        for name in given.arms:
            with engines(given.tokens, PROMPTS, ARMS[name]) as pair:
                report |= turns(name, pair, given.tokens, given.runs)
    if "waste" in given.parts:
        with engines(GUESS_TOKENS, GUESSES_PER_ROUND, None) as pair:
            report |= wastes(pair, given.rounds)
    print(render(report))
    whole = set(given.parts) == set(PARTS) and set(given.arms) == set(ARMS)
    known = json.loads(OUTPUT.read_text()) if OUTPUT.exists() and not whole else {}
    write_report(known | report, OUTPUT)
    return 0


@contextmanager
def engines(tokens: int, prompts: int, fraction: float | None) -> Iterator[Pair]:
    """Two engines on one NVMe tier. The CPU tier holds every prompt four times, the device two of them."""
    blocks = tokens // BLOCK_TOKENS + 1
    overrides = (*ALWAYS_LOAD, DEVELOPMENT_MODE)
    if fraction is not None:
        overrides += (f"offload.promotionAheadFraction={fraction}",)
    settings = StackSettings(
        port=free_port(),
        num_cpu_blocks=4 * blocks * 2 + blocks * prompts,
        device_blocks=2 * blocks + 8,
        max_length=(blocks + 4) * BLOCK_TOKENS,
        gateway=False,
        engine_args=("--max-num-seqs", "1"),
        engine_overrides=overrides,
    )
    print(f"starting two engines, promotionAheadFraction {'by default' if fraction is None else fraction}", flush=True)
    with tempfile.TemporaryDirectory(prefix="spillway-bench-") as name, LocalStack(settings, Path(name)) as stack:
        model = stack.model.served_name
        first, second = (Engine(engine.url, model) for engine in stack.engines)
        yield Pair(first, second, stack)


def store(pair: Pair, prompts: Sequence[list[int]]) -> None:
    """Have the first engine compute the prompts, until all their blocks are in the shared tier."""
    for prompt in prompts:
        pair.first.stream(prompt, 1)
    wait_stored(stored_counter("nvme", pair.stack), sum(len(prompt) // BLOCK_TOKENS for prompt in prompts))


def turns(name: str, pair: Pair, tokens: int, runs: int) -> dict[str, float | int | str]:
    """Measure the seconds from the end of the work before a request to its first token, by the tier that held its
    prefix when it came."""
    prompts = [make_prompt(f"{name} {number}", tokens + TAIL_TOKENS) for number in range(PROMPTS)]
    store(pair, prompts)
    second = pair.second
    seconds: dict[str, list[float]] = {"shared": [], "cpu": []}
    for number in range(runs + 1):  # the first pair is a warm-up
        prompt = prompts[number % PROMPTS]
        for tier in sorted(seconds, reverse=number % 2 == 0):
            second.reset(cpu_tier=True)
            if tier == "cpu":
                second.stream(prompt, 1)
                second.reset(cpu_tier=False)
            if (answer := queued(second, prompt)).cached_tokens != tokens:
                raise BenchError(f"{name}, {tier}: {answer.cached_tokens} of {tokens} tokens were cached")
            seconds[tier].append(answer.arrivals[0] - answer.begun)
    report: dict[str, float | int | str] = {}
    for tier, measured in seconds.items():
        print(f"  {name}, {tier}: {', '.join(f'{value:.3f}' for value in measured[1:])} s", flush=True)
        report[f"{name}_{tier}_seconds"] = round(statistics.median(measured[1:]), 4)
    ratio = paired_ratio(seconds["shared"][1:], seconds["cpu"][1:], random.Random(0))
    report |= ratio.figures(f"{name}_ratio", 3)
    for outcome, count in second.counters(AHEAD, "outcome").items():
        report[f"{name}_{outcome}_blocks"] = int(count)
    return report


def queued(engine: Engine, prompt: Sequence[int]) -> Streamed:
    """The completion of a prompt that waited for another request; `begun` is when that one ended."""
    work: list[Streamed] = []
    worker = threading.Thread(target=lambda: work.append(engine.stream([random.randrange(1000, 9000)], WORK_TOKENS)))
    worker.start()
    while not engine.running():
        time.sleep(0.01)
    answer = engine.stream(prompt, 1)
    worker.join()
    if work[0].ended - answer.begun < QUEUED_SECONDS_LEAST:
        raise BenchError(f"the request queued for {work[0].ended - answer.begun:.2f} s only")
    answer.begun = work[0].arrivals[-1]
    return answer


def wastes(pair: Pair, rounds: int) -> dict[str, float | int | str]:
    """Tokens per second of busy clients while every promotion is in vain, against as many requests without one."""
    known = [make_prompt(f"guess {number}", GUESS_TOKENS + TAIL_TOKENS) for number in range(GUESSES_PER_ROUND)]
    store(pair, known)
    second = pair.second
    rates: dict[str, list[float]] = {"wrong": [], "none": []}
    for number in range(rounds + 1):  # the first is a warm-up
        for arm in sorted(rates, reverse=bool(number % 2)):
            second.reset(cpu_tier=True)
            unknown = [make_prompt(f"unknown {number} {each}", len(known[0])) for each in range(len(known))]
            rates[arm].append(busy(second, known if arm == "wrong" else unknown))
        print("  " + ", ".join(f"{arm} {values[-1]:.1f}" for arm, values in rates.items()) + " tokens/s", flush=True)
    ratio = paired_ratio(rates["wrong"][1:], rates["none"][1:], random.Random(0))
    report: dict[str, float | int | str] = {
        "rounds": rounds,
        "wrong_guesses_tokens_per_second": round(statistics.median(rates["wrong"][1:]), 1),
        "no_guesses_tokens_per_second": round(statistics.median(rates["none"][1:]), 1),
        **ratio.figures("wrong_guesses_ratio"),
    }
    for outcome, count in second.counters(AHEAD, "outcome").items():
        report[f"wrong_guesses_{outcome}_blocks"] = int(count)
    if report.get("wrong_guesses_used_blocks"):
        raise BenchError("a request that was to be given up had its turn")
    return report


def busy(engine: Engine, guesses: Sequence[list[int]]) -> float:
    """Tokens per second of CLIENTS clients during ROUND_SECONDS, while requests join the queue and are given up."""
    until = time.perf_counter() + ROUND_SECONDS
    arrivals: list[float] = []

    def serve(client: int) -> None:
        chance = random.Random(client)
        while time.perf_counter() < until:
            arrivals.extend(engine.stream([chance.randrange(1000, 9000) for _ in range(8)], CLIENT_TOKENS).arrivals)

    clients = [threading.Thread(target=serve, args=(number,)) for number in range(CLIENTS)]
    begun = time.perf_counter()
    for client in clients:
        client.start()
    for number, guess in enumerate(guesses):
        time.sleep(max(0.0, begun + (number + 0.5) * ROUND_SECONDS / len(guesses) - time.perf_counter()))
        engine.stream(guess, 1, given_up_after=GUESS_SECONDS)
    for client in clients:
        client.join()
    return sum(arrival < until for arrival in arrivals) / ROUND_SECONDS


def render(report: dict[str, float | int | str]) -> str:
    lines = [str(report["processor"])]
    if any(f"{name}_ratio" in report for name in ARMS):
        lines += ["", f"{'to the first token, from its turn on':38}{'shared tier':>12}{'CPU tier':>10}{'ratio':>7}"]
        for name, title in (("ahead", "promoted while it queued"), ("at_turn", "promoted at its turn")):
            if f"{name}_ratio" not in report:
                continue
            times = f"{report[f'{name}_shared_seconds']:>10} s{report[f'{name}_cpu_seconds']:>8} s"
            low, high = report[f"{name}_ratio_low"], report[f"{name}_ratio_high"]
            lines.append(f"  {title:36}{times}{report[f'{name}_ratio']:>7} ({low} to {high})")
    if "wrong_guesses_ratio" in report:
        low, high = report["wrong_guesses_ratio_low"], report["wrong_guesses_ratio_high"]
        lines += ["", "tokens per second while requests give up before their turn"]
        lines.append(f"  nothing known of their prompts        {report['no_guesses_tokens_per_second']}")
        lines.append(f"  each prompt in the shared tier        {report['wrong_guesses_tokens_per_second']}")
        lines.append(f"  ratio                                 {report['wrong_guesses_ratio']} ({low} to {high})")
        lines.append(f"  blocks promoted in vain               {report.get('wrong_guesses_unused_blocks', 0)}")
    return "\n".join(lines)


if __name__ == "__main__":
    run(main)
