"""The few requests that the acceptance makes of one engine: answers with their likelihoods, timed turns, metrics."""

from __future__ import annotations

import http.client
import json
import re
import time
from typing import Any

from spillway_engine.ascend_acceptance.conversations import Turn
from spillway_engine.near_ties import REQUEST, Scored, scored

TIMEOUT_SECONDS = 600.0  # of one request, the first ones of an engine included


class EngineFailed(Exception):
    """The engine did not start, or did not answer as asked."""


class EngineClient:
    """Client of one engine. Several threads may use it: each request has a connection of its own."""

    def __init__(self, port: int, model: str) -> None:
        self._port = port
        self._model = model

    def tokens(self, text: str) -> list[int]:
        return list(self._json("/tokenize", {"model": self._model, "prompt": text})["tokens"])

    def answer(self, prompt: list[int], tokens: int) -> tuple[Scored, int]:
        """The greedy answer, and how many tokens of the prompt came from a cache."""
        document = self._json("/v1/completions", self._completion(prompt, tokens) | REQUEST)
        return scored(document["choices"][0]), _cached(document["usage"])

    def turn(self, number: int, prompt: list[int], tokens: int) -> tuple[Turn, list[int]]:
        """Streamed, so that the first token is timed."""
        body = self._completion(prompt, tokens) | {"stream": True, "stream_options": {"include_usage": True}}
        answer: list[int] = []
        usage: dict[str, Any] = {}
        started, first = time.perf_counter(), 0.0
        connection = self._post("/v1/completions", body)
        try:
            reply = connection.getresponse()
            _require_ok(reply)
            for line in reply:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[len(b"data: ") :])
                for choice in event["choices"]:
                    if choice.get("token_ids"):
                        first = first or time.perf_counter()
                        answer += choice["token_ids"]
                usage = event.get("usage") or usage
        finally:
            connection.close()
        ended = time.perf_counter()
        if len(answer) != tokens:
            raise EngineFailed(f"{len(answer)} tokens came instead of {tokens}")
        per_token = (ended - first) / max(1, len(answer) - 1)
        return Turn(number, len(prompt), _cached(usage), first - started, per_token), answer

    def metric(self, name: str, label: str = "") -> float:
        """The sum of a metric's samples that have this text among their labels."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_SECONDS)
        try:
            connection.request("GET", "/metrics")
            text = _require_ok(connection.getresponse()).read().decode()
        finally:
            connection.close()
        found = re.findall(rf"^{name}\{{([^}}]*)\}} (\S+)$", text, re.MULTILINE)
        return sum(float(value) for labels, value in found if label in labels)

    def _completion(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }

    def _json(self, path: str, body: dict[str, Any]) -> Any:
        connection = self._post(path, body)
        try:
            return json.loads(_require_ok(connection.getresponse()).read())
        finally:
            connection.close()

    def _post(self, path: str, body: dict[str, Any]) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_SECONDS)
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        return connection


def _require_ok(reply: http.client.HTTPResponse) -> http.client.HTTPResponse:
    if reply.status != http.HTTPStatus.OK:
        raise EngineFailed(f"the engine answered {reply.status}: {reply.read(500).decode(errors='replace')}")
    return reply


def _cached(usage: dict[str, Any]) -> int:
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
