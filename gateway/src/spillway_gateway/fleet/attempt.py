"""One request on one engine. An Attempt counts on the engine that it was opened on: when an engine is replaced, old
attempts close against the old object, and the counters of the new one never go below zero."""

from __future__ import annotations

from collections.abc import Callable

from spillway_gateway.fleet.engine import Engine
from spillway_gateway.fleet.hand_over import Awaited
from spillway_gateway.fleet.prefill_queue import ColdPrompt
from spillway_gateway.fleet.routed_blocks import RoutedBlocks
from spillway_gateway.routing.fleet_view import NOTHING_HELD
from spillway_gateway.routing.load import load_time_ms, shared_time_ms
from spillway_gateway.routing.route import Decision


class Attempt:
    """One request on one engine, counted from creation to close(). Each method may be called more than once.

    On the event loop only. now: monotonic seconds. routed: the prompt's blocks, None if it has none.
    """

    __slots__ = (
        "_ahead_tokens",
        "_awaited",
        "_closed",
        "_computed_tokens",
        "_dequeued",
        "_held",
        "_probe",
        "_queued",
        "_routed",
        "_started",
        "decision",
        "engine",
        "failed_at",
    )

    def __init__(
        self,
        engine: Engine,
        decision: Decision,
        now: float,
        routed: RoutedBlocks | None = None,
        dequeued: Callable[[Engine], None] = lambda engine: None,
        *,
        cold: ColdPrompt | None = None,
        awaited: Awaited | None = None,
    ) -> None:
        """dequeued: called when the prompt leaves the engine's queue. cold: the prompt, if its engine computes
        it for long. awaited: the wait for the first token of a second leg."""
        self.engine = engine
        self._awaited = awaited
        self._dequeued = dequeued
        self._routed = routed
        self.decision = decision
        self._ahead_tokens = engine.prefills.tokens
        self._queued = decision.uncached_tokens
        self._held = decision.held
        self._probe = engine.breaker.sent()
        self._started = now
        self._closed = False
        self._computed_tokens = 0
        self.failed_at: float | None = None  # monotonic seconds; None: its engine has not failed
        engine.running_requests += 1
        engine.prefills.add(self, self._queued, cold)
        engine.resident_tokens += self._queued
        rates, held = engine.rates, self._held
        engine.means.sent(self._queued)
        engine.means.found(held.device_tokens, held.cpu_tokens + held.shared_tokens, load_time_ms(held, rates))
        engine.cpu_link_tokens += held.cpu_tokens
        engine.shared_link_tokens += held.shared_tokens
        engine.below_link_tokens += held.below_tokens
        if held.shared_tokens:
            engine.shared_busy.add(shared_time_ms(held, rates) / 1000.0, now)
        engine.busy.add(self._queued / rates.prefill_tokens_per_second, now)

    @property
    def expected_prefill_seconds(self) -> float:
        """Return the time until the prompt is computed, from the engine's rate and what was queued before it."""
        return (self._ahead_tokens + self._queued) / self.engine.rates.prefill_tokens_per_second

    def accepted(self, now: float) -> None:
        """The engine has answered that it takes the prompt: it will hold its blocks."""
        routed, self._routed = self._routed, None
        if routed is not None:
            routed.accepted(now)

    def prefill_assumed(self) -> None:
        """A reply that does not stream has no early first byte: its prompt leaves the queue when its prefill should be
        done."""
        self._dequeue()

    def counted(self, computed_tokens: int) -> None:
        """The engine has said how many tokens of the prompt it computed; all, if it never reports cached ones."""
        self._computed_tokens = min(computed_tokens, self.decision.uncached_tokens)

    def computed(self) -> None:
        """The engine has its first token, though the client may see none for long: hidden reasoning, for example."""
        if self._awaited is not None:
            self._awaited.ended(came=True)

    def first_byte(self, now: float, *, measures_prefill: bool) -> None:
        """The prefill is over. measures_prefill: the reply streams, so the wait was queue and prefill alone."""
        if not self._queued:
            return
        if measures_prefill:
            self.engine.prefill.sample(self._ahead_tokens + self._queued, now - self._started)
            self.computed()
        self._dequeue()

    def began(self) -> None:
        """The reply's first byte has arrived."""
        if self._probe:
            self.engine.breaker.probe_began()

    def succeeded(self) -> None:
        """The engine answered this request properly, to its end."""
        self.engine.breaker.succeeded(probe=self._probe)
        self._probe = False

    def failed(self, now: float) -> None:
        """The engine failed, not the request."""
        self.failed_at = now
        self.engine.breaker.failed(now)
        self.engine.failed_at.append(now)

    def close(self, now: float | None = None) -> None:
        """now: the time, given for a whole reply, which then counts in the mean duration of requests."""
        if self._closed:
            return
        self._closed = True
        self._dequeue()
        if self._routed is not None:
            self._routed.withdraw()
            self._routed = None
        engine = self.engine
        if self._probe:
            engine.breaker.probe_ended()
        engine.running_requests -= 1
        engine.resident_tokens -= self.decision.uncached_tokens
        if not engine.running_requests:
            engine.on_idle()
        if now is not None:
            engine.served(self._computed_tokens, now - self._started)

    def _dequeue(self) -> None:
        if not self._queued:
            return
        engine = self.engine
        engine.prefills.remove(self)
        engine.cpu_link_tokens -= self._held.cpu_tokens
        engine.shared_link_tokens -= self._held.shared_tokens
        engine.below_link_tokens -= self._held.below_tokens
        self._queued = 0
        self._held = NOTHING_HELD
        if self._awaited is not None:
            self._awaited.ended(came=False)
        self._dequeued(engine)
