"""Two real engines of one vLLM and a gateway, with a model's folder of their own, so that its weights may change."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from stack_driver.deadlines import eventually
from stack_driver.engine_processes import engine_core, vllm_group
from stack_driver.running_stack import RunningStack

from spillway_stack.bundled_model import SERVED_NAME, prepare
from spillway_stack.processes import ProcessIdentity

from .rows import Rows

# Starts are many, and what the start-up check finds is shown elsewhere.
OVERRIDES = ("lifecycle.selfCheck=off",)
_WORDS = ("river", "stone", "lamp", "glass", "wind", "copper", "field", "paper", "salt", "winter", "signal", "garden")


@dataclass
class Fleet:
    stack: RunningStack
    rows: Rows

    @property
    def model(self) -> str:
        return self.stack.model

    @property
    def gateway(self) -> str:
        return self.stack.local.gateway_url

    def core(self, index: int) -> ProcessIdentity:
        return engine_core(vllm_group(self.stack.process(f"engine-{index}")))

    def cores(self) -> list[ProcessIdentity]:
        return [self.core(index) for index in range(len(self.stack.engines))]

    def lost_since(self, cores: list[ProcessIdentity]) -> int:
        return sum(not core.is_alive() for core in cores)

    def each_answers(self) -> bool:
        """Whether each engine answers an ordinary request, and the gateway too."""
        body = {"model": self.model, "prompt": [504, 3575, 282, self._any_token()], "max_tokens": 2, "temperature": 0}
        urls = [*(engine.url for engine in self.stack.engines), self.gateway]
        return all(httpx.post(f"{url}/v1/completions", json=body, timeout=120).status_code == 200 for url in urls)

    def ready(self) -> None:
        eventually("every component is ready", lambda: all(one.ready for one in self.stack.local.status()), 600.0)

    @staticmethod
    def _any_token() -> int:
        return random.randrange(1_000, 40_000)


def words(name: str, count: int) -> str:
    """A text that no other name begins with."""
    chance = random.Random(name)
    return f"{name}: " + " ".join(chance.choice(_WORDS) for _ in range(count))


@contextmanager
def fleet(vllm: str, folder: Path, overrides: tuple[str, ...]) -> Iterator[Fleet]:
    """overrides: of the engines, as StackSettings.engine_overrides."""
    model = folder / SERVED_NAME
    shutil.copytree(prepare(print), model)
    kept: dict[str, Any] = {name: os.environ.get(name) for name in ("MODEL",)}
    os.environ["MODEL"] = str(model)
    try:
        stack = RunningStack.start("nvme", folder / "stack", vllm=(vllm,), overrides=(*OVERRIDES, *overrides))
    finally:
        for name, value in kept.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
    try:
        yield Fleet(stack, Rows(vllm))
    finally:
        stack.close()
        shutil.rmtree(stack.local.folder.nvme, ignore_errors=True)
