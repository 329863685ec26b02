"""Weights changed in place over HTTP, with requests before, between, across and after each kind of reset.

A reference is the same engine's answer under a cache salt that was never used: nothing cached can be in it. Only the
last engine of the fleet is changed; its shared tier is closed by it until it is started again.
"""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import httpx
import torch
from reference_answers.margins import REQUEST, Scored, difference, scored
from safetensors.torch import load_file, save_file
from stack_driver.prompts import Prompt

from .fleet import Fleet

PART = "weights"
ROUNDING = 0.25  # between a prompt computed whole and one computed behind a hit, in a batch of another size
NOISE = 0.3  # of a matrix's own deviation: every answer becomes another one
ANSWER_TOKENS = 4
BLOCKS = 2
ACROSS_TOKENS = 30
READ_ONLY = ("compute_weight_checksums", "get_model_inspection")  # of vLLM 0.32
RESETS: dict[str, list[tuple[str, dict[str, str]]]] = {
    "reset_prefix_cache": [("/reset_prefix_cache", {})],
    "reset_external": [("/reset_prefix_cache", {"reset_external": "true"})],
    "reset_running_requests": [("/reset_prefix_cache", {"reset_running_requests": "true"})],
    "both": [("/reset_prefix_cache", {"reset_running_requests": "true", "reset_external": "true"})],
    "pause and resume": [("/pause", {"mode": "abort"}), ("/resume", {})],
}
RUNNING_ALLOWED = ("reset_running_requests", "both", "pause and resume")


class Weights:
    """Two sets of them, and which one lies in the model's folder. Replaced by renaming, as a trainer does."""

    def __init__(self, folder: Path) -> None:
        self._place = folder / "model.safetensors"
        self._first, self._second = folder.parent / "first.safetensors", folder.parent / "second.safetensors"
        shutil.copyfile(self._place, self._first)
        rng = torch.Generator().manual_seed(1)
        tensors = {
            name: (tensor + NOISE * tensor.float().std() * torch.randn(tensor.shape, generator=rng)).to(tensor.dtype)
            if tensor.dim() == 2
            else tensor
            for name, tensor in load_file(self._first).items()
        }
        save_file(tensors, self._second, metadata={"format": "pt"})

    def put(self, second: bool) -> None:
        beside = self._place.with_name("replacement")
        shutil.copyfile(self._second if second else self._first, beside)
        beside.replace(self._place)


class Changed:
    """The engine whose weights change."""

    def __init__(self, fleet: Fleet) -> None:
        self._engine = fleet.stack.engines[-1]
        self._model = fleet.model
        self.index = len(fleet.stack.engines) - 1

    def post(self, path: str, params: dict[str, str] | None = None, body: object = None) -> httpx.Response:
        return httpx.post(f"{self._engine.url}{path}", params=params, json=body, timeout=600)

    def call(self, method: str) -> None:
        self.post("/collective_rpc", body={"method": method}).raise_for_status()

    def ask(self, prompt: Prompt, salt: str | None = None, tokens: int = ANSWER_TOKENS) -> tuple[Scored, int]:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(prompt.tokens),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            **REQUEST,
        }
        reply = self.post("/v1/completions", body=body if salt is None else {**body, "cache_salt": salt})
        reply.raise_for_status()
        document = reply.json()
        cached = (document["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return scored(document["choices"][0]), int(cached)

    def tier_closed(self) -> bool:
        return self._engine.metrics().total("spillway_tier_weights_changed") > 0


def run(fleet: Fleet) -> None:
    changed = Changed(fleet)
    cores = fleet.cores()
    if fleet.rows.vllm != "0.23":
        _read_only(fleet, changed)
    weights = Weights(Path(fleet.stack.local.model.folder))
    second = False
    for number, way in enumerate(RESETS):
        second = not second
        _change(fleet, changed, weights, way, number, second)
    weights.put(False)
    fleet.rows.add(
        PART, "the shared tier is closed by a change of weights", changed.tier_closed(), changed.tier_closed()
    )
    lost = fleet.lost_since(cores)
    fleet.rows.add(PART, "engines lost", lost, lost == 0)
    fleet.stack.local.restart_engine(changed.index)
    fleet.ready()
    fleet.rows.add(PART, "started again, the shared tier is open", not changed.tier_closed(), not changed.tier_closed())


def _read_only(fleet: Fleet, changed: Changed) -> None:
    for method in READ_ONLY:
        changed.call(method)
    closed = changed.tier_closed()
    known = fleet.stack.compute_and_store(fleet.stack.engines[0])
    answer = fleet.stack.ask_shared(fleet.stack.engines[-1], known)
    seen = f"closed: {closed}, {answer.cached_tokens} tokens from {answer.source}"
    fleet.rows.add(PART, " and ".join(READ_ONLY), seen, not closed and answer.source == "shared")


def _change(fleet: Fleet, changed: Changed, weights: Weights, way: str, number: int, second: bool) -> None:
    before, between, across, after = (fleet.stack.new_prompt(BLOCKS) for _ in range(4))
    old, _ = changed.ask(before)
    changed.ask(before)
    running = threading.Thread(target=_quietly, args=(changed, across))
    running.start()
    weights.put(second)
    changed.call("reload_weights")
    if way not in RUNNING_ALLOWED:
        running.join()
    _, kept = changed.ask(before)  # vLLM's own device cache still has the old blocks
    changed.ask(between)
    for path, params in RESETS[way]:
        reply = changed.post(path, params)
        assert reply.status_code == 200, f"{path} {params}: {reply.status_code} {reply.text}"
    running.join()
    wrong: list[str] = []
    hits = 0
    for turn in range(2):  # computed, then a hit of what the CPU tier keeps
        for name, prompt in (("before", before), ("between", between), ("across", across), ("after", after)):
            answer, cached = changed.ask(prompt)
            hits += bool(cached) and turn == 1
            reference, uncached = changed.ask(prompt, salt=f"{number} {turn} {name}")
            assert uncached == 0, f"the reference of {name} had {uncached} tokens cached"
            mismatch = difference(reference, answer, ROUNDING)
            if mismatch is not None:
                wrong.append(f"{way}, turn {turn}, {name}, {cached} cached: {mismatch}")
        if turn == 0:
            changed.post("/reset_prefix_cache").raise_for_status()
    apart = difference(old, changed.ask(before, salt=f"{number} apart")[0], ROUNDING) is not None
    assert apart, "the two sets of weights answer alike, so nothing is shown"
    seen = f"{len(wrong)} of 8 wrong, {hits} hits; {kept} old tokens hit before the reset"
    fleet.rows.add(PART, f"before, between, across and after {way}", seen, not wrong and hits > 0)
    for line in wrong:
        print("     ", line, flush=True)


def _quietly(changed: Changed, prompt: Prompt) -> None:
    """A request that a reset or a pause may abort."""
    try:
        changed.ask(prompt, tokens=ACROSS_TOKENS)
    except httpx.HTTPStatusError:
        return
