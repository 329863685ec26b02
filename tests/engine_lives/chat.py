"""A chat whose KV leaves the device between its turns: `python -m engine_lives.chat SHAPE...`

Prints JSON: by shape, of each turn the tokens of its prompt, how many of them were cached, and how many it has with its
answer.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine_lives.engine import Engine

Turn = tuple[int, int, int]


def converse(engine: Engine, block_tokens: int) -> list[Turn]:
    """The first answer ends with a block, whose last token's KV is not computed by then; the others within one."""
    rng = random.Random(0)
    history: list[int] = []
    turns: list[Turn] = []
    block = block_tokens
    for new, answer in ((block + 3, block - 3), (2 * block, 7), (block + 1, block), (5, 1)):
        name = f"turn {len(turns)}"
        prompt = history + [rng.randrange(3, 500) for _ in range(new)]
        engine.submit(name, prompt, answer)
        request = engine.scheduler.requests[name]
        engine.drain()  # every byte that attention reads is checked on the way
        history = list(request.all_token_ids)
        turns.append((len(prompt), engine.figures.cached_tokens[name], len(history)))
        engine.reset_device_cache()
    return turns


def main(shapes: list[str]) -> None:
    os.environ.update(PYTHONHASHSEED="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")
    from engine_lives.engine import BLOCK_TOKENS, SHAPES, Engine

    found = {}
    for name in shapes:
        with tempfile.TemporaryDirectory() as folder:
            engine = Engine(SHAPES[name], Path(folder))
            found[name] = converse(engine, BLOCK_TOKENS)
            engine.close()
    print("RUN", json.dumps({"block_tokens": BLOCK_TOKENS, "turns": found}))


if __name__ == "__main__":
    main(sys.argv[1:])
