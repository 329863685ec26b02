"""Requests whose members steer the engine, of every type that JSON has, wherever vLLM reads them."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from .fleet import Fleet

PART = "poisoned"
_SECONDS = 300.0
_AT_ONCE = 16
TOKENS = [504, 3575, 282]


def _deep() -> Any:
    """Deep enough for a parser that recurses, and still below what the gateway refuses outright."""
    value: Any = "boom"
    for _ in range(60):
        value = {"kv_transfer_params": value}
    return value


VALUES: dict[str, Any] = {
    "text": "boom",
    "empty text": "",
    "number": 7,
    "negative": -1.5,
    "huge number": 10**30,
    "true": True,
    "list": ["boom"],
    "nested list": [["boom", [1, {"a": [2]}]]],
    "empty list": [],
    "empty mapping": {},
    "remote prefill": {"do_remote_prefill": True},
    "remote decode": {"do_remote_decode": True, "remote_host": "127.0.0.1", "remote_port": "x", "remote_block_ids": 7},
    "wrong session": {"spillway_session": {"id": [1], "ended": "x", "return_seconds": "nan"}},
    "session of a text": {"spillway_session": "boom"},
    "wrong retention": {"spillway_retention": {"marks": [["x", -1], 7], "share": [1]}},
    "wrong counts": {"max_offload_tokens": "boom", "max_load_tokens": [1], "kv_load_tiers": [[1], "x"]},
    "negative counts": {"max_offload_tokens": -1, "max_load_tokens": -1, "kv_load_tiers": []},
    "tiers": {"kv_load_tiers": [{"medium": 7, "locality": None}]},
    "nested mapping": {"a": {"b": {"c": {"kv_transfer_params": "boom"}}}},
    "deep": _deep(),
}
STEERING = ("kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode")


def bodies(model: str, value: Any) -> list[tuple[str, dict[str, Any]]]:
    """Route and body: the value at each place from which vLLM takes steering members."""
    messages = [{"role": "user", "content": "Hello"}]
    plain = {
        "/v1/chat/completions": {"model": model, "messages": messages, "max_tokens": 1},
        "/v1/completions": {"model": model, "prompt": TOKENS, "max_tokens": 1},
        "/v1/messages": {"model": model, "messages": messages, "max_tokens": 1},
        "/v1/responses": {"model": model, "input": messages, "max_output_tokens": 1},
    }
    made = []
    for path, body in plain.items():
        made += [
            (path, {**body, "kv_transfer_params": value}),
            (path, {**body, "vllm_xargs": {name: value for name in STEERING}}),
            (path, {**body, "vllm_xargs": value}),
        ]
    sampling: dict[str, Any] = {"max_tokens": 1, "temperature": 0}
    generate = {"model": model, "token_ids": TOKENS}
    extra = {name: value for name in STEERING}
    made += [
        ("/inference/v1/generate", {**generate, "sampling_params": {**sampling, "extra_args": extra}}),
        ("/inference/v1/generate", {**generate, "sampling_params": {**sampling, "extra_args": value}}),
        ("/inference/v1/generate", {**generate, "sampling_params": sampling, "kv_transfer_params": value}),
    ]
    return made


def run(fleet: Fleet) -> None:
    ways = {"through the gateway": fleet.gateway} | {
        f"straight at engine-{index}": engine.url for index, engine in enumerate(fleet.stack.engines[:1])
    }
    for way, url in ways.items():
        cores = fleet.cores()
        with ThreadPoolExecutor(_AT_ONCE) as threads, httpx.Client(base_url=url, timeout=_SECONDS) as client:
            futures = {
                threads.submit(client.post, path, json=body): f"{path} {name}"
                for name, value in VALUES.items()
                for path, body in bodies(fleet.model, value)
            }
            replies = {future.result(): asked for future, asked in futures.items()}
        statuses = Counter(f"{reply.status_code // 100}xx" for reply in replies)
        odd = [
            f"{asked}: {reply.status_code} {reply.text[:160]}"
            for reply, asked in replies.items()
            if reply.status_code != 200 and not _is_clear(reply)
        ]
        lost = fleet.lost_since(cores)
        # vLLM's own API server fails at some values (500, `'str' object has no attribute 'get'` in 0.32); no core does.
        held = not odd or url != fleet.gateway
        fleet.rows.add(PART, f"{len(replies)} requests {way}", dict(sorted(statuses.items())), held)
        for line in odd[:20] if not held else ():
            print("     ", line, flush=True)
        fleet.rows.add(PART, f"{way}: engines lost", lost, lost == 0)
        fleet.rows.add(PART, f"{way}: an ordinary request is answered by each", "", fleet.each_answers())


def _is_clear(reply: httpx.Response) -> bool:
    """Whether the request was refused, with a message."""
    if reply.status_code >= 500:
        return False
    try:
        document = reply.json()
    except ValueError:
        return False
    error = document.get("error") if isinstance(document, dict) else None
    return isinstance(error, dict) and bool(error.get("message"))
