"""Prefill and decode apart: the core of either engine is killed again and again while requests take two legs."""

from __future__ import annotations

import itertools
import queue
import signal
import threading
from dataclasses import dataclass
from typing import Any

import httpx
from reference_answers.margins import REQUEST, ROUNDING, difference, scored
from stack_driver.deadlines import eventually
from stack_driver.engine_client import EngineClient
from stack_driver.engine_metrics import Reading
from stack_driver.engine_processes import engine_core, vllm_group
from stack_driver.other_gateway import other_gateway, stack_models
from stack_driver.prompts import Prompt

from .fleet import Fleet

PART = "legs"
REQUESTS = 200
CLIENTS = 6
PROMPT_BLOCKS = 2
ANSWER_TOKENS = 8
REQUEST_SECONDS = 900.0  # a request waits for engines that start again, on a slow machine
ROLES = ("prefill", "decode")
# No bound of the gateway's ends a leg: what is shown is that nothing is lost, however slow the machine is.
DISAGGREGATION = {"mode": "always", "uncachedTokensMin": 64, "handOverSecondsMax": 30, "prefillSecondsMax": 600}


@dataclass
class Asked:
    prompt: Prompt
    choice: dict[str, Any] | None = None
    error: str = ""


def run(fleet: Fleet) -> None:
    fleet.ready()
    stack = fleet.stack
    models = stack_models(stack)
    for engine, role in zip(models[0]["engines"], ROLES, strict=True):
        engine["role"] = role
    stack.stored()
    asked = [Asked(stack.new_prompt(PROMPT_BLOCKS)) for _ in range(REQUESTS)]
    with other_gateway(stack, "gateway-of-two-legs", {"models": models, "disaggregation": DISAGGREGATION}) as url:
        eventually("the gateway knows the store that both load from", lambda: _reading(url, "shared_stores") == 2.0)
        kills = _ask_and_kill(fleet, url, asked)
        two_legs = _reading(url, "legs_total", decision="two")
    fleet.ready()

    failed = [one for one in asked if one.choice is None]
    seen = f"{len(failed)} failed; {two_legs:.0f} took two legs"
    fleet.rows.add(
        PART, f"{REQUESTS} requests, {kills} kills of either side in turn", seen, not failed and two_legs > 0
    )
    for one in failed[:8]:
        print("     ", one.error, flush=True)
    wrong = [text for one in asked if one.choice is not None and (text := _wrong(fleet, one)) is not None]
    fleet.rows.add(PART, "answers against computed ones", f"{len(wrong)} of {len(asked)} differ", not wrong)
    for text in wrong[:8]:
        print("     ", text, flush=True)


def _ask_and_kill(fleet: Fleet, url: str, asked: list[Asked]) -> int:
    """Ask everything; returns how many cores were killed meanwhile."""
    stack, left = fleet.stack, queue.SimpleQueue[Asked]()
    for one in asked:
        left.put(one)
    clients = [threading.Thread(target=_ask, args=(fleet, url, left), daemon=True) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    kills = 0
    for victim in itertools.cycle(range(len(ROLES))):
        before = stack.process(f"engine-{victim}")
        group, engine = vllm_group(before), stack.engines[victim]
        eventually("requests, or their end", lambda: left.empty() or engine.running() > 0, timeout_seconds=600)  # noqa: B023
        if left.empty():
            break
        engine_core(group).signal(signal.SIGKILL)
        kills += 1
        stack.local.wait_engine_ready(victim, not_process=before)
    for client in clients:
        client.join()
    return kills


def _ask(fleet: Fleet, url: str, left: queue.SimpleQueue[Asked]) -> None:
    client = EngineClient(url, fleet.model, fleet.stack.tier, request_seconds=REQUEST_SECONDS)
    while True:
        try:
            one = left.get_nowait()
        except queue.Empty:
            client.close()
            return
        try:
            one.choice = client.complete(one.prompt.tokens, ANSWER_TOKENS)["choices"][0]
        except httpx.HTTPStatusError as error:
            one.error = f"{error.response.status_code} {error.response.text[:300]}"
        except httpx.HTTPError as error:
            one.error = repr(error)


def _wrong(fleet: Fleet, one: Asked) -> str | None:
    """Say how the answer differs from one whose prompt was computed, under a salt that no other request has."""
    body = {"model": fleet.model, "prompt": list(one.prompt.tokens), "max_tokens": ANSWER_TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "cache_salt": f"legs {one.prompt.name}", **REQUEST}
    response = httpx.post(f"{fleet.stack.engines[0].url}/v1/completions", json=body, timeout=REQUEST_SECONDS)
    response.raise_for_status()
    assert one.choice is not None
    return difference(scored(response.json()["choices"][0]), scored(one.choice), ROUNDING)


def _reading(url: str, name: str, **labels: str) -> float:
    page = Reading.parse(httpx.get(f"{url}/metrics", timeout=120).text)
    prefix = "spillway_gateway_engine_" if name == "shared_stores" else "spillway_gateway_"
    return page.total(prefix + name, **labels)
