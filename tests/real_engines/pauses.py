"""Pauses and sleeps, in each mode, while an engine loads prompts from its shared tier."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
from reference_answers.margins import ROUNDING, Scored, difference, scored
from stack_driver.engine_client import ANSWER_TOKENS, EngineClient
from stack_driver.prompts import Prompt

from .fleet import Fleet

PART = "pauses"
PROMPTS = 2
BLOCKS = 12
SHARES = (0.1, 0.3, 0.6)  # of the time that the prompts take to load, until the pause begins
MODES = ("wait", "keep", "abort")
WAYS: dict[str, tuple[tuple[str, dict[str, str]], str]] = {
    "pause": (("/pause", {}), "/resume"),
    "sleep": (("/sleep", {"level": "1"}), "/wake_up"),  # a CPU engine pauses, empties its caches and keeps its weights
}


class Loading:
    """Prompts that lie in the shared tier, with their answers, and an engine that has none of them."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.engine = fleet.stack.engines[-1]
        self.references: dict[Prompt, Scored] = {}
        for _ in range(PROMPTS):
            known = fleet.stack.compute_and_store(self.engine, BLOCKS)
            self.references[known.prompt] = known.by_cached_tokens[known.prompt.reusable_tokens]
        self.seconds = self._loads()
        self.within = 0  # pauses that began before any of the prompts had its answer

    def _loads(self) -> float:
        """Measure how long all of them take from the shared tier to their answers' first token."""
        self.engine.reset_prefix_cache(cpu_tier=True)
        begun = time.monotonic()
        with ThreadPoolExecutor(PROMPTS) as threads:
            list(threads.map(partial(self._ask, tokens=1), self.references))
        return time.monotonic() - begun

    def interrupted(self, way: str, mode: str, share: float) -> list[str]:
        """Wrong answers of a turn. Raises httpx.HTTPError if the engine does not answer."""
        (path, params), end = WAYS[way]
        self.engine.reset_prefix_cache(cpu_tier=True)
        with ThreadPoolExecutor(PROMPTS + 1) as threads:
            asked = {threads.submit(self._ask, prompt): prompt for prompt in self.references}
            time.sleep(share * self.seconds)
            self.within += not any(answer.done() for answer in asked)
            paused = threads.submit(self._post, path, {**params, "mode": mode})
            try:
                paused.result()  # with mode `wait` it ends after the requests that the engine had
            finally:
                self._post(end, {})
            wrong = [self._mismatch(prompt, answer.result()) for answer, prompt in asked.items()]
        wrong += [self._mismatch(prompt, self._ask(prompt)) for prompt in self.references]
        return [mismatch for mismatch in wrong if mismatch is not None]

    def _ask(self, prompt: Prompt, tokens: int = ANSWER_TOKENS) -> dict[str, Any]:
        client = EngineClient(self.engine.url, self._fleet.model, self._fleet.stack.tier)
        try:
            return client.complete(prompt.tokens, tokens)
        finally:
            client.close()

    def _post(self, path: str, params: dict[str, str]) -> None:
        reply = httpx.post(f"{self.engine.url}{path}", params=params, timeout=300)
        assert reply.status_code == 200, f"{path} {params}: {reply.status_code} {reply.text}"

    def _mismatch(self, prompt: Prompt, body: dict[str, Any]) -> str | None:
        """Return what is wrong with an answer; one that was aborted has nothing to compare."""
        (choice,) = body["choices"]
        if choice["finish_reason"] == "abort":
            return None
        return difference(self.references[prompt], scored(choice), ROUNDING)


def run(fleet: Fleet) -> None:
    loading = Loading(fleet)
    for way in WAYS:
        for mode in MODES:
            cores, loading.within = fleet.cores(), 0
            wrong = [mismatch for share in SHARES for mismatch in loading.interrupted(way, mode, share)]
            lost = fleet.lost_since(cores)
            seen = (
                f"{loading.within} of {len(SHARES)} before the first answer, loads take {loading.seconds:.1f} s; "
                f"{len(wrong)} answers wrong, {lost} lost"
            )
            held = not wrong and lost == 0 and loading.within > 0
            fleet.rows.add(PART, f"{way} with mode {mode} while prompts are loaded", seen, held)
            for line in wrong:
                print("     ", line, flush=True)
    fleet.rows.add(PART, "each engine answers", "", fleet.each_answers())
