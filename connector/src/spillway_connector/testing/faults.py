"""Tiers with something wrong, each a thing with a name. They wrap any tier; those that draw lots take a seed."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection, Sequence

from typing_extensions import override

from spillway_connector.errors import RefusedReason, TierError, TierRefused
from spillway_connector.namespace import Namespace
from spillway_connector.testing.clock import SteppedClock
from spillway_connector.tiers.memory import MemoryStore, MemoryTier
from spillway_connector.tiers.tier import NO_TENANT, BlockInMemory, Clock, StoreOutcome, Tier, WrappedTier
from spillway_connector.transfer.stats import Operation

ALL_OPERATIONS = frozenset(Operation)


class TierWrapper(WrappedTier):
    """Passes everything on; subclasses do something in :meth:`before`, which may raise."""

    def __init__(self, tier: Tier, operations: Collection[Operation] = ALL_OPERATIONS) -> None:
        super().__init__(tier, tier.payload_bytes)
        self.operations = frozenset(operations)
        self.calls: dict[Operation, int] = dict.fromkeys(Operation, 0)
        self._calls_lock = threading.Lock()

    has_local_index = False  # so that lookups go through `contains`, where faults are injected

    @override
    def contains_now(self, keys: Sequence[bytes]) -> list[bool] | None:
        return None

    def before(self, operation: Operation) -> None:
        """Called for the chosen operations ahead of the real one."""

    @override
    def contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        self._enter(Operation.LOOKUP)
        return self.tier.contains(keys, deadline)

    def load(self, key: bytes, target: memoryview, deadline: float) -> None:
        self._enter(Operation.LOAD)
        self.tier.load(key, target, deadline)

    def in_memory(self, key: bytes, deadline: float) -> BlockInMemory | None:
        """Return None, so that loads go through :meth:`load`, where faults are injected."""
        return None

    def store(self, key: bytes, source: memoryview, deadline: float, tenant: bytes = NO_TENANT) -> StoreOutcome:
        self._enter(Operation.STORE)
        return self.tier.store(key, source, deadline, tenant)

    def _enter(self, operation: Operation) -> None:
        with self._calls_lock:
            self.calls[operation] += 1
        if operation in self.operations:
            self.before(operation)


class SlowTier(TierWrapper):
    """Every chosen operation takes ``seconds`` of a stepped clock, without waiting for real."""

    def __init__(
        self, tier: Tier, clock: SteppedClock, seconds: float, operations: Collection[Operation] = ALL_OPERATIONS
    ) -> None:
        super().__init__(tier, operations)
        self._clock = clock
        self._seconds = seconds

    @override
    def before(self, operation: Operation) -> None:
        self._clock.advance(self._seconds)


class Throttle:
    """Lets all threads together pass ``bytes_per_second``, one after the other."""

    def __init__(
        self, bytes_per_second: float, *, clock: Clock = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.bytes_per_second = bytes_per_second
        self._clock, self._sleep = clock, sleep
        self._free_at = clock()
        self._turn = threading.Lock()

    def wait(self, size_bytes: int) -> None:
        """Wait until so many bytes have passed, behind those of earlier calls."""
        with self._turn:
            now = self._clock()
            self._free_at = max(self._free_at, now) + size_bytes / self.bytes_per_second
            seconds = self._free_at - now
        self._sleep(seconds)


class ThrottledTier(TierWrapper):
    """The chosen operations of all threads together move no more payload than ``throttle`` lets pass."""

    def __init__(self, tier: Tier, throttle: Throttle, operations: Collection[Operation] = ALL_OPERATIONS) -> None:
        super().__init__(tier, operations)
        self._throttle = throttle

    @override
    def before(self, operation: Operation) -> None:
        self._throttle.wait(self.payload_bytes)


class HangingTier(TierWrapper):
    """Every chosen operation hangs, deadline or not, like a hung mount, until :meth:`release`.

    The operation then goes on as if nothing had been: the late completion that must do no harm.
    """

    def __init__(self, tier: Tier, operations: Collection[Operation] = ALL_OPERATIONS) -> None:
        super().__init__(tier, operations)
        self.entered = threading.Semaphore(0)  # one permit per operation that hangs
        self._released = threading.Event()

    @override
    def before(self, operation: Operation) -> None:
        self.entered.release()
        self._released.wait()

    def release(self) -> None:
        self._released.set()

    def hold(self) -> None:
        """Hang again from now on."""
        self._released.clear()


class StuckKeysTier(HangingTier):
    """Loads and look-ups of some keys never come back, like a file on a disk that fails; all others work."""

    def __init__(self, tier: Tier, stuck: Collection[bytes]) -> None:
        super().__init__(tier, ())
        self.stuck = set(stuck)

    @override
    def load(self, key: bytes, target: memoryview, deadline: float) -> None:
        if key in self.stuck:
            self.before(Operation.LOAD)
        super().load(key, target, deadline)

    @override
    def contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        if self.stuck.intersection(keys):
            self.before(Operation.LOOKUP)
        return super().contains(keys, deadline)

    @override
    def store(self, key: bytes, source: memoryview, deadline: float, tenant: bytes = NO_TENANT) -> StoreOutcome:
        if key in self.stuck:
            self.before(Operation.STORE)
        return super().store(key, source, deadline, tenant)


class FlakyTier(TierWrapper):
    """A share of the chosen operations fails with ``make_error()``."""

    def __init__(
        self,
        tier: Tier,
        *,
        seed: int,
        failure_ratio: float,
        make_error: Callable[[], Exception],
        operations: Collection[Operation] = ALL_OPERATIONS,
    ) -> None:
        super().__init__(tier, operations)
        self._random = random.Random(seed)  # noqa: S311 - reproducible, not secret
        self._failure_ratio = failure_ratio
        self._make_error = make_error

    @override
    def before(self, operation: Operation) -> None:
        with self._calls_lock:
            fails = self._random.random() < self._failure_ratio
        if fails:
            raise self._make_error()


class FailingTier(TierWrapper):
    """The chosen operations fail with ``make_error()`` while ``failing`` is true."""

    def __init__(
        self, tier: Tier, make_error: Callable[[], Exception], operations: Collection[Operation] = ALL_OPERATIONS
    ) -> None:
        super().__init__(tier, operations)
        self.failing = True
        self._make_error = make_error

    @override
    def before(self, operation: Operation) -> None:
        if self.failing:
            raise self._make_error()


class RefusingTier(FailingTier):
    """The chosen operations are refused for ``reason`` while ``failing`` is true."""

    def __init__(self, tier: Tier, reason: RefusedReason, operations: Collection[Operation] = ALL_OPERATIONS) -> None:
        def refused() -> TierError:
            return TierRefused(reason, f"injected: {reason}")

        super().__init__(tier, refused, operations)


class CorruptingTier(MemoryTier):
    """A memory tier whose medium flips one bit in a share of the frames right after they were stored."""

    def __init__(
        self,
        namespace: Namespace,
        payload_bytes: int,
        store: MemoryStore,
        *,
        seed: int,
        corrupt_ratio: float,
        clock: Clock,
    ) -> None:
        super().__init__(namespace, payload_bytes, store, clock=clock)
        self.corrupted: set[bytes] = set()
        self._random = random.Random(seed)  # noqa: S311 - reproducible, not secret
        self._corrupt_ratio = corrupt_ratio

    @override
    def store(self, key: bytes, source: memoryview, deadline: float, tenant: bytes = NO_TENANT) -> StoreOutcome:
        outcome = super().store(key, source, deadline, tenant)
        with self.medium.lock:
            frame = self.medium.frames.get((self._digest, key))
            if outcome is StoreOutcome.STORED and frame is not None and self._random.random() < self._corrupt_ratio:
                frame[self._random.randrange(len(frame))] ^= 1 << self._random.randrange(8)
                self.corrupted.add(key)
        return outcome
