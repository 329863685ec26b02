"""A simulated engine whose steps the connector's own rule fills."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from spillway_connector.plan.step_shares import Party, StepShares
from spillway_simulator.model.engine import EngineShape, SimulatedEngine
from spillway_simulator.model.rates import EngineRates
from spillway_simulator.model.request import EngineRequest, Sequence


class FairEngine(SimulatedEngine):
    """An engine that leaves a flood's prompts out of others' steps, as vLLM with engine/features/fair_steps.py."""

    def __init__(
        self, name: str, shape: EngineShape, rates: EngineRates, *shared: Any, fair_steps: bool = True
    ) -> None:
        super().__init__(name, shape, rates, *shared)
        self._fair_steps = fair_steps
        self._shares = StepShares(shape.max_batched_tokens)
        self._whole_shape = shape
        self._computed: Counter[Party] = Counter()  # prompt tokens of the step that is being made

    def party(self, request: EngineRequest) -> Party:
        """The salt is `tenant/session`."""
        tenant, _, session = (request.salt or "").partition("/")
        return Party(tenant.encode(), session.encode())

    def submit(self, request: EngineRequest, now: float) -> None:
        super().submit(request, now)
        self._shares.came(self.party(request), now)

    def _party(self, sequence: Sequence) -> Party:
        return self.party(sequence.request)

    def _prefill(self, sequence: Sequence, tokens: int, step: Any) -> float:
        self._computed[self._party(sequence)] += tokens
        return super()._prefill(sequence, tokens, step)

    def _begin_step(self, now: float) -> None:
        if not self._fair_steps:
            super()._begin_step(now)
            return
        while not self._begin_fair_step(now):  # vLLM plans again at once
            pass

    def _begin_fair_step(self, now: float) -> bool:
        """Begin a step of fair shares. Returns False if some prompts were left out, and there was no room for any of
        the others."""
        prompts = [each for each in (*self._running, *self._waiting) if not each.generated]
        self._computed.clear()
        present = set(map(self._party, (*self._running, *self._waiting)))
        step = self._shares.next_step(set(map(self._party, prompts)), now, present)
        if step is None:
            super()._begin_step(now)
        else:
            held_running = [
                each
                for each in self._running
                if (self._party(each) in step.pauses if each.generated else self._party(each) not in step.parties)
            ]
            held_waiting = [each for each in self._waiting if not (step.begins and self._party(each) in step.parties)]
            self._running = [each for each in self._running if each not in held_running]
            for each in held_waiting:
                self._waiting.remove(each)
            if step.tokens is not None:
                decoding = sum(1 for each in self._running if each.generated)
                tokens = min(self._whole_shape.max_batched_tokens, decoding + step.tokens)
                self.shape = replace(self._whole_shape, max_batched_tokens=tokens)
            super()._begin_step(now)
            self.shape = self._whole_shape
            self._running += held_running
            self._waiting += held_waiting
        self._shares.computed(self._computed, now)
        if step is None:
            return True
        if not any(self._computed[party] for party in step.parties):
            self._shares.passed_over(step.parties)
        if self._step is not None:
            self._step.count = 1  # prompts that were left out may be computed in the next one
        return self._step is not None
