"""A scripted engine with the processes of a real one: pod, API server, engine core. No model: answers follow from the
prompt alone, counters grow with every answer.

    python fake_engine.py pod PORT          runs and watches the server
    python fake_engine.py server PORT vllm.entrypoints.openai.api_server
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

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


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    answers = 0

    def do_GET(self) -> None:
        if self.path == "/metrics":
            moved = Handler.answers * BYTES_PER_BLOCK
            self.reply(f'spillway_tier_read_bytes_total{{tier="nvme"}} {moved}\n'.encode(), "text/plain")
        elif self.path == "/spillway/config":
            self.reply(json.dumps({"memory": {"bytes_per_block": BYTES_PER_BLOCK}}).encode())
        else:
            self.reply(b'{"ready": true}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")
        if "prompt" not in body:
            return self.reply(b"{}")
        Handler.answers += 1
        document = completion(body)
        if not body.get("stream"):
            return self.reply(json.dumps(document).encode())
        usage = {**document, "choices": []}
        first = {**document, "usage": None}
        events = "".join(f"data: {json.dumps(event)}\n\n" for event in (first, usage)) + "data: [DONE]\n\n"
        return self.reply(events.encode(), "text/event-stream")

    def reply(self, content: bytes, kind: str = "application/json") -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


def serve(port: int) -> None:
    # Both end when their parent does, as those of a real engine: each waits for the end of its parent's pipe.
    core = subprocess.Popen(["VLLM::EngineCore", "-"], executable="/bin/cat", stdin=subprocess.PIPE)
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    core.wait()
    os._exit(1)


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
