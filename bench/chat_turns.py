"""What it brings and costs to keep the KV of answers: a chat's next turn, and the decoding of many requests.

    python bench/chat_turns.py [--measure turns decode] [--configurations off prompts generated nvme]
                               [--conversations 5] [--add] [--seconds 1200]
                               [--turns 8] [--tokens 300]
                               [--rounds 8] [--requests 16] [--answer 256]

Engines at once on this machine, asked in turns: without offload (`off`), with a CPU tier for prompts alone (`prompts`,
offload.generatedTokens: off) and for answers as well (`generated`), and the latter with NVMe behind a CPU tier that
does not hold a conversation and the prompt between its turns (`nvme`).

turns: conversations of --turns turns, each of --tokens new tokens and --tokens of answer; before each turn another
prompt fills the device, so that none of the conversation is in its cache. By turn: the share of its prompt that
was cached, beside that of the whole blocks of the conversation so far (`most`: the KV of the last token of an answer
is not computed before the next turn), and the time to the first token, medians over the conversations. Fewer
conversations are held where the next one would not end within --seconds. --add: to those of the last run, for a machine
that is not quiet for long.

decode: rounds of --requests requests at once with --answer tokens each, of unseen prompts. Tokens per second of a round
are compared within it, so that disturbances of the machine cancel out; ratios to `off` are medians over rounds with a
95 % bootstrap interval.

Prints tables, writes build/bench/chat_turns.json (flat; units are in the keys).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from pathlib import Path

from first_token import BLOCK_TOKENS, BenchError, ask, free_port, make_prompt, processor
from paired_rounds import ordered, paired_ratio

from spillway_stack.local_stack import LocalStack
from spillway_stack.settings import StackSettings

CONFIGURATIONS = ("off", "prompts", "generated", "nvme")
PROMPT_TOKENS = 100  # of a request of `decode`: less than a block, so that no prompt is stored
MEASURES = ("turns", "decode")
OUTPUT = Path("build/bench/chat_turns.json")
CONVERSATIONS = Path("build/bench/chat_turns_conversations.json")  # each with its turns, for --add
LOAD_SHARE = 3 / 4  # of the CPU tier that one request's loads from a shared tier may take
Report = dict[str, float | int | str]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Keeping the KV of answers: what it brings, and what it costs.")
    parser.add_argument("--measure", nargs="+", choices=MEASURES, default=MEASURES)
    parser.add_argument("--configurations", nargs="+", choices=CONFIGURATIONS, default=CONFIGURATIONS)
    parser.add_argument("--conversations", type=int, default=5)
    parser.add_argument("--add", action="store_true", help="to the conversations of the last run")
    parser.add_argument("--seconds", type=float, default=1200.0, help="of all conversations (default 1200)")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=300, help="new ones of a turn, and of its answer (default 300)")
    parser.add_argument("--rounds", type=int, default=8, help="of `decode` (default 8)")
    parser.add_argument("--requests", type=int, default=16, help="at once, of `decode` (default 16)")
    parser.add_argument("--answer", type=int, default=256, help="tokens of an answer of `decode` (default 256)")
    given = parser.parse_args(arguments)
    report: Report = {"processor": processor(), "processors_count": os.cpu_count() or 0}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the engines end too
    with ExitStack() as stacks:
        running = {name: stacks.enter_context(_stack(stacks, name, given)) for name in given.configurations}
        print(f"{len(running)} engines are up", flush=True)
        for measure in given.measure:
            print(measure_turns(running, given, report) if measure == "turns" else decode(running, given, report))
    report["load_average_at_end"] = round(os.getloadavg()[0], 2)
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{OUTPUT}")
    return 0


def _stack(stacks: ExitStack, name: str, given: argparse.Namespace) -> LocalStack:
    """The device holds one conversation or the requests of `decode`, the CPU tier three times as much."""
    folder = Path(stacks.enter_context(tempfile.TemporaryDirectory(prefix=f"spillway-chat-{name}-")))
    conversation = _blocks(2 * given.turns * given.tokens)
    device_blocks = 2 + max(conversation, given.requests * _blocks(PROMPT_TOKENS + given.answer))
    settings = StackSettings(
        port=free_port(),
        engines=1,
        shared_tier="nvme" if name == "nvme" else "none",
        offload=name != "off",
        num_cpu_blocks=math.ceil(conversation / LOAD_SHARE) if name == "nvme" else 3 * device_blocks,
        device_blocks=device_blocks,
        max_length=_device_tokens(device_blocks),
        gateway=False,
        engine_overrides=() if name == "off" else (f"offload.generatedTokens={_WORDS[name]}",),
    )
    return LocalStack(settings, folder)


def _device_tokens(device_blocks: int) -> int:
    return (device_blocks - 1) * BLOCK_TOKENS  # vLLM keeps one block for itself


_WORDS = {"prompts": "off", "generated": "on", "nvme": "on"}


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


@dataclass(frozen=True, slots=True)
class Turn:
    """What one configuration made of a turn."""

    prompt_tokens: int
    cached_tokens: int
    first_token_seconds: float

    @property
    def share(self) -> float:
        return self.cached_tokens / self.prompt_tokens


def measure_turns(running: dict[str, LocalStack], given: argparse.Namespace, report: Report) -> str:
    conversations: list[dict[str, list[Turn]]] = []
    if given.add:
        for kept in json.loads(CONVERSATIONS.read_text()):
            conversations.append({name: [Turn(*turn) for turn in turns] for name, turns in kept.items()})
    begun = last = time.monotonic()
    _converse(running, given, 0, 1, answer_tokens=16)  # warms up
    for number in range(len(conversations) + 1, len(conversations) + given.conversations + 1):
        now = time.monotonic()
        if conversations and 2 * now - last - begun > given.seconds:  # the next one takes as long as the one before
            break
        last = now
        conversations.append(_converse(running, given, number, given.turns, answer_tokens=given.tokens))
        CONVERSATIONS.parent.mkdir(parents=True, exist_ok=True)
        by_name = [{name: [astuple(turn) for turn in turns] for name, turns in one.items()} for one in conversations]
        CONVERSATIONS.write_text(json.dumps(by_name) + "\n")
    report |= {"turns_conversations_count": len(conversations), "turns_tokens": given.tokens}
    return _turns_table(conversations, list(running), given, report)


def _converse(
    running: dict[str, LocalStack], given: argparse.Namespace, number: int, turns: int, answer_tokens: int
) -> dict[str, list[Turn]]:
    """One conversation with every engine, in turns."""
    # All of the device, and another one in every turn, so that none of it is there already.
    device_tokens = _device_tokens(next(iter(running.values())).settings.device_blocks)
    fillers = [make_prompt(f"filler {which}", device_tokens - 1) for which in (0, 1)]
    history: dict[str, list[int]] = {name: [] for name in running}
    done: dict[str, list[Turn]] = {name: [] for name in running}
    for turn in range(turns):
        for name in ordered(list(running), number + turn):
            stack, tokens = running[name], history[name]
            port, model = stack.settings.engine_port(0), stack.model.served_name
            ask(port, model, fillers[turn % 2], 1)
            tokens += make_prompt(f"conversation {number}, turn {turn}", given.tokens)
            answer = ask(port, model, tokens, answer_tokens)
            seen = Turn(len(tokens), answer.cached_tokens, round(answer.first_token_seconds, 4))
            done[name].append(seen)
            print(
                f"{number}.{turn + 1} {name}: {seen.cached_tokens} of {seen.prompt_tokens} cached, "
                f"{seen.first_token_seconds:.3f} s",
                flush=True,
            )
            tokens += answer.tokens
    return done


def _turns_table(
    conversations: Sequence[dict[str, list[Turn]]], names: Sequence[str], given: argparse.Namespace, report: Report
) -> str:
    title = "".join(f"{name:>24}" for name in names)
    lines = [
        f"turns of {given.tokens} tokens in and out, medians of {len(conversations)} conversations, "
        f"{report['processor']}",
        f"{'turn':6}{'most':>6}{title}",
    ]
    for turn in range(given.turns):
        prompt_tokens = (2 * turn + 1) * given.tokens
        most = max(0, prompt_tokens - given.tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS / prompt_tokens
        report[f"turn_{turn + 1}_most_share"] = round(most, 3)
        cells = ""
        for name in names:
            share = statistics.median(one[name][turn].share for one in conversations)
            first = statistics.median(one[name][turn].first_token_seconds for one in conversations)
            report[f"{name}_turn_{turn + 1}_cached_share"] = round(share, 3)
            report[f"{name}_turn_{turn + 1}_first_token_seconds"] = round(first, 4)
            cells += f"{share:>14.0%}{first:>8.3f} s"
        lines.append(f"{turn + 1:<6}{most:>6.0%}{cells}")
    return "\n".join(lines)


def decode(running: dict[str, LocalStack], given: argparse.Namespace, report: Report) -> str:
    speeds: dict[str, list[float]] = {name: [] for name in running}
    numbers = itertools.count()
    for number in range(-1, given.rounds):  # the first one warms up
        for name in ordered(list(running), number + 2):
            speed = _decode_round(running[name], numbers, given)
            if number >= 0:
                speeds[name].append(speed)
        if number >= 0:
            print(", ".join(f"{name} {values[-1]:.1f}" for name, values in speeds.items()), "tokens/s", flush=True)
    lines = [f"{given.requests} requests at once, {given.answer} tokens each, {given.rounds} rounds"]
    for name, values in speeds.items():
        ratio = paired_ratio(values, speeds["off"], random.Random(0))
        report[f"{name}_decode_tokens_per_second"] = round(statistics.median(values), 2)
        report[f"{name}_decode_ratio"] = round(ratio.median, 4)
        report[f"{name}_decode_ratio_low"], report[f"{name}_decode_ratio_high"] = (
            round(ratio.low, 4),
            round(ratio.high, 4),
        )
        ends = f"({ratio.low:.3f} to {ratio.high:.3f})"
        lines.append(f"{name:10}{statistics.median(values):>9.1f} tokens/s{ratio.median:>8.3f} {ends}")
    return "\n".join(lines)


def _decode_round(stack: LocalStack, numbers: itertools.count[int], given: argparse.Namespace) -> float:
    prompts = [make_prompt(f"unseen {next(numbers)}", PROMPT_TOKENS) for _ in range(given.requests)]
    port, model = stack.settings.engine_port(0), stack.model.served_name
    begun = time.perf_counter()
    with ThreadPoolExecutor(given.requests) as clients:
        answers = list(clients.map(lambda prompt: ask(port, model, prompt, given.answer), prompts))
    return sum(len(answer.tokens) for answer in answers) / (time.perf_counter() - begun)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchError as error:
        print(f"chat_turns: {error}", file=sys.stderr)
        sys.exit(1)
