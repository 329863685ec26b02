"""A scripted engine with the processes of a real one: pod, API server, engine core. No model: answers follow from the
prompt alone, counters grow with every answer.

    python scripted_pod.py pod PORT          runs and watches the server
    python scripted_pod.py server PORT vllm.entrypoints.openai.api_server
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from typing import Any

from spillway_gateway.testing.fake_engine import FakeEngine, Scripted

BYTES_PER_BLOCK = 1 << 16


def answer_of(prompt: list[int], count: int) -> list[int]:
    digest = hashlib.sha256(json.dumps(prompt).encode()).digest()
    return [1000 + digest[place % 32] for place in range(count)]


def completion(body: dict[str, Any]) -> dict[str, Any]:
    tokens = answer_of(body["prompt"], body["max_tokens"])
    choice: dict[str, Any] = {"index": 0, "text": "", "token_ids": tokens, "finish_reason": "length"}
    if "logprobs" in body:
        choice["logprobs"] = {
            "token_logprobs": [-0.1] * len(tokens),
            "top_logprobs": [{f"token_id:{token}": -0.1, "token_id:1": -3.0} for token in tokens],
        }
    usage = {"prompt_tokens": len(body["prompt"]), "prompt_tokens_details": {"cached_tokens": 256}}
    return {"id": "x", "object": "text_completion", "model": body["model"], "choices": [choice], "usage": usage}


class Engine(FakeEngine):
    def __init__(self) -> None:
        super().__init__(model="m", record=False, script=self.scripted)
        self.pages["/spillway/config"] = json.dumps({"memory": {"bytes_per_block": BYTES_PER_BLOCK}}).encode()
        self.count(0)

    def scripted(self, path: str, body: dict[str, Any]) -> Scripted:
        if "prompt" not in body:
            return Scripted()
        self.count(self.answers + 1)
        document = completion(body)
        return Scripted(document, [{**document, "usage": None}, {**document, "choices": []}])

    def count(self, answers: int) -> None:
        self.answers = answers
        moved = answers * BYTES_PER_BLOCK
        self.pages["/metrics"] = f'spillway_tier_read_bytes_total{{tier="nvme"}} {moved}\n'.encode()


def serve(port: int) -> None:
    # Both end when their parent does, as those of a real engine: each waits for the end of its parent's pipe.
    core = subprocess.Popen(["VLLM::EngineCore", "-"], executable="/bin/cat", stdin=subprocess.PIPE)
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
    asyncio.run(answer_until_end_of(core, port))
    os._exit(1)


async def answer_until_end_of(core: subprocess.Popen[bytes], port: int) -> None:
    engine = Engine()
    await engine.start(port)
    await asyncio.to_thread(core.wait)


def run_pod(port: int) -> int:
    server = subprocess.Popen(
        [sys.executable, __file__, "server", str(port), "vllm.entrypoints.openai.api_server"],
        process_group=0,
        stdin=subprocess.PIPE,
    )
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(server.pid, signal.SIGKILL))
    return 1 if server.wait() else 0


if __name__ == "__main__":
    role, port_text = sys.argv[1:3]
    sys.exit(run_pod(int(port_text)) if role == "pod" else serve(int(port_text)))
