"""Cached tokens that the gateway expects, tier by tier, beside those that real engines then report. Counts, no times.

    python bench/prediction.py [--tiers nvme redis] [--requests 240] [--documents 16] [--parallel 2]
                              [--vllm 0.32] [--restarts engine gateway]

Two engines and the gateway for each tier. Clients ask questions about a few documents, in random order: each prompt is
one document and a question that no other prompt has. The devices hold a fraction of the documents and the CPU tiers
another, so prefixes are found in all three tiers, on either engine. Behind the first third of the questions one engine
is killed and starts again: what it had stored is still in the shared tier. Behind the second third the gateway is
killed and starts again: it has what the engines replay of their events.

Expected: spillway_gateway_predicted_cached_tokens_total, by tier. Reported: usage.prompt_tokens_details.cached_tokens
of each answer, all tiers together. The engines' own counters divide that sum: vllm:external_prefix_cache_hits_total is
what came from below the device, and spillway_tier_read_bytes_total what the shared tier gave of it. They belong to an
engine, not to an answer: a chunk that one request had loaded and another used counts once as shared. What an ended
process had counted is kept.

The run fails where the sums of expected and reported tokens differ by more than --tolerance. Prints a table, writes
build/bench/prediction.json (flat; units are in the keys).
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from bench_report import BenchError, run, write_report
from first_token import free_port
from metrics_page import reading, total

from spillway_stack.engine_environments import VLLM_HERE, VLLM_VERSIONS, environment_problems
from spillway_stack.local_stack import LocalStack
from spillway_stack.settings import StackSettings

BLOCK_TOKENS = 128
DOCUMENT_BLOCKS = 3
QUESTION_TOKENS = (10, 60)
ANSWER_TOKENS = 1
DEVICE_BLOCKS = 14
CPU_BLOCKS = 20
TIERS = ("nvme", "redis")
RESTARTS = ("engine", "gateway")
HELD_IN = ("device", "cpu", "shared")
REQUEST_SECONDS = 600.0
SETTLED_SECONDS = 60.0
# The question is what is cached, not whether a slow machine's load would beat computing.
OVERRIDES = ("offload.prefillTokensPerSecond=1", "offload.sharedTier.lookupTimeoutSeconds=5")
OUTPUT = Path("build/bench/prediction.json")


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens of one prompt: those the gateway expected to be cached, and those the engine reported."""

    expected: int
    reported: int


@dataclass(slots=True)
class Totals:
    """Tokens of the questions."""

    expected: dict[str, float]
    reported: float
    below_device: float
    from_shared: float


@dataclass(slots=True)
class Counters:
    """Counters of processes that may be restarted: those of ended processes are kept."""

    stack: LocalStack
    tier: str
    ended: dict[str, float] = field(default_factory=dict)

    def now(self) -> dict[str, float]:
        found = added(self.ended, gateway_counters(self.stack.gateway_url))
        for engine in self.stack.engines:
            found = added(found, engine_counters(engine.url, self.tier))
        return found

    def restart_engine(self, index: int) -> None:
        """kill -9; returns when the gateway follows its successor."""
        self.ended = added(self.ended, engine_counters(self.stack.engines[index].url, self.tier))
        before = self.stack.kill_engine(index)
        self.stack.wait_engine_ready(index, not_process=before)
        wait_followed(self.stack)

    def restart_gateway(self) -> None:
        """kill -9; returns when its successor follows both engines."""
        self.ended = added(self.ended, gateway_counters(self.stack.gateway_url))
        self.stack.kill_gateway()
        wait_followed(self.stack)


def added(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in one | other}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Cached tokens: expected and reported.")
    parser.add_argument("--tiers", nargs="+", choices=TIERS, default=TIERS)
    parser.add_argument("--requests", type=int, default=240, help="questions per tier (default 240)")
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--parallel", type=int, default=2, help="questions under way together (default 2)")
    parser.add_argument("--tolerance", type=float, default=0.02, help="of the reported tokens (default 0.02)")
    parser.add_argument(
        "--vllm", choices=VLLM_VERSIONS, default=VLLM_HERE, help=f"of the engines (default {VLLM_HERE})"
    )
    parser.add_argument("--restarts", nargs="*", choices=RESTARTS, default=RESTARTS, help="default: both")
    given = parser.parse_args(arguments)
    if problems := environment_problems([given.vllm]):
        raise BenchError("\n".join(problems))
    report: dict[str, float | int | str] = {"vllm": given.vllm, "restarts": " ".join(given.restarts) or "none"}
    differences = []
    for tier in given.tiers:
        answers, totals = measure(tier, given)
        difference = add_to(report, tier, answers, totals)
        differences.append(difference)
        print(render(report, tier), flush=True)
    write_report(report, OUTPUT)
    if max(differences) > given.tolerance:
        raise BenchError(
            f"expected and reported tokens differ by {max(differences):.1%}, {given.tolerance:.1%} allowed"
        )
    return 0


def measure(tier: str, given: argparse.Namespace) -> tuple[list[Answer], Totals]:
    """One stack. Raises BenchError if an answer has no usage, or a tier was never used."""
    requests, documents = given.requests, given.documents
    chance = random.Random(f"{tier} {requests} {documents}")
    texts = [make_tokens(chance, DOCUMENT_BLOCKS * BLOCK_TOKENS) for _ in range(documents)]
    prompts = [chance.choice(texts) + make_tokens(chance, chance.randint(*QUESTION_TOKENS)) for _ in range(requests)]
    print(f"{tier}: starting two engines", flush=True)
    with tempfile.TemporaryDirectory(prefix="spillway-bench-") as folder:
        settings = StackSettings(
            port=free_port(),
            shared_tier=tier,
            num_cpu_blocks=CPU_BLOCKS,
            device_blocks=DEVICE_BLOCKS,
            max_length=(DOCUMENT_BLOCKS + 4) * BLOCK_TOKENS,
            vllm=(given.vllm,),
            engine_overrides=OVERRIDES,
        )
        with LocalStack(settings, folder) as stack, ThreadPoolExecutor(given.parallel) as pool:
            print(f"{tier}: asking", flush=True)
            counters = Counters(stack, tier)
            begun = counters.now()

            def ask_one(prompt: list[int]) -> Answer:
                return ask(stack.gateway_url, stack.model.served_name, prompt)

            first, second = requests // 3, requests * 2 // 3
            answers = list(pool.map(ask_one, prompts[:first]))
            if "engine" in given.restarts:
                settle(stack, tier)
                counters.restart_engine(0)
            answers += pool.map(ask_one, prompts[first:second])
            if "gateway" in given.restarts:
                settle(stack, tier)
                counters.restart_gateway()
            answers += pool.map(ask_one, prompts[second:])
            settle(stack, tier)
            ended = counters.now()
    counted = {name: value - begun.get(name, 0.0) for name, value in ended.items()}
    reported = float(sum(answer.reported for answer in answers))
    if not reported:
        raise BenchError("no engine reported a cached token")
    if abs(reported - counted["actual"]) > 0.5:
        raise BenchError("the gateway's sum of reported tokens is not that of the answers")
    expected = {held_in: counted[held_in] for held_in in HELD_IN}
    return answers, Totals(expected, reported, counted["below_device"], counted["from_shared"])


def make_tokens(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(1_000, 40_000) for _ in range(count)]


def ask(url: str, model: str, prompt: list[int]) -> Answer:
    body = {"model": model, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as reply:
        expected = int(reply.headers["x-spillway-prefix-tokens"])
        details = json.load(reply)["usage"]["prompt_tokens_details"]
    return Answer(expected, details["cached_tokens"] if details is not None else 0)  # vLLM leaves out a 0


def gateway_counters(url: str) -> dict[str, float]:
    """Expected tokens by tier, and `actual`."""
    page = reading(url)
    predicted = "spillway_gateway_predicted_cached_tokens_total"
    expected = {held_in: total(page, predicted, tier=held_in) for held_in in HELD_IN}
    return expected | {"actual": total(page, "spillway_gateway_actual_cached_tokens_total")}


def engine_counters(url: str, tier: str) -> dict[str, float]:
    """below_device, from_shared: tokens. A token's size follows from the engine's copies to the device."""
    page = reading(url)
    below = total(page, "vllm:external_prefix_cache_hits_total")
    loaded = total(page, "spillway_device_copy_bytes_total", direction="load")
    read = total(page, "spillway_tier_read_bytes_total", tier=tier)
    return {"below_device": below, "from_shared": read * below / loaded if loaded else 0.0}


def settle(stack: LocalStack, tier: str) -> None:
    """Wait until no engine has a store under way. Stores end without a step, so each is given one."""
    until = time.monotonic() + SETTLED_SECONDS
    for engine in stack.engines:
        while total(reading(engine.url), "spillway_tier_queue_bytes", tier=tier):
            if time.monotonic() > until:
                raise BenchError(f"{engine.name} still has stores under way after {SETTLED_SECONDS:g} s")
            ask_engine(engine.url, stack.model.served_name)
            time.sleep(0.2)


def ask_engine(url: str, model: str) -> None:
    """A step of the engine, without a block to cache."""
    host = url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=REQUEST_SECONDS)
    body = json.dumps({"model": model, "prompt": [1, 2, 3], "max_tokens": 1})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    connection.getresponse().read()
    connection.close()


def wait_followed(stack: LocalStack) -> None:
    """Wait until the gateway routes to both engines and follows their events."""
    until = time.monotonic() + SETTLED_SECONDS
    names = ("spillway_gateway_engine_up", "spillway_gateway_events_connected")
    while time.monotonic() < until:
        try:
            page = reading(stack.gateway_url)
        except OSError:
            page = {}  # it is starting
        if all(total(page, name) == len(stack.engines) for name in names):
            return
        time.sleep(0.2)
    raise BenchError("the gateway does not follow both engines")


def add_to(report: dict[str, float | int | str], tier: str, answers: list[Answer], totals: Totals) -> float:
    """Add one tier's figures; returns the difference of the sums as a share of the reported tokens."""
    expected = sum(totals.expected.values())
    reported = {
        "device": totals.reported - totals.below_device,
        "cpu": totals.below_device - totals.from_shared,
        "shared": totals.from_shared,
    }
    if not all(totals.expected.values()):
        raise BenchError(f"{tier}: a tier was never expected to hold anything: {totals.expected}")
    report[f"{tier}_requests"] = len(answers)
    for held_in in HELD_IN:
        report[f"{tier}_expected_{held_in}_tokens"] = round(totals.expected[held_in])
        report[f"{tier}_engine_{held_in}_tokens"] = round(reported[held_in])
    report[f"{tier}_expected_tokens"] = round(expected)
    report[f"{tier}_reported_tokens"] = round(totals.reported)
    report[f"{tier}_requests_as_expected"] = sum(answer.expected == answer.reported for answer in answers)
    report[f"{tier}_too_high_tokens"] = sum(max(0, answer.expected - answer.reported) for answer in answers)
    report[f"{tier}_too_low_tokens"] = sum(max(0, answer.reported - answer.expected) for answer in answers)
    return abs(expected - totals.reported) / totals.reported


def render(report: dict[str, float | int | str], tier: str) -> str:
    lines = [f"{tier}, {report[f'{tier}_requests']} requests{'expected':>16}{'engines':>12}"]
    for held_in in HELD_IN:
        figures = [report[f"{tier}_{side}_{held_in}_tokens"] for side in ("expected", "engine")]
        lines.append(f"  {held_in:24}{figures[0]:>12,}{figures[1]:>12,}")
    expected, reported = int(report[f"{tier}_expected_tokens"]), int(report[f"{tier}_reported_tokens"])
    lines.append(f"  {'all':24}{expected:>12,}{reported:>12,}  difference {(expected - reported) / reported:+.2%}")
    lines.append(
        f"  {report[f'{tier}_requests_as_expected']} requests exactly as expected; tokens expected in vain "
        f"{report[f'{tier}_too_high_tokens']:,}, found unexpectedly {report[f'{tier}_too_low_tokens']:,}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    run(main)
