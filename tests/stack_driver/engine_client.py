"""One engine, asked directly: prompts are token ids, answers hold tokens, log-probabilities and cached tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from reference_answers.margins import REQUEST, Scored, scored

from .engine_metrics import Reading, device_loads_bytes, pending_stores, tier_failures, tier_reads_bytes

ANSWER_TOKENS = 12
REQUEST_SECONDS = 180.0


@dataclass(frozen=True, slots=True)
class Answer:
    scored: Scored
    prompt_tokens: int
    cached_tokens: int
    source: str  # "none", "device", "cpu" or "shared": the deepest tier that took part
    device_load_bytes: int = 0
    tier_read_bytes: int = 0


class EngineClient:
    """Single-threaded; `source` is valid only while the engine is otherwise idle."""

    def __init__(self, url: str, model: str, tier: str, *, request_seconds: float = REQUEST_SECONDS) -> None:
        self.url = url
        self._model = model
        self._tier = tier
        self._http = httpx.Client(base_url=url, timeout=request_seconds)

    def close(self) -> None:
        self._http.close()

    def ask(self, prompt: Sequence[int], answer_tokens: int = ANSWER_TOKENS) -> Answer:
        """Greedy completion of a token prompt. Raises httpx.HTTPStatusError unless the engine answers 200."""
        before = self.metrics()
        body = self.complete(prompt, answer_tokens)
        after = self.metrics()
        choice, usage = body["choices"][0], body["usage"]
        loaded = int(device_loads_bytes(after) - device_loads_bytes(before))
        read = int(tier_reads_bytes(after, self._tier) - tier_reads_bytes(before, self._tier))
        cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        source = "shared" if read else "cpu" if loaded else "device" if cached else "none"
        return Answer(scored(choice), int(usage["prompt_tokens"]), cached, source, loaded, read)

    def complete(self, prompt: Sequence[int], answer_tokens: int) -> dict[str, Any]:
        return self._post(
            "/v1/completions",
            {
                "model": self._model,
                "prompt": list(prompt),
                "max_tokens": answer_tokens,
                "temperature": 0,
                "ignore_eos": True,
                **REQUEST,
            },
        )

    def prompt_logprobs(self, prompt: Sequence[int]) -> list[Any]:
        """The log-probabilities of a token prompt, one entry per token; the first has none."""
        body = {"model": self._model, "prompt": list(prompt), "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
        choice = self._post("/v1/completions", body)["choices"][0]
        return list(choice["prompt_logprobs"])

    def nudge(self) -> None:
        """One engine step without a full block: it collects and counts pending results of the tiers."""
        self.complete([7, 7, 7], 1)

    def reset_prefix_cache(self, *, cpu_tier: bool) -> None:
        """Empty the device's prefix cache, and the CPU tier too if asked; the shared tier keeps everything."""
        self.nudge()
        response = self._http.post("/reset_prefix_cache", params={"reset_external": str(cpu_tier).lower()})
        response.raise_for_status()

    def has_settled(self) -> bool:
        """Whether no computed block is still on its way to the shared tier.

        One step submits what has reached the CPU tier, the next one collects the results; so no store is pending when
        a step submitted nothing and all jobs had ended.
        """
        self.nudge()
        before = pending_stores(self.metrics(), self._tier)
        self.nudge()
        after = pending_stores(self.metrics(), self._tier)
        return after.queued_bytes == 0 and after == before

    def metrics(self) -> Reading:
        response = self._http.get("/metrics")
        response.raise_for_status()
        return Reading.parse(response.text)

    def failures(self) -> dict[tuple[str, str], float]:
        """Failures of the shared tier so far by (operation, reason), including those of jobs that just ended."""
        self.nudge()
        return tier_failures(self.metrics(), self._tier)

    def running(self) -> int:
        """Requests that the engine computes or holds in its queue."""
        reading = self.metrics()
        return int(reading.total("vllm:num_requests_running") + reading.total("vllm:num_requests_waiting"))

    def configuration(self) -> dict[str, Any]:
        response = self._http.get("/spillway/config")
        response.raise_for_status()
        return dict(response.json())

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self._http.post(path, json=body)
        response.raise_for_status()
        return dict(response.json())
