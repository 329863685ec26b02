"""Memory of the gateway's reading of prompts and of its index, over prompts that share no block.

    python bench/prompt_memory.py [--prompts 1000000] [--index-bytes 134217728]

Prompts of about 350 tokens of English, code and Chinese (gateway_load/prompts.py) through the bundled model's template,
its tokenizer, the caches and the index, as for an engine without KV events: all that keeps anything of a prompt once
its request has ended. No sockets, so a million prompts take three minutes; `bench/gateway.py --skip cells,streams
--distinct 1000000` sends them as requests.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import uvloop
from gateway_load.prompts import distinct_bodies
from gateway_load.routers import chinese_words
from gateway_load.texts import Texts

from spillway_gateway.config.settings import LimitsConfig
from spillway_gateway.fleet.prefix_index import PrefixIndex
from spillway_gateway.tokens.fair_threads import FairThreads
from spillway_gateway.tokens.prompt import ChatPrompt, PromptReader
from spillway_gateway.tokens.tokenizer import PromptTokenizer
from spillway_stack.bundled_model import choose_model

BLOCK_TOKENS = 128
HELD_SECONDS = 900.0  # routing.approximateSeconds


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=1_000_000)
    parser.add_argument("--index-bytes", type=int, default=128 * 1024 * 1024)
    given = parser.parse_args(arguments)
    folder = Path(choose_model("", lambda _: None).folder)
    texts = Texts(chinese_words(), folder)
    with contextlib.closing(FairThreads(1, "tokens")) as threads:
        uvloop.run(_read(folder, texts, threads, given.prompts, given.index_bytes))
    return 0


async def _read(folder: Path, texts: Texts, threads: FairThreads, prompts: int, index_bytes: int) -> None:
    index = PrefixIndex(
        "m", bytes_max=index_bytes, orphans_max=1, default_block_tokens=BLOCK_TOKENS, clock=time.monotonic
    )
    index.add_engine("engine")
    reader = PromptReader("m", index, PromptTokenizer.load(folder), threads, LimitsConfig)
    process = psutil.Process()
    tokens = 0
    names = "prompts", "tokens", "blocks held", "evicted", "resident MB", "CPU s"
    print("".join(f"{name:>{width}}" for name, width in zip(names, (10, 14, 13, 11, 13, 8), strict=True)))
    for count, body in enumerate(itertools.islice(distinct_bodies(texts), prompts), 1):
        prompt = await reader.read(ChatPrompt(json.loads(body)["messages"]))
        for _ in index.accepted("engine", prompt.keys, time.monotonic() + HELD_SECONDS):
            pass
        tokens += prompt.prompt_tokens
        await asyncio.sleep(0)  # as between requests, where the event loop does what else there is
        if not count % max(1, prompts // 10):
            resident, seconds = process.memory_info().rss / 1e6, process.cpu_times()
            print(
                f"{count:>10,}{tokens:>14,}{index.blocks:>13,}{index.evicted_blocks_total:>11,}{resident:>13,.0f}"
                f"{seconds.user + seconds.system:>8.0f}",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main())
