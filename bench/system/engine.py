"""A simulated engine with the tiers and the queue of one design."""

from __future__ import annotations

from itertools import islice

from spillway_connector.plan.step_shares import Party
from spillway_settings.queue_order import CANDIDATES_MAX, admission_order
from spillway_simulator.model.engine import EngineShape
from spillway_simulator.model.rates import EngineRates
from spillway_simulator.model.request import EngineRequest, Progress, Sequence
from spillway_simulator.model.tiering import Tiering
from spillway_simulator.model.tiers import SharedTier
from system.agent_request import AgentRequest
from system.design import Design, Storing
from system.fair_engine import FairEngine
from system.memory import KeepingDevice, NodeRows, ProductRows, SystemTiers
from system.rates import ENDLESS_ROWS


class SystemEngine(FairEngine):
    def __init__(
        self,
        name: str,
        shape: EngineShape,
        rates: EngineRates,
        design: Design,
        shared: SharedTier | None = None,
        *,
        node: NodeRows | None = None,
    ) -> None:
        self._design = design
        self._node = node
        self._kept: dict[str, tuple[list[int], list[int]]] = {}  # by request: blocks kept on the device and in the tier
        super().__init__(name, shape, rates, shared, fair_steps=design.fair_steps)

    def _new_device(self) -> KeepingDevice:
        self.keeping = KeepingDevice(self.shape.device_blocks)
        return self.keeping

    def _new_tiers(self) -> Tiering:
        rows = self.shape.cpu_blocks
        if self._design.storing is Storing.NEVER:
            rows = 0
        elif self._design.endless:
            rows = ENDLESS_ROWS
        self.system_tiers = SystemTiers(
            self._design,
            self.keeping,
            ProductRows(rows) if self._node is None else self._node,
            block_tokens=self.shape.block_tokens,
            shared=self._shared,
            rates=self.rates,
            counters=self.counters,
            emit=self._events.append,
            announce_shared=self.shape.announce_shared,
        )
        return self.system_tiers

    def restart(self) -> None:
        if self._node is not None:
            for _, in_tier in self._kept.values():
                self._node.unpin(in_tier)
            for _, _, _, plan in self._loading:
                self._node.unpin(plan.cpu_keys)
        self.close()
        self._kept.clear()
        super().restart()

    def close(self) -> None:
        if self._node is None:
            self.system_tiers.cpu.close()

    def held_tokens(self, keys: list[int], limit: int) -> int:
        """Return the number of tokens that a prompt would find now, on the device and in the CPU tier."""
        cpu = self.system_tiers.cpu
        found = next((at for at, key in enumerate(keys[:limit]) if key not in self.device and key not in cpu), limit)
        return found * self.shape.block_tokens

    def party(self, request: EngineRequest) -> Party:
        """All are of one tenant."""
        assert isinstance(request, AgentRequest)
        return Party(b"", request.program.encode())

    def submit(self, request: EngineRequest, now: float) -> None:
        assert isinstance(request, AgentRequest)
        super().submit(request, now)
        self.system_tiers.cpu.now = now
        self.system_tiers.begin_request(request, self._sequences[request.id].keys)
        self._keep_for_waiting()

    def _limit(self, sequence: Sequence) -> int:
        return (sequence.prompt_tokens - 1) // self.shape.block_tokens

    def _keep_for_waiting(self) -> None:
        """Keep what waiting requests would find, first come, first served, within the protected share of the tier."""
        if not self._design.protect_share:
            return
        cpu = self.system_tiers.cpu
        room = int(self._design.protect_share * cpu.capacity)
        for sequence in [*self._waiting, *(arriving for _, arriving in self._arriving)]:
            if sequence.request.id in self._kept:
                continue
            if len(cpu.pinned) >= room:
                break
            found = self.held_tokens(sequence.keys, self._limit(sequence)) // self.shape.block_tokens
            prefix = sequence.keys[:found]
            on_device = [key for key in prefix if key in self.device]
            in_tier = [key for key in prefix if key in cpu]
            self.keeping.keep(on_device)
            cpu.pin(in_tier)
            self._kept[sequence.request.id] = on_device, in_tier

    def _next_waiting(self, now: float) -> Sequence:
        if not self._design.overtake_seconds:
            return self._waiting[0]
        candidates = list(islice(self._waiting, CANDIDATES_MAX))

        def tokens_at_hand(position: int) -> int:
            return self.held_tokens(candidates[position].keys, self._limit(candidates[position]))

        arrived_at = [waiting.submitted_at for waiting in candidates]
        return candidates[admission_order(arrived_at, tokens_at_hand, now, self._design.overtake_seconds)[0]]

    def _turn(self, now: float, progress: list[Progress]) -> None:
        self.system_tiers.cpu.now = now
        super()._turn(now, progress)

    def _finish(self, sequence: Sequence) -> None:
        super()._finish(sequence)
        keys = sequence.generated_keys(self.shape.block_tokens)
        self.system_tiers.end_request(sequence.request.id, keys)

    def _admit(self, sequence: Sequence, now: float) -> bool:
        self.system_tiers.admitting(sequence.request.id)
        if not super()._admit(sequence, now):
            return False
        self.system_tiers.on_device(sequence.held)
        kept = self._kept.pop(sequence.request.id, None)
        if kept is not None:
            on_device, in_tier = kept
            self.keeping.let_go(on_device)
            self.system_tiers.cpu.unpin(in_tier)
        return True

    def _begin_step(self, now: float) -> None:
        if self._design.storing is Storing.EXCLUSIVE:
            self.system_tiers.store_leaving(now)
        super()._begin_step(now)
        self._keep_for_waiting()
        if self._design.storing is Storing.LAZY:
            self.system_tiers.store_leaving(now)
