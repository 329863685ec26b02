"""What the gateway expects to be cached, tier by tier, beside what real engines then report. Counts, no times.

    python bench/prediction.py [--tiers nvme redis] [--requests 240] [--documents 16] [--parallel 2]
                              [--no-restart]

Two engines and the gateway for each tier. Clients ask questions about a few documents, in random order: each prompt is
one document and a question that no other prompt has. The devices hold a fraction of the documents and the CPU tiers
another, so prefixes are found in all three tiers, on either engine. Before the last third of the questions one engine
is killed and started again: what it had stored is still in the shared tier.

Expected: spillway_gateway_predicted_cached_tokens_total, by tier. Reported: usage.prompt_tokens_details.cached_tokens
of each answer, all tiers together. The engines' own counters divide that sum: vllm:external_prefix_cache_hits_total is
what came from below the device, and spillway_tier_read_bytes_total what the shared tier gave of it. They belong to an
engine, not to an answer: a chunk that one request had loaded and another used counts once as shared.

The run fails where the sums of expected and reported tokens differ by more than --tolerance. Prints a table, writes
build/bench/prediction.json (flat; units are in the keys).
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from spillway_stack.local_stack import LocalStack
from spillway_stack.ports import is_free
from spillway_stack.settings import StackSettings

BLOCK_TOKENS = 128
DOCUMENT_BLOCKS = 3
QUESTION_TOKENS = (10, 60)
ANSWER_TOKENS = 1
DEVICE_BLOCKS = 14
CPU_BLOCKS = 20
TIERS = ("nvme", "redis")
HELD_IN = ("device", "cpu", "shared")
REQUEST_SECONDS = 600.0
SETTLED_SECONDS = 60.0
# The question is what is cached, not whether a slow machine's load would beat computing.
OVERRIDES = ("offload.prefillTokensPerSecond=1", "offload.sharedTier.lookupTimeoutSeconds=5")
OUTPUT = Path("build/bench/prediction.json")


class BenchError(Exception):
    """The run does not show what it should."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens of one prompt: those the gateway expected to be cached, and those the engine reported."""

    expected: int
    reported: int


@dataclass(slots=True)
class Totals:
    """Tokens since the stack's start; engines' counters survive a restart, as each engine's last page is kept."""

    expected: dict[str, float]
    reported: float
    below_device: float
    from_shared: float


@dataclass(slots=True)
class Counters:
    """The counters of engines that may be restarted: those of ended processes are kept."""

    ended: dict[str, float] = field(default_factory=dict)

    def of_engines(self, stack: LocalStack, tier: str) -> dict[str, float]:
        now = dict(self.ended)
        for engine in stack.engines:
            for name, value in engine_counters(engine.url, tier).items():
                now[name] = now.get(name, 0.0) + value
        return now

    def keep(self, url: str, tier: str) -> None:
        """This engine's process is about to end."""
        for name, value in engine_counters(url, tier).items():
            self.ended[name] = self.ended.get(name, 0.0) + value


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Cached tokens: expected and reported.")
    parser.add_argument("--tiers", nargs="+", choices=TIERS, default=TIERS)
    parser.add_argument("--requests", type=int, default=240, help="questions per tier (default 240)")
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--parallel", type=int, default=2, help="questions under way together (default 2)")
    parser.add_argument("--tolerance", type=float, default=0.02, help="of the reported tokens (default 0.02)")
    parser.add_argument("--no-restart", action="store_true", help="both engines live through the run")
    given = parser.parse_args(arguments)
    report: dict[str, float | int | str] = {}
    differences = []
    for tier in given.tiers:
        answers, totals = measure(tier, given.requests, given.documents, given.parallel, restart=not given.no_restart)
        difference = add_to(report, tier, answers, totals)
        differences.append(difference)
        print(render(report, tier), flush=True)
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\nwritten to {OUTPUT}")
    if max(differences) > given.tolerance:
        raise BenchError(
            f"expected and reported tokens differ by {max(differences):.1%}, {given.tolerance:.1%} allowed"
        )
    return 0


def measure(tier: str, requests: int, documents: int, parallel: int, *, restart: bool) -> tuple[list[Answer], Totals]:
    """One stack. Raises BenchError where an answer has no usage, or a tier was never used."""
    chance = random.Random(f"{tier} {requests} {documents}")
    texts = [make_tokens(chance, DOCUMENT_BLOCKS * BLOCK_TOKENS) for _ in range(documents)]
    prompts = [chance.choice(texts) + make_tokens(chance, chance.randint(*QUESTION_TOKENS)) for _ in range(requests)]
    print(f"{tier}: starting two engines", flush=True)
    counters = Counters()
    with tempfile.TemporaryDirectory(prefix="spillway-bench-") as folder:
        settings = StackSettings(
            port=free_port(),
            shared_tier=tier,
            num_cpu_blocks=CPU_BLOCKS,
            device_blocks=DEVICE_BLOCKS,
            max_length=(DOCUMENT_BLOCKS + 4) * BLOCK_TOKENS,
            engine_overrides=OVERRIDES,
        )
        with LocalStack(settings, folder) as stack, ThreadPoolExecutor(parallel) as pool:
            print(f"{tier}: asking", flush=True)
            begin = reading(stack.gateway_url)
            begun = counters.of_engines(stack, tier)

            def ask_one(prompt: list[int]) -> Answer:
                return ask(stack.gateway_url, stack.model.served_name, prompt)

            split = requests * 2 // 3
            answers = list(pool.map(ask_one, prompts[:split]))
            if restart:
                settle(stack, tier)
                counters.keep(stack.engines[0].url, tier)
                stack.restart_engine(0)
                wait_followed(stack)
            answers += pool.map(ask_one, prompts[split:])
            settle(stack, tier)
            end = reading(stack.gateway_url)
            ended = counters.of_engines(stack, tier)
    expected = {
        held_in: total(end, "spillway_gateway_predicted_cached_tokens_total", tier=held_in)
        - total(begin, "spillway_gateway_predicted_cached_tokens_total", tier=held_in)
        for held_in in HELD_IN
    }
    reported = float(sum(answer.reported for answer in answers))
    if not reported:
        raise BenchError("no engine reported a cached token")
    if abs(reported - total(end, "spillway_gateway_actual_cached_tokens_total")) > 0.5:
        raise BenchError("the gateway's sum of reported tokens is not that of the answers")
    return answers, Totals(
        expected, reported, ended["below_device"] - begun["below_device"], ended["from_shared"] - begun["from_shared"]
    )


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


Page = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def reading(url: str) -> Page:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as reply:
        text = reply.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(page: Page, name: str, **labels: str) -> float:
    return sum(value for (found, has), value in page.items() if found == name and labels.items() <= dict(has).items())


def engine_counters(url: str, tier: str) -> dict[str, float]:
    """below_device, from_shared: tokens. A token's size follows from the engine's copies to the device."""
    page = reading(url)
    below = total(page, "vllm:external_prefix_cache_hits_total")
    loaded = total(page, "spillway_device_copy_bytes_total", direction="load")
    read = total(page, "spillway_tier_read_bytes_total", tier=tier)
    return {"below_device": below, "from_shared": read * below / loaded if loaded else 0.0}


def settle(stack: LocalStack, tier: str) -> None:
    """Until no engine has a store under way. Stores end without a step, so each is given one."""
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
    """Until the gateway routes to both engines and follows their events."""
    until = time.monotonic() + SETTLED_SECONDS
    names = ("spillway_gateway_engine_up", "spillway_gateway_events_connected")
    while any(total(reading(stack.gateway_url), name) < len(stack.engines) for name in names):
        if time.monotonic() > until:
            raise BenchError("the gateway does not follow both engines")
        time.sleep(0.2)


def free_port() -> int:
    for port in range(12_000, 30_000, 10):
        if all(is_free(port + distance) for distance in (0, 100, 101, 200, 201, 300, 301, 400)):
            return port
    raise BenchError("no free family of ports between 12000 and 30400")


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
    try:
        sys.exit(main())
    except BenchError as error:
        print(f"prediction: {error}", file=sys.stderr)
        sys.exit(1)
