"""Whether loading a chunk beats computing it again, from rates measured while serving.

A tier that is slower than the device's own prefill makes every hit a loss (vllm#44294: -40.7 % throughput; on one
H200 vLLM's file tier took 4.2 s for what the GPU recomputes in 2.0 s: docs/benchmarks.md). Pure: time is an
argument.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

_STEPS_MAX = 64  # vLLM keeps at most a handful of steps in flight
BEHIND_SHARE = 0.03  # of the time to compute what is loaded
LATENCY_SECONDS_MAX = 0.1  # a request that took longer waited behind the rest of other loads on the path
BEHIND_SECONDS_MIN = 0.05  # a few steps of a scheduler, which looks once a step
_PREFILL_TOKENS_MIN = 128  # a step with fewer mostly decodes: no measure of the prefill rate


@dataclass(frozen=True, slots=True)
class LoadPolicy:
    """The comparison of the two rates; its values are engineering choices, not measurements."""

    margin: float = 0.9  # load while it takes at most this share of the recomputation's time
    half_life_seconds: float = 10.0  # of a measurement: the rates of links and machines vary
    probe_seconds: float = 30.0  # a tier judged too slow gets one request's loads this often, to be measured again


class RateMeter:
    """Amount per second, exponentially weighted: `sum(w * amount) / sum(w * seconds)`, `w = 0.5 ** (age / half_life)`.

    per_second: the measured rate; None before the first measurement. It is read several times a step, and changes when
    a measurement is added: both sums decay alike, so their ratio survives a long pause.

    pinned: a rate to answer instead of the measured one.
    """

    def __init__(self, half_life_seconds: float, pinned: float | None = None) -> None:
        self._half_life_seconds = half_life_seconds
        self._pinned = pinned
        self.per_second = pinned
        self._amount = 0.0
        self._seconds = 0.0
        self.updated_at: float | None = None  # the end of the last measurement

    def replace(self, amount: float, seconds: float, now: float) -> None:
        """Add a measurement as :meth:`add` does, and drop all earlier ones."""
        self._amount = self._seconds = 0.0
        self.per_second = self._pinned
        self.add(amount, seconds, now)

    def add(self, amount: float, seconds: float, now: float) -> None:
        """`amount` took `seconds`, ending `now`. Spans without duration or amount are ignored: they give no rate."""
        if seconds <= 0.0 or amount <= 0.0:
            return
        if self.updated_at is not None:
            decay = 0.5 ** (max(0.0, now - self.updated_at) / self._half_life_seconds)
            self._amount *= decay
            self._seconds *= decay
        self._amount += amount
        self._seconds += seconds
        self.updated_at = now
        if self._pinned is None:
            # Below this both are rounding errors.
            self.per_second = self._amount / self._seconds if self._seconds > 1e-12 else None


class _Step(NamedTuple):
    begun_at: float
    tokens: int


class PrefillTimer:
    """Measures `rate` in tokens per second over the engine's steps, which may overlap."""

    def __init__(self, rate: RateMeter) -> None:
        self._rate = rate
        self._steps: deque[_Step] = deque(maxlen=_STEPS_MAX)  # begun and not ended
        self._last_ended_at = 0.0

    def begin_step(self, tokens: int, now: float) -> None:
        """The scheduler hands a step with this number of tokens to the workers."""
        self._steps.append(_Step(now, tokens))

    @property
    def tokens_under_way(self) -> int:
        """The tokens of steps begun and not ended."""
        return sum(step.tokens for step in self._steps)

    def leave_out_step(self) -> None:
        """The step begun last does more than compute: no measure of the prefill rate."""
        self._steps[-1] = self._steps[-1]._replace(tokens=0)

    def end_step(self, now: float) -> None:
        """The workers have reported the oldest step; under async scheduling it ran from the end of the one before."""
        if not self._steps:
            return
        begun_at, tokens = self._steps.popleft()
        if tokens >= _PREFILL_TOKENS_MIN:
            self._rate.add(tokens, now - max(begun_at, self._last_ended_at), now)
        self._last_ended_at = now


def loading_pays(
    tokens: int,
    size_bytes: int,
    prefill_tokens_per_second: float | None,
    load_bytes_per_second: float | None,
    margin: float,
) -> bool:
    """Whether `size_bytes / load rate <= margin * tokens / prefill rate`.

    The break-even of fetching a cached prefix against recomputing it, without the queueing of either. An unknown rate
    (None) counts as fast: loading is how it gets measured, and the request's deadline bounds the cost.
    """
    if prefill_tokens_per_second is None or load_bytes_per_second is None:
        return True
    return size_bytes / load_bytes_per_second <= margin * tokens / prefill_tokens_per_second


def behind_after(received_chunks: float, chunks: int, seconds_per_chunk: float, latency_seconds: float) -> float:
    """Return the seconds after which a load is to be given up because computing has overtaken it, if no more arrives.

    During BEHIND_SHARE of the time that computing all of it would take, the load is not judged; after that more must
    have arrived than would have been computed. So a load that is too slow from its beginning costs that share, whatever
    rate the tier was believed to reach. An unmeasured tier is tried at the same price.

    Args:
        received_chunks: chunks of any load that have arrived since the load was begun, parts of chunks included.
        chunks: the number of chunks to load.
        seconds_per_chunk: to compute one.
        latency_seconds: the latency of one request to the tier, during which nothing can arrive.
    """
    nothing_yet = 2 * min(latency_seconds, LATENCY_SECONDS_MAX)
    free = max(BEHIND_SECONDS_MIN + nothing_yet, BEHIND_SHARE * chunks * seconds_per_chunk)
    return max(free, nothing_yet + received_chunks * seconds_per_chunk)


class GateReading(NamedTuple):
    """One tier's gate, for metrics. load_rate: bytes per second that loads have reached; None: not measured."""

    tier: str
    load_rate: float | None
    pays: bool


class Gate(Protocol):
    """Whether requests may load from a tier now. load_rate: what loads from it have reached."""

    load_rate: RateMeter

    def pays(self, prefill_rate: RateMeter, /) -> bool: ...

    def measured(self, now: float, /) -> None: ...

    def given_up(self, chunks: float, seconds: float, now: float, /) -> None: ...

    def passes(self, request_id: str, prefill_rate: RateMeter, now: float, /) -> bool: ...

    def readings(self, tier: str, prefill_rate: RateMeter, /) -> Sequence[GateReading]: ...


class LoadGate:
    """Open while loading from one tier pays; when it does not, opens for one request every `probe_seconds`."""

    def __init__(self, policy: LoadPolicy, tokens_per_chunk: int, bytes_per_chunk: int, load_rate: RateMeter) -> None:
        self.load_rate = load_rate
        self._policy = policy
        self._tokens = tokens_per_chunk
        self._bytes = bytes_per_chunk
        self._probed_at: float | None = None
        self._probing_request: str | None = None

    def pays(self, prefill_rate: RateMeter) -> bool:
        """Whether any request may load from the tier now."""
        return loading_pays(
            self._tokens, self._bytes, prefill_rate.per_second, self.load_rate.per_second, self._policy.margin
        )

    def measured(self, now: float) -> None:
        """The rate was measured without a request that waited for all of its loads; the next probe can wait."""
        self._probed_at = now

    def given_up(self, chunks: float, seconds: float, now: float) -> None:
        """A load was given up after it had received this number of chunks; they determine the tier's rate from now
        on."""
        self.load_rate.replace(max(chunks * self._bytes, 1.0), seconds, now)
        self.measured(now)

    def passes(self, request_id: str, prefill_rate: RateMeter, now: float) -> bool:
        """Whether this request may load from the tier now."""
        if self.pays(prefill_rate):
            self._probing_request = None
            return True
        if request_id == self._probing_request:
            return True
        if self._probed_at is None or now - self._probed_at >= self._policy.probe_seconds:
            self._probed_at, self._probing_request = now, request_id
            return True
        return False

    def readings(self, tier: str, prefill_rate: RateMeter) -> list[GateReading]:
        """The figures to report of each tier behind this gate. tier: the name of the only one."""
        return [GateReading(tier, self.load_rate.per_second, self.pays(prefill_rate))]


class JointGate:
    """The gate of tiers that stand behind each other: open while loading from any of them pays, as their gates say.

    Args:
        names: The names of the tiers, in their order.
        members: A gate for each tier.
        load_rate: What loads have reached, whichever tier they came from.
    """

    def __init__(self, names: Sequence[str], members: Sequence[LoadGate], load_rate: RateMeter) -> None:
        self._names = names
        self.members = members
        self.load_rate = load_rate

    def pays(self, prefill_rate: RateMeter) -> bool:
        """Whether any request may load from one of the tiers now."""
        return any(gate.pays(prefill_rate) for gate in self.members)

    def measured(self, now: float) -> None:
        """See LoadGate.measured."""
        for gate in self.members:
            gate.measured(now)

    def given_up(self, chunks: float, seconds: float, now: float) -> None:
        """See LoadGate.given_up; the chain tells the gate of the tier that it concerns."""
        raise AssertionError("a load from a chain is given up in one of its tiers")

    def passes(self, request_id: str, prefill_rate: RateMeter, now: float) -> bool:
        """Whether this request may load from one of the tiers now."""
        return any([gate.passes(request_id, prefill_rate, now) for gate in self.members])

    def readings(self, tier: str, prefill_rate: RateMeter) -> list[GateReading]:
        """See LoadGate.readings; of each member, under its own name."""
        pairs = zip(self._names, self.members, strict=True)
        return [reading for name, gate in pairs for reading in gate.readings(name, prefill_rate)]

    def open_members(self, request_id: str, prefill_rate: RateMeter, now: float) -> list[int]:
        """The positions of the tiers from which this request may load now: all of them if every gate is closed and the
        request was admitted nevertheless."""
        found = [number for number, gate in enumerate(self.members) if gate.passes(request_id, prefill_rate, now)]
        return found or list(range(len(self.members)))
