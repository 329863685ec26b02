"""Benefit and cost of keeping the KV of answers, on one CUDA device: a chat's next turn, and decoding.

    python bench/gpu_chat_turns.py [--measure first decode turns] [--configurations off prompts generated auto nvme]
                                   [--conversations 5] [--turns 8] [--tokens 300]
                                   [--rounds 8] [--seconds S] [--requests 32] [--answer 1024] [--first-turns 4]
                                   [--eager] [--add] [--small]

bench/chat_turns.py with vLLM's offline engine and a Qwen3-8B-shaped model with dummy weights, bf16, blocks of 128
tokens. Engines of a group share the memory of one device and take turns, so that one of them computes while the others
idle; token ids in, token ids out. The first group is

    off             no connector
    prompts         a CPU tier for the KV of prompts alone (generated_tokens: off)
    generated       a CPU tier for the KV of answers as well
    auto            a CPU tier for the KV of answers while the engine decides so (generated_tokens: auto)

and then, by itself,

    nvme            the latter, with NVMe behind a CPU tier that holds one conversation

turns: --conversations in rotation, each of --turns turns of --tokens new tokens and --tokens of answer; a turn's prompt
is the whole conversation so far, with the ids that were generated. One request at a time. After each turn of all
conversations, prompts of other users fill the device (and the small CPU tier), so that no turn finds its conversation
there. By turn: the share of its prompt that was cached, beside that of the whole blocks of the conversation so far
(`most`: the KV of an answer's last token is not computed before the next turn), and the time to the first token.

first: rounds of FIRST_PROMPTS unseen prompts of --tokens tokens, one after the other without a pause, so that what one
has left to store is stored beside the next one. The time to the first token, within a round by its median.

decode: rounds of --requests unseen prompts of less than a block at once, --answer tokens each, by the first group.
Tokens per second from the median first token on are compared within a round; medians over rounds with a 95 % bootstrap
interval. In the first --first-turns rounds and the one that warms up each request begins a session. The requests of
each later round go on in those of the one before, and do not hold its answers, as if the chat template had left them
out. So `auto` has two rows: while it keeps the KV of answers, and once it has given that up. Between them it stores
what was computed before; that round counts in neither.

Compiled and with CUDA graphs, as vLLM's defaults are, unless --eager. --add: keep what the last run measured, except
what this one measures again. --small: a tiny model on any platform, to check that it runs; its figures mean nothing.
Prints tables, writes build/bench/gpu_chat_turns.json (flat; units are in the keys) and, after each round, what it is
made of (gpu_chat_turns_rounds.json).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gpu
from bench_report import BenchError, run, spread_of
from engine_turns import Turn, answer_rounds, engines_in_turn, log_of
from gpu_no_hit import MODEL
from paired_rounds import ROUNDS_LEAST, interval_text, ordered, paired_ratio

# Engines that are up at the same time; the phase of bench/gpu.py whose connector each one has.
GROUPS = (
    {"off": "none", "prompts": "spillway-cpu", "generated": "spillway-cpu", "auto": "spillway-cpu"},
    {"nvme": "spillway-nvme-auto"},
)
GENERATED_TOKENS = {"prompts": "off", "generated": "on", "auto": "auto", "nvme": "on"}
CONFIGURATIONS = tuple(name for group in GROUPS for name in group)
DECODED = tuple(GROUPS[0])
AUTO_KEEPS, AUTO_GAVE_UP = "auto_keeps", "auto_gave_up"
DECODE_ROWS = (*DECODED[:-1], AUTO_KEEPS, AUTO_GAVE_UP)
MEASURES = ("first", "decode", "turns")
FIRST_PROMPTS = 6  # of a round of `first`
# Tokens of a prompt of `decode`: less than a block, so that none is stored; unequal, so that blocks fill in any step.
PROMPT_TOKENS = (28, 124)
MEMORY_SHARE = 0.22  # of the device for each engine: 16.4 GB of weights, 5.5 of KV blocks
BLOCK_BYTES = 2 * 2 * MODEL["num_hidden_layers"] * MODEL["num_key_value_heads"] * MODEL["head_dim"] * gpu.BLOCK_TOKENS
GIVEN_UP = "so the KV of answers is not kept"  # the connector's own words (engine/scheduler/chunk_uses.py)
LOAD_SHARE = 3 / 4  # of the CPU tier that one request's loads from a shared tier may take
SPARE_BLOCKS = 4
FOLDER = Path("build/bench/gpu_chat_turns").absolute()
OUTPUT = Path("build/bench/gpu_chat_turns.json")
ROUNDS = Path("build/bench/gpu_chat_turns_rounds.json")
Report = dict[str, float | int | str]
# By measure and configuration. turns: by turn and conversation (prompt tokens, cached tokens, seconds to the first
# token); decode: tokens per second by round; given_up: whether `auto` kept no answers by the end of each of these;
# first: seconds to the first token of each prompt, by round.
Measured = dict[str, dict[str, list[Any]]]


class Sizes:
    """Blocks of the tiers of a configuration, and prompts that fill them."""

    def __init__(self, name: str, given: argparse.Namespace) -> None:
        self.conversation = _blocks(2 * given.turns * given.tokens)
        behind_small_tier = name in GROUPS[1]
        decoded = given.requests * _blocks(PROMPT_TOKENS[1] + given.answer)
        self.device = SPARE_BLOCKS + (self.conversation if behind_small_tier else max(self.conversation, decoded))
        if behind_small_tier:
            self.cpu = math.ceil(self.conversation / LOAD_SHARE)
        else:
            self.cpu = given.conversations * self.conversation + 2 * (self.device + self.conversation)
        self.filler_tokens = self.conversation * gpu.BLOCK_TOKENS - 1
        self.fillers = math.ceil((max(self.device, self.cpu) if behind_small_tier else self.device) / self.conversation)


def _blocks(tokens: int) -> int:
    return -(-tokens // gpu.BLOCK_TOKENS)


def transfer_config(name: str, sizes: Sizes) -> dict[str, Any] | None:
    config = gpu.transfer_config(next(group[name] for group in GROUPS if name in group), FOLDER / name)
    if config is not None:
        extra = config["kv_connector_extra_config"]
        del extra["cpu_bytes_to_use"]
        extra |= {"num_cpu_blocks": sizes.cpu, "generated_tokens": GENERATED_TOKENS[name]}
    return config


class Served:
    """One configuration's engine, its conversations and what displaces them."""

    def __init__(self, name: str, given: argparse.Namespace) -> None:
        self._given = given
        self._sizes = sizes = Sizes(name, given)
        self._vocabulary = (gpu.SMALL_MODEL if given.small else MODEL)["vocab_size"]
        config = transfer_config(name, sizes)
        settings: dict[str, Any] = {
            "max_model_len": sizes.filler_tokens + 1 + gpu.BLOCK_TOKENS,
            "max_num_seqs": given.requests,
            "num_gpu_blocks_override": sizes.device,
            "enforce_eager": given.eager,
            **({"kv_transfer_config": config} if config else {}),
        }
        if given.small:
            self._engine = gpu.Engine("none", FOLDER / name, gpu.SMALL_MODEL, **settings, dtype="float32")
        else:
            # Not measured at the start, since other engines start at the same time.
            settings |= {"gpu_memory_utilization": MEMORY_SHARE, "kv_cache_memory_bytes": sizes.device * BLOCK_BYTES}
            self._engine = gpu.Engine("none", FOLDER / name, MODEL, **settings)
        self._nvme = FOLDER / name / "nvme" if name in GROUPS[1] else None
        self._conversations: list[list[int]] = [[] for _ in range(given.conversations)]
        self._filled = 0

    def round(self, line: str) -> str:
        what, *number = line.split()
        if what == "turn":
            return json.dumps(self._turn(int(number[0])))
        if what == "first":
            return json.dumps(self._first(line))
        return json.dumps(self._decode(int(number[0])) if what == "decode" else self._warm_up())

    def _prompt(self, name: str, tokens: int) -> list[int]:
        return [token % self._vocabulary for token in gpu.make_prompt(name, tokens)]

    def _warm_up(self) -> None:
        """Prompts as long as those of some turns, computed and then found in a tier, which measures its rates."""
        turns = (0, self._given.turns // 2, self._given.turns - 1)
        prompts = [self._prompt(f"warm-up {turn}", (2 * turn + 1) * self._given.tokens) for turn in turns]
        for _ in range(3):
            for prompt in prompts:
                self._engine.answers([prompt], 2)
            self._engine.settle()
            self._displace()

    def _turn(self, turn: int) -> list[tuple[int, int, float]]:
        seen = []
        for number, conversation in enumerate(self._conversations):
            conversation.extend(self._prompt(f"conversation {number}, turn {turn}", self._given.tokens))
            (answer,) = self._engine.answers([conversation], self._given.tokens)
            seen.append((len(conversation), answer.cached_tokens, round(answer.first_token_seconds, 5)))
            conversation.extend(answer.tokens)
        self._engine.settle()
        self._displace()
        return seen

    def _displace(self) -> None:
        for _ in range(self._sizes.fillers):
            self._filled += 1
            self._engine.answers([self._prompt(f"filler {self._filled}", self._sizes.filler_tokens)], 1)
            if self._nvme:  # what is not yet there occupies the small CPU tier, so that nothing else could be stored
                self._engine.settle(gpu.stable_folder(self._nvme))
        self._engine.settle()

    def _first(self, name: str) -> list[float]:
        """Seconds to the first token of each prompt of a round."""
        seconds = []
        for number in range(FIRST_PROMPTS):
            (answer,) = self._engine.answers([self._prompt(f"{name} {number}", self._given.tokens)], 2)
            _require_unseen(answer.cached_tokens)
            seconds.append(round(answer.first_token_seconds, 5))
        self._engine.settle()
        return seconds

    def _decode(self, number: int) -> float:
        """Tokens per second of a round, once half of its requests have their first token."""
        chance, requests, answer = random.Random(number), self._given.requests, self._given.answer
        prompts = [self._prompt(f"decode {number} {at}", chance.randint(*PROMPT_TOKENS)) for at in range(requests)]
        sessions = [f"{min(number, self._given.first_turns - 1)} {at}" for at in range(requests)]
        first, seconds, cached = self._engine.ask_timed(prompts, answer, sessions)
        _require_unseen(cached)
        self._engine.tick()
        return requests * (answer - 1) / (seconds - statistics.median(first))


def _require_unseen(cached_tokens: int) -> None:
    if cached_tokens:
        raise BenchError(f"{cached_tokens} tokens of unseen prompts were found in a cache")


def serve(name: str, given: argparse.Namespace) -> None:
    """Runs in a separate process: one round for each line of the input."""
    os.environ.update(gpu.ENVIRONMENT, **({"VLLM_CPU_KVCACHE_SPACE": "1"} if given.small else {}))
    os.environ.update(VLLM_LOGGING_LEVEL="INFO", VLLM_LOGGING_STREAM="ext://sys.stderr")  # it says what auto decides
    answer_rounds(Served(name, given).round)


def measure(given: argparse.Namespace, own_arguments: Sequence[str]) -> None:
    measured: Measured = json.loads(ROUNDS.read_text()) if given.add else {}
    for group in GROUPS:
        names = [name for name in group if name in given.configurations]
        measures = [one for one in given.measure if one != "decode" or set(names) & set(DECODED)]
        if not names or not measures:
            continue
        commands = {name: [__file__, *own_arguments, "--serve", name] for name in names}
        with engines_in_turn(commands, FOLDER, at_once=True) as engines:
            if set(measures) != {"decode"}:  # whose first round warms up
                for engine in engines.values():
                    engine.round("warm-up")
            for one in measures:
                STEPS[one](engines, given, measured.setdefault(one, {}))


def rounds_in_turn(engines: dict[str, Turn], given: argparse.Namespace, what: str) -> Iterator[dict[str, Any]]:
    """Yield the engines' answers to each round, by name, but for the first round, which warms up."""
    end = time.monotonic() + given.seconds
    for number in range(-1, max(given.rounds, ROUNDS_LEAST)):
        if time.monotonic() > end:
            return
        names = ordered(list(engines), number + 2)
        answers = {name: json.loads(engines[name].round(f"{what} {number}")) for name in names}
        if number >= 0:
            yield answers


def measure_first(engines: dict[str, Turn], given: argparse.Namespace, measured: dict[str, list[Any]]) -> None:
    measured |= {name: [] for name in engines}
    for seconds in rounds_in_turn(engines, given, "first"):
        for name in engines:
            measured[name].append(seconds[name])
    write({"first": measured}, given)


def measure_decode(engines: dict[str, Turn], given: argparse.Namespace, measured: dict[str, list[Any]]) -> None:
    measured |= {name: [] for name in engines}
    given_up: list[bool] = []
    for speeds in rounds_in_turn(engines, given, "decode"):
        for name in engines:
            measured[name].append(speeds[name])
        given_up.append("auto" in engines and GIVEN_UP in log_of(FOLDER, "auto").read_text())
        shown = ", ".join(f"{name} {speeds[name]:.1f}" for name in engines)
        print(f"{shown} tokens/s{'; auto keeps no answers' if given_up[-1] else ''}", flush=True)
        write({"decode": measured, "given_up": {"auto": given_up}}, given)


def measure_turns(engines: dict[str, Turn], given: argparse.Namespace, measured: dict[str, list[Any]]) -> None:
    measured |= {name: [] for name in engines}
    for turn in range(given.turns):
        for name in ordered(list(engines), turn):
            seen = json.loads(engines[name].round(f"turn {turn}"))
            measured[name].append(seen)
            cached = sorted({tokens for _, tokens, _ in seen})
            first = statistics.median(seconds for _, _, seconds in seen)
            print(f"turn {turn + 1}, {name}: {cached} of {seen[0][0]} cached, {first:.4f} s", flush=True)
        write({"turns": measured}, given)


STEPS = {"first": measure_first, "decode": measure_decode, "turns": measure_turns}


def write(measured: Measured, given: argparse.Namespace) -> None:
    kept: Measured = json.loads(ROUNDS.read_text()) if ROUNDS.exists() else {}
    ROUNDS.write_text(json.dumps(kept | measured) + "\n")
    OUTPUT.write_text(json.dumps(report_of(kept | measured, given), indent=1) + "\n")


def report_of(measured: Measured, given: argparse.Namespace) -> Report:
    report: Report = {"cuda_graphs": int(not given.eager)}
    if first := measured.get("first"):
        report |= _first_report(first, given)
    if decoded := measured.get("decode"):
        report |= _decode_report(decoded, measured.get("given_up", {}).get("auto", []), given)
    if turns := measured.get("turns"):
        report |= _turns_report(turns, given)
    return report


def _first_report(first: dict[str, list[list[float]]], given: argparse.Namespace) -> Report:
    report: Report = {"first_prompt_tokens": given.tokens}
    for name, rounds in first.items():
        every = sorted(second for one in rounds for second in one)
        report |= {
            f"{name}_first_prompts_count": len(every),
            f"{name}_first_token_seconds": round(statistics.median(every), 5),
            f"{name}_first_token_seconds_p10": round(every[len(every) // 10], 5),
            f"{name}_first_token_seconds_p90": round(every[len(every) * 9 // 10], 5),
        }
        base = first.get("off", [])
        if name == "off" or name not in GROUPS[0] or len(base) != len(rounds):
            continue
        ratio = paired_ratio(*([statistics.median(one) for one in each] for each in (rounds, base)), random.Random(0))
        report |= ratio.figures(f"{name}_first_token_ratio_to_off")
    return report


def _decode_report(speeds: dict[str, list[float]], given_up: Sequence[bool], given: argparse.Namespace) -> Report:
    report: Report = {"decode_requests_count": given.requests, "decode_answer_tokens": given.answer}
    rounds = min(len(values) for values in speeds.values())  # a run that was cut off has fewer of some
    report["decode_rounds_count"] = rounds
    for row, (name, numbers) in _rows_of(speeds, rounds, given_up).items():
        of = {each: [values[number] for number in numbers] for each, values in speeds.items()}
        report[f"{row}_decode_rounds_count"] = len(numbers)
        report[f"{row}_decode_tokens_per_second"] = round(statistics.median(of[name]), 1)
        for base in (base for base in DECODED[: DECODED.index(name)] if base in of):
            ratio = paired_ratio(of[name], of[base], random.Random(0))
            report |= ratio.figures(f"{row}_decode_ratio_to_{base}")
    return report


def _rows_of(
    speeds: dict[str, list[float]], rounds: int, given_up: Sequence[bool]
) -> dict[str, tuple[str, Sequence[int]]]:
    """Choose the configuration and the rounds of each row of the table."""
    rows = {name: (name, range(rounds)) for name in speeds if name != "auto"}
    if "auto" in speeds:
        decided = list(given_up).index(True) if True in given_up else rounds
        rows |= {AUTO_KEEPS: ("auto", range(min(decided, rounds))), AUTO_GAVE_UP: ("auto", range(decided + 1, rounds))}
    return {row: (name, numbers) for row, (name, numbers) in rows.items() if numbers}


def _turns_report(turns: dict[str, list[list[tuple[int, int, float]]]], given: argparse.Namespace) -> Report:
    report: Report = {"turns_conversations_count": given.conversations, "turns_tokens": given.tokens}
    for turn in range(max(len(done) for done in turns.values())):
        prompt_tokens = (2 * turn + 1) * given.tokens
        most = max(0, prompt_tokens - given.tokens - 1) // gpu.BLOCK_TOKENS * gpu.BLOCK_TOKENS
        report[f"turn_{turn + 1}_prompt_tokens"] = prompt_tokens
        report[f"turn_{turn + 1}_most_share"] = round(most / prompt_tokens, 3)
        for name, done in turns.items():
            if turn >= len(done):
                continue
            key = f"{name}_turn_{turn + 1}"
            shares = [cached / tokens for tokens, cached, _ in done[turn]]
            seconds = [first for _, _, first in done[turn]]
            report |= {
                f"{key}_cached_share": round(statistics.median(shares), 3),
                f"{key}_least_cached_share": round(min(shares), 3),
                **spread_of(f"{key}_first_token", seconds),
            }
    return report


def render(report: Report) -> str:
    lines = []
    if "first_prompt_tokens" in report:
        lines.append(f"unseen prompts of {report['first_prompt_tokens']} tokens: first token in ms, median (p10, p90)")
        for name in CONFIGURATIONS:
            if (key := f"{name}_first_token_seconds") not in report:
                continue
            median, low, high = (float(report[f"{key}{end}"]) * 1e3 for end in ("", "_p10", "_p90"))
            cells = f"{median:.1f} ({low:.1f}, {high:.1f}) of {report[f'{name}_first_prompts_count']}"
            if (ratio := f"{name}_first_token_ratio_to_off") in report:
                cells += f"   {interval_text(report, ratio, of='off')}"
            lines.append(f"{name:10}{cells:>28}")
    if report.get("decode_rounds_count"):
        lines.append(
            f"{report['decode_requests_count']} requests at once, {report['decode_answer_tokens']} tokens each, "
            f"{report['decode_rounds_count']} rounds"
        )
        for row in DECODE_ROWS:
            if (key := f"{row}_decode_tokens_per_second") not in report:
                continue
            cells = f" in {report[f'{row}_decode_rounds_count']} rounds"
            for base in DECODED:
                if (ratio := f"{row}_decode_ratio_to_{base}") in report:
                    cells += f"   {interval_text(report, ratio, 4, base)}"
            lines.append(f"{row:13}{float(report[key]):>10.1f} tokens/s{cells}")
    if "turns_tokens" in report:
        names = [name for name in CONFIGURATIONS if f"{name}_turn_1_cached_share" in report]
        lines += [
            f"turns of {report['turns_tokens']} tokens in and out, {report['turns_conversations_count']} "
            "conversations: share cached, first token in ms: median (fastest, slowest)",
            f"{'turn':6}{'prompt':>7}{'most':>6}" + "".join(f"{name:>26}" for name in names),
        ]
        turn = 1
        while f"turn_{turn}_most_share" in report:
            most = float(report[f"turn_{turn}_most_share"])
            cells = ""
            for name in names:
                key = f"{name}_turn_{turn}"
                if f"{key}_cached_share" not in report:
                    continue
                kinds = ("", "_fastest", "_slowest")
                median, low, high = (float(report[f"{key}_first_token{kind}_seconds"]) * 1e3 for kind in kinds)
                times = f"{median:.1f} ({low:.1f}, {high:.1f})"
                cells += f"{float(report[f'{key}_cached_share']):>5.0%}{times:>21}"
            lines.append(f"{turn:<6}{report[f'turn_{turn}_prompt_tokens']:>7}{most:>6.0%}{cells}")
            turn += 1
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Keeping the KV of answers on a CUDA device: benefit and cost.")
    parser.add_argument("--measure", nargs="+", choices=MEASURES, default=MEASURES)
    parser.add_argument("--configurations", nargs="+", choices=CONFIGURATIONS, default=CONFIGURATIONS)
    parser.add_argument("--conversations", type=int, default=5)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=300, help="new ones of a turn, and of its answer (default 300)")
    parser.add_argument("--rounds", type=int, default=8, help="of `first` and `decode` (default 8)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no round of these begins")
    parser.add_argument("--requests", type=int, default=32, help="at once, of `decode` (default 32)")
    parser.add_argument("--answer", type=int, default=1024, help="tokens of an answer of `decode` (default 1024)")
    parser.add_argument("--first-turns", type=int, default=4, help="rounds of `decode` that begin sessions (default 4)")
    parser.add_argument("--eager", action="store_true", help="neither compiled nor with CUDA graphs")
    parser.add_argument("--add", action="store_true", help="to what the last run measured of other configurations")
    parser.add_argument("--small", action="store_true", help="a small model and load, to check that it runs")
    parser.add_argument("--serve", choices=CONFIGURATIONS, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    given.eager = given.eager or given.small
    if given.serve:
        serve(given.serve, given)
        return 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not given.add:
        ROUNDS.unlink(missing_ok=True)
    try:
        measure(given, sys.argv[1:] if arguments is None else arguments)
    finally:
        for name in CONFIGURATIONS:
            shutil.rmtree(FOLDER / name, ignore_errors=True)
    print(f"\n{render(report_of(json.loads(ROUNDS.read_text()), given))}")
    return 0


if __name__ == "__main__":
    run(main)
