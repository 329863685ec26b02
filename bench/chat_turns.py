"""Benefit and cost of keeping the KV of answers: a chat's next turn, and the decoding of many requests.

    python bench/chat_turns.py [--measure turns thinking decode]
                               [--configurations off prompts generated nvme keeps strips]
                               [--conversations 5] [--add] [--seconds 1200]
                               [--turns 8] [--tokens 300]
                               [--rounds 8] [--requests 16] [--answer 256]

Engines at once on this machine, asked in turns: without offload (`off`), with a CPU tier for prompts alone (`prompts`,
offload.generatedTokens: off) and for answers as well (`generated`), and the latter with NVMe behind a CPU tier that
does not hold a conversation and the prompt between its turns (`nvme`). Two more are asked for by name, both with
offload.generatedTokens: auto: `keeps`, whose clients send answers back whole, and `strips`, whose clients leave out the
first half of each, as chat templates of reasoning models leave out the thinking.

turns: conversations of --turns turns, each of --tokens new tokens and --tokens of answer; before each turn another
prompt fills the device, so that none of the conversation is in its cache. By turn: the share of its prompt that
was cached, beside that of the whole blocks of the conversation so far (`most`: the KV of the last token of an answer
is not computed before the next turn), and the time to the first token, medians over the conversations. Fewer
conversations are held if the next one would not end within --seconds. --add: keep those of the last run too, for a
machine that is not quiet for long.

thinking: with `keeps` and `strips`, waves of --requests conversations of two turns each, until --answers answers were
sent back or not. After how many of them the engine kept no KV of answers any more, and the share that it has measured.

decode: rounds of --requests requests at once with --answer tokens each, of unseen prompts. Tokens per second of a round
are compared within it, so that disturbances of the machine cancel out; ratios to the first configuration are medians
over rounds with a 95 % bootstrap interval.

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

from bench_report import run, write_report
from first_token import BLOCK_TOKENS, ask, free_port, make_prompt, processor
from metrics_page import reading
from paired_rounds import interval_text, ordered, paired_ratio

from spillway_stack.local_stack import LocalStack
from spillway_stack.settings import StackSettings

CONFIGURATIONS = ("off", "prompts", "generated", "nvme")
AUTOMATIC = ("keeps", "strips")
PROMPT_TOKENS = 100  # of a request of `decode`: less than a block, so that no prompt is stored
MEASURES = ("turns", "thinking", "decode")
THINKING_PROMPT_TOKENS = 300  # two whole blocks, so that the engine knows the conversation again
THINKING_ANSWER_TOKENS = 100  # they fill the prompt's last block
ANSWERS_KEPT, SENT_BACK_SHARE = "spillway_answers_kept", "spillway_answers_sent_back_share"
OUTPUT = Path("build/bench/chat_turns.json")
CONVERSATIONS = Path("build/bench/chat_turns_conversations.json")  # each with its turns, for --add
LOAD_SHARE = 3 / 4  # of the CPU tier that one request's loads from a shared tier may take
Report = dict[str, float | int | str]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Keeping the KV of answers: what it brings, and what it costs.")
    parser.add_argument("--measure", nargs="+", choices=MEASURES, default=("turns", "decode"))
    known = (*CONFIGURATIONS, *AUTOMATIC)
    parser.add_argument("--configurations", nargs="+", choices=known, default=CONFIGURATIONS)
    parser.add_argument("--conversations", type=int, default=5)
    parser.add_argument("--add", action="store_true", help="to the conversations of the last run")
    parser.add_argument("--seconds", type=float, default=1200.0, help="of all conversations (default 1200)")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=300, help="new ones of a turn, and of its answer (default 300)")
    parser.add_argument("--rounds", type=int, default=8, help="of `decode` (default 8)")
    parser.add_argument("--requests", type=int, default=16, help="at once, of `decode` (default 16)")
    parser.add_argument("--answer", type=int, default=256, help="tokens of an answer of `decode` (default 256)")
    parser.add_argument("--answers", type=int, default=64, help="of `thinking` (default 64)")
    given = parser.parse_args(arguments)
    report: Report = {"processor": processor(), "processors_count": os.cpu_count() or 0}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the engines end too
    with ExitStack() as stacks:
        running = {name: stacks.enter_context(_stack(stacks, name, given)) for name in given.configurations}
        print(f"{len(running)} engines are up", flush=True)
        measures = {"turns": measure_turns, "thinking": think, "decode": decode}
        for measure in given.measure:
            print(measures[measure](running, given, report), flush=True)
    report["load_average_at_end"] = round(os.getloadavg()[0], 2)
    write_report(report, OUTPUT)
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


_WORDS = {"prompts": "off", "generated": "on", "nvme": "on", "keeps": "auto", "strips": "auto"}


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


@dataclass(frozen=True, slots=True)
class Turn:
    """The outcome of a turn in one configuration."""

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


def think(running: dict[str, LocalStack], given: argparse.Namespace, report: Report) -> str:
    numbers = itertools.count()
    lines = [f"answers of {THINKING_ANSWER_TOKENS} tokens, waves of {given.requests} conversations"]
    for name in (name for name in running if name in AUTOMATIC):
        stack, answers, kept_until = running[name], 0, 0
        kept, share = _kept(stack)
        while answers < given.answers:
            _two_turns(stack, name, numbers, given.requests)
            answers += given.requests
            kept, share = _kept(stack)
            print(f"{name}: after {answers} answers {'kept' if kept else 'not kept'}, share {share}", flush=True)
            if kept:
                kept_until = answers
        report |= {f"{name}_answers_kept": int(kept), f"{name}_kept_until_answers_count": kept_until}
        if share is not None:
            report[f"{name}_sent_back_share"] = share
        lines.append(f"{name:10}kept until answer {kept_until} of {answers}, share sent back {share}")
    return "\n".join(lines)


def _two_turns(stack: LocalStack, name: str, numbers: itertools.count[int], conversations: int) -> None:
    port, model = stack.settings.engine_port(0), stack.model.served_name
    prompts = [make_prompt(f"asked {next(numbers)}", THINKING_PROMPT_TOKENS) for _ in range(conversations)]
    with ThreadPoolExecutor(conversations) as clients:
        first = list(clients.map(lambda prompt: ask(port, model, prompt, THINKING_ANSWER_TOKENS), prompts))
        thinking = THINKING_ANSWER_TOKENS // 2 if name == "strips" else 0
        turns = [
            [*prompt, *answer.tokens[thinking:], *make_prompt(f"goes on {next(numbers)}", PROMPT_TOKENS)]
            for prompt, answer in zip(prompts, first, strict=True)
        ]
        list(clients.map(lambda prompt: ask(port, model, prompt, 1), turns))


def _kept(stack: LocalStack) -> tuple[bool, float | None]:
    """Whether the engine keeps the KV of answers, and the share of them that it saw come back; None: too few yet."""
    port = stack.settings.engine_port(0)
    ask(port, stack.model.served_name, make_prompt("a step", 8), 2)  # it reports with its steps
    page = reading(f"http://127.0.0.1:{port}")
    found = {name: value for (name, _), value in page.items() if name in (ANSWERS_KEPT, SENT_BACK_SHARE)}
    share = found.get(SENT_BACK_SHARE)
    return bool(found[ANSWERS_KEPT]), None if share is None else round(share, 3)


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
        ratio = paired_ratio(values, next(iter(speeds.values())), random.Random(0))
        report[f"{name}_decode_tokens_per_second"] = round(statistics.median(values), 2)
        report |= ratio.figures(f"{name}_decode_ratio")
        cell = interval_text(report, f"{name}_decode_ratio")
        lines.append(f"{name:10}{statistics.median(values):>9.1f} tokens/s   {cell}")
    return "\n".join(lines)


def _decode_round(stack: LocalStack, numbers: itertools.count[int], given: argparse.Namespace) -> float:
    prompts = [make_prompt(f"unseen {next(numbers)}", PROMPT_TOKENS) for _ in range(given.requests)]
    port, model = stack.settings.engine_port(0), stack.model.served_name
    begun = time.perf_counter()
    with ThreadPoolExecutor(given.requests) as clients:
        answers = list(clients.map(lambda prompt: ask(port, model, prompt, given.answer), prompts))
    return sum(len(answer.tokens) for answer in answers) / (time.perf_counter() - begun)


if __name__ == "__main__":
    run(main)
