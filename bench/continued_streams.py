"""Streams on two real engines, one of which is killed: does every answer go on, is it the same, and how long is the
pause?

    make bench-continued, or PYTHONPATH=tests python bench/continued_streams.py [--streams 100] [--tier redis]

Each prompt is answered once without a fault, which also stores its KV in the shared tier, and once more through the
gateway with `continuation` on, after both engines have lost their device and CPU caches. In the middle of that one
engine's processes get SIGKILL. Then the survivor loses its caches again and gets the prompts of the interrupted
streams, all at once: its first tokens from the shared tier are what the pauses are held against.

An answer is wrong where it differs from the one without a fault at a token that leads its runner-up by 0.5 or more in
float32 (tests/reference_answers/margins.py). Prints a table, writes build/bench/continued_streams.json. Fails where a
stream failed or an answer is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import torch
import yaml
from bench_report import write_report
from reference_answers.margins import MARGIN_LEAST
from stack_driver.engine_processes import kill_group, vllm_group
from stack_driver.running_stack import free_base_port
from transformers import AutoModelForCausalLM, AutoTokenizer

from spillway_stack.local_stack import LocalStack
from spillway_stack.settings import StackSettings

ANSWER_TOKENS = 24
PROMPT_CHARS = 800  # one block and a half
VICTIM = "engine-0"
OUTPUT = Path("build/bench/continued_streams.json")
SOURCES = ("docs/architecture.md", "docs/operations/install.md", "docs/gateway.md", "docs/reliability.md")
# Two engines with two threads each wait for each other at every step of a busy machine with two cores.
ONE_THREAD = ('extraEnv.VLLM_CPU_OMP_THREADS_BIND="nobind"', 'extraEnv.OMP_NUM_THREADS="1"')
DEVELOPMENT_MODE = 'extraEnv.VLLM_SERVER_DEV_MODE="1"'  # has the route that resets caches


@dataclass
class Stream:
    """One client's record. Times are of time.monotonic()."""

    body: dict[str, Any]
    path: str
    engine: str = ""
    started: float = 0.0
    texts: list[tuple[float, str]] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    usage: dict[str, Any] | None = None
    done: bool = False
    error: str = ""
    tokens: list[int] = field(default_factory=list)  # where the engine was asked for them
    prompt: list[int] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.texts)


def make_streams(count: int, model: str) -> list[Stream]:
    """Chats and completions about pieces of the documentation; no two share a block."""
    text = "\n".join(Path(name).read_text(encoding="utf-8") for name in SOURCES)
    step = (len(text) - PROMPT_CHARS) // count
    streams = []
    for number in range(count):
        piece = f"Note {number}.\n" + text[number * step : number * step + PROMPT_CHARS]
        common = {"model": model, "temperature": 0, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "stream": True}
        common["stream_options"] = {"include_usage": True}
        if number % 2:
            streams.append(Stream({**common, "prompt": piece}, "/v1/completions"))
        else:
            messages = [{"role": "user", "content": f"{piece}\n\nExplain this note in your own words."}]
            streams.append(Stream({**common, "messages": messages}, "/v1/chat/completions"))
    return streams


async def follow(session: aiohttp.ClientSession, url: str, stream: Stream, **fields: Any) -> None:
    stream.started = time.monotonic()
    try:
        async with session.post(url + stream.path, json={**stream.body, **fields}) as reply:
            stream.engine = reply.headers.get("x-spillway-engine", "")
            async for line in reply.content:
                if line.startswith(b"data: "):
                    take(stream, line[6:].strip())
    except aiohttp.ClientError as error:
        stream.error = f"{type(error).__name__}: {error}"


def take(stream: Stream, data: bytes) -> None:
    if data == b"[DONE]":
        stream.done = True
        return
    document = json.loads(data)
    if "error" in document:
        stream.error = json.dumps(document["error"])
        return
    stream.ids.add(document["id"])
    stream.usage = document.get("usage") or stream.usage
    stream.prompt = document.get("prompt_token_ids") or stream.prompt
    for choice in document["choices"]:
        text = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        stream.prompt = choice.get("prompt_token_ids") or stream.prompt
        stream.tokens += choice.get("token_ids") or []
        if "role" not in choice.get("delta", {}):
            stream.texts.append((time.monotonic(), text))


async def crowd(url: str, streams: Sequence[Stream], **fields: Any) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=400)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        await asyncio.gather(*(follow(session, url, stream, **fields) for stream in streams))


async def reset(urls: Sequence[str]) -> None:
    async with aiohttp.ClientSession() as session:
        for url in urls:
            async with session.post(url + "/reset_prefix_cache", params={"reset_external": "true"}) as reply:
                assert reply.status == 200, await reply.text()


async def killed_midway(url: str, streams: Sequence[Stream], group: int) -> float:
    """Kills the group once half of the victim's streams have a third of their answer; returns when."""
    running = asyncio.create_task(crowd(url, streams))
    while True:
        await asyncio.sleep(0.05)
        own = [stream for stream in streams if stream.engine == VICTIM]
        if own and sum(len(stream.texts) >= ANSWER_TOKENS // 3 for stream in own) >= len(own) / 2:
            break
        assert not running.done(), "every stream ended before the kill"
    kill_group(group)
    killed = time.monotonic()
    await running
    return killed


@torch.inference_mode()
def margin_at_difference(model: Any, tokenizer: Any, reference: Stream, text: str) -> float:
    """The float32 lead of the reference's token at which the other text leaves it."""
    same = 0
    for count in range(1, len(reference.tokens) + 1):
        begun = tokenizer.decode(reference.tokens[:count], skip_special_tokens=True)
        if text.startswith(begun.rstrip("\ufffd")):
            same = count
        else:
            break
    logits = model(torch.tensor([[*reference.prompt, *reference.tokens[:same]]])).logits[0, -1]
    best = torch.log_softmax(logits.float(), dim=-1).topk(2).values
    return float(best[0] - best[1])


def p(seconds: Sequence[float], percent: int) -> float:
    ordered = sorted(seconds)
    return ordered[-(-len(ordered) * percent // 100) - 1]


def turn_on(stack: LocalStack) -> None:
    """The gateway reads its file again within two seconds."""
    file = stack.folder.config / "gateway.yaml"
    document = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump({**document, "continuation": {"enabled": True, "pauseSeconds": 120}}))
    time.sleep(5.0)


def measure(count: int, tier: str, folder: Path) -> dict[str, Any]:
    settings = StackSettings(
        port=free_base_port(),
        shared_tier=tier,
        num_cpu_blocks=110,
        device_blocks=110,
        max_length=2048,
        engine_overrides=(
            DEVELOPMENT_MODE,
            *ONE_THREAD,
            "offload.prefillTokensPerSecond=1",
            "offload.sharedTier.lookupTimeoutSeconds=5",
        ),
    )
    with LocalStack(settings, folder) as stack:
        return measured(stack, count)


def measured(stack: LocalStack, count: int) -> dict[str, Any]:
    model, urls = stack.model.served_name, [engine.url for engine in stack.engines]
    turn_on(stack)
    references = make_streams(count, model)
    asyncio.run(crowd(stack.gateway_url, references, return_token_ids=True))
    assert all(each.done and not each.error for each in references), [each.error for each in references]
    time.sleep(10.0)  # the last stores
    asyncio.run(reset(urls))
    group = vllm_group(next(each.identity for each in stack.status() if each.name == VICTIM))
    streams = make_streams(count, model)
    load = os.getloadavg()[0]
    killed = asyncio.run(killed_midway(stack.gateway_url, streams, group))
    moved = [
        (stream, reference)
        for stream, reference in zip(streams, references, strict=True)
        if stream.engine == VICTIM and stream.texts and stream.texts[0][0] < killed < stream.texts[-1][0]
    ]
    pauses = []
    for stream, _ in moved:
        times = [at for at, _ in stream.texts]
        after = next(at for at in times if at > killed)
        pauses.append(after - max(at for at in times if at <= killed))
    asyncio.run(reset(urls[1:]))
    again = [Stream(stream.body, stream.path) for stream, _ in moved]
    asyncio.run(crowd(urls[1], again, max_tokens=1))
    first_tokens = [stream.texts[0][0] - stream.started for stream in again]
    folder_of_model = stack.model.folder
    failed = [stream for stream in streams if stream.error or not stream.done or len(stream.ids) != 1]
    miscounted = [
        stream for stream in streams if not stream.usage or stream.usage["completion_tokens"] != ANSWER_TOKENS
    ]
    tokenizer = AutoTokenizer.from_pretrained(folder_of_model)
    reference_model = AutoModelForCausalLM.from_pretrained(folder_of_model, dtype=torch.float32).eval()
    differing = [(stream, reference) for stream, reference in moved if stream.text != reference.text]
    margins = [margin_at_difference(reference_model, tokenizer, ref, stream.text) for stream, ref in differing]
    return {
        "streams": count,
        "interrupted": len(moved),
        "failed": len(failed),
        "failures": [stream.error for stream in failed][:5],
        "usage_wrong": len(miscounted),
        "differing_at_near_ties": sum(margin < MARGIN_LEAST for margin in margins),
        "wrong": sum(margin >= MARGIN_LEAST for margin in margins),
        "margins": [round(margin, 3) for margin in margins],
        "pause_p50_s": round(statistics.median(pauses), 3),
        "pause_p90_s": round(p(pauses, 90), 3),
        "first_token_shared_p50_s": round(statistics.median(first_tokens), 3),
        "first_token_shared_p90_s": round(p(first_tokens, 90), 3),
        "tier": stack.settings.shared_tier,
        "load_average": round(load, 1),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Streams that outlive their engine.")
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--tier", choices=("nvme", "redis"), default="redis")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the stack ends with this process
    with tempfile.TemporaryDirectory(prefix="spillway-bench-") as folder:
        report = measure(given.streams, given.tier, Path(folder))
    for name, value in report.items():
        print(f"{name:28} {value}")
    write_report(report, OUTPUT)
    return 1 if report["failed"] or report["wrong"] or report["usage_wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
