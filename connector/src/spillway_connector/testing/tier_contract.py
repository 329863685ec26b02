"""The contract suite of a shared tier: subclass it in a test module and it runs against yours.

    class TestMyTier(TierContract):
        pass

The module provides pytest fixtures: ``make_tier``, a callable ``(namespace, payload_bytes) -> Tier`` whose tiers all
use one medium (an empty one per test) and are closed afterwards; and ``medium``, which changes what is stored without
the tier (:class:`Medium`). For a tier that keeps to a bound, subclass :class:`BoundedTierContract`, which also needs
``make_small_tier``, a callable ``(frames) -> Tier`` for NAMESPACE and PAYLOAD_BYTES whose bound leaves room for about
that many frames. Needs no pytest import, so that shipping it costs nothing.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any, Protocol

from spillway_connector.errors import (
    CorruptReason,
    RefusedReason,
    TierCorrupt,
    TierError,
    TierMiss,
    TierRefused,
    TierTimeout,
)
from spillway_connector.namespace import Namespace
from spillway_connector.tiers.frame import HEADER_BYTES, MAGIC
from spillway_connector.tiers.tier import EvictionReason, PeekableTier, ReceivingTier, StoreOutcome, Tier

MakeTier = Callable[[Namespace, int], Tier]
MakeSmallTier = Callable[[int], Tier]
NAMESPACE = Namespace.of({"model": "contract", "layout": 1})
OTHER_NAMESPACE = Namespace.of({"model": "contract", "layout": 2})
PAYLOAD_BYTES = 3 * 4096 + 100  # not a whole number of pages
PATIENCE_SECONDS = 30.0  # for what a tier does in the background


class Medium(Protocol):
    """The medium of the tier's frames, changed here without the tier's knowledge."""

    def read_frame(self, namespace: Namespace, key: bytes) -> bytes: ...

    def write_frame(self, namespace: Namespace, key: bytes, frame: bytes) -> None: ...

    def write_document(self, namespace: Namespace, document: bytes) -> None: ...


def soon() -> float:
    """A deadline that an operation of a healthy store does not miss."""
    return time.monotonic() + 30.0


@lru_cache(1 << 12)
def _bytes_of(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)  # noqa: S311 - reproducible, not secret


def payload_of(seed: int, size: int = PAYLOAD_BYTES) -> memoryview:
    return memoryview(bytearray(_bytes_of(seed, size)))


def key_of(seed: int, size: int = 36) -> bytes:
    return _bytes_of(seed + 1_000_000, size)


def load(tier: Tier, key: bytes, deadline: float | None = None) -> bytes:
    """Load one payload; a tier on a clock of its own needs a deadline on that clock."""
    target = memoryview(bytearray(tier.payload_bytes))
    tier.load(key, target, soon() if deadline is None else deadline)
    return bytes(target)


def error_of(call: Callable[[], object]) -> TierError:
    """The tier error that ``call`` raises; an assertion fails when it raises none."""
    try:
        call()
    except TierError as error:
        return error
    raise AssertionError("no tier error was raised")


class TierContract:
    """Every promise of tier.Tier that can be seen from outside."""

    def test_a_stored_payload_comes_back_whole_at_any_size(self, make_tier: MakeTier) -> None:
        for size in (1, 100, 4095, 4096, 4097, 65536, 3_000_000):
            namespace = Namespace.of({"size": size})
            tier = make_tier(namespace, size)
            assert tier.store(key_of(size), payload_of(size, size), soon()) is StoreOutcome.STORED
            assert load(tier, key_of(size)) == payload_of(size, size)

    def test_keys_of_any_length_up_to_64_bytes_are_told_apart(self, make_tier: MakeTier) -> None:
        tier = make_tier(NAMESPACE, PAYLOAD_BYTES)
        keys = [b"\x00" * size for size in (1, 2, 3, 36, 64)]
        for seed, key in enumerate(keys):
            assert tier.store(key, payload_of(seed), soon()) is StoreOutcome.STORED
        for seed, key in enumerate(keys):
            assert load(tier, key) == payload_of(seed)

    def test_unaligned_memory_is_served_too(self, make_tier: MakeTier) -> None:
        tier = make_tier(NAMESPACE, PAYLOAD_BYTES)
        source, target = bytearray(PAYLOAD_BYTES + 1), bytearray(PAYLOAD_BYTES + 1)
        source[1:] = payload_of(1)
        tier.store(key_of(1), memoryview(source)[1:], soon())
        tier.load(key_of(1), memoryview(target)[1:], soon())
        assert target[1:] == payload_of(1)

    def test_a_tier_that_tells_what_it_has_received_counts_every_load(self, make_tier: MakeTier) -> None:
        tier = make_tier(NAMESPACE, PAYLOAD_BYTES)
        if not isinstance(tier, ReceivingTier) or tier.received_bytes is None:
            return  # it cannot tell
        tier.store(key_of(1), payload_of(1), soon())
        before = tier.received_bytes
        for loads in (1, 2):
            load(tier, key_of(1))
            assert loads * PAYLOAD_BYTES <= tier.received_bytes - before <= loads * 2 * PAYLOAD_BYTES

    def test_a_key_never_stored_is_a_miss(self, make_tier: MakeTier) -> None:
        tier = make_tier(NAMESPACE, PAYLOAD_BYTES)
        assert isinstance(error_of(lambda: load(tier, key_of(1))), TierMiss)

    def test_renewing_keeps_what_is_there_and_makes_nothing(self, make_tier: MakeTier) -> None:
        tier = make_tier(NAMESPACE, PAYLOAD_BYTES)
        keys = [key_of(seed) for seed in range(4)]
        tier.renew(keys, soon())
        for seed in (0, 2):
            tier.store(key_of(seed), payload_of(seed), soon(), b"tenant-a")
        tier.renew(keys, soon(), b"tenant-a")
        assert tier.contains(keys, soon()) == [True, False, True, False]
        assert [load(tier, key_of(seed)) == payload_of(seed) for seed in (0, 2)] == [True, True]
        tier.discard(key_of(0), soon())
        tier.renew(keys, soon(), b"tenant-a")
        assert tier.contains(keys, soon()) == [False, False, True, False]

    def test_contains_answers_for_each_key_in_order(self, make_tier: MakeTier) -> None:
        tier = make_tier(NAMESPACE, PAYLOAD_BYTES)
        for seed in (1, 3):
            tier.store(key_of(seed), payload_of(seed), soon())
        many = [key_of(seed) for seed in range(2500)]
        assert tier.contains(many, soon()) == [seed in (1, 3) for seed in range(2500)]
        assert tier.contains([], soon()) == []

    def test_the_first_store_of_a_key_stands(self, make_tier: MakeTier) -> None:
        tier = make_tier(NAMESPACE, PAYLOAD_BYTES)
        assert tier.store(key_of(1), payload_of(1), soon()) is StoreOutcome.STORED
        assert tier.store(key_of(1), payload_of(2), soon()) is StoreOutcome.PRESENT
        assert load(tier, key_of(1)) == payload_of(1)

    def test_another_tier_on_the_medium_sees_the_entry(self, make_tier: MakeTier) -> None:
        make_tier(NAMESPACE, PAYLOAD_BYTES).store(key_of(1), payload_of(1), soon())
        assert load(make_tier(NAMESPACE, PAYLOAD_BYTES), key_of(1)) == payload_of(1)

    def test_a_store_has_one_name_in_each_namespace(self, make_tier: MakeTier) -> None:
        names = []
        for namespace in (NAMESPACE, NAMESPACE, OTHER_NAMESPACE):
            tier = make_tier(namespace, PAYLOAD_BYTES)
            tier.prepare(soon())
            names.append(tier.store_id)
        assert names[0] is not None and names[0] == names[1] != names[2]

    def test_namespaces_do_not_see_each_other(self, make_tier: MakeTier) -> None:
        make_tier(NAMESPACE, PAYLOAD_BYTES).store(key_of(1), payload_of(1), soon())
        other = make_tier(OTHER_NAMESPACE, PAYLOAD_BYTES)
        assert other.contains([key_of(1)], soon()) == [False]
        assert isinstance(error_of(lambda: load(other, key_of(1))), TierMiss)

    def test_every_flipped_header_bit_is_corrupt(self, make_tier: MakeTier, medium: Medium) -> None:
        tier = make_tier(NAMESPACE, PAYLOAD_BYTES)
        tier.store(key_of(1), payload_of(1), soon())
        frame = medium.read_frame(NAMESPACE, key_of(1))
        lots = random.Random(1)  # noqa: S311
        at = frame.index(MAGIC)
        header = int.from_bytes(frame[at + 10 : at + 12], "little")
        for position in [*range(HEADER_BYTES), *range(HEADER_BYTES, header, 16), header - 1]:  # fields, then padding
            damaged = bytearray(frame)
            damaged[at + position] ^= 1 << lots.randrange(8)
            medium.write_frame(NAMESPACE, key_of(1), bytes(damaged))
            assert isinstance(error_of(lambda: load(tier, key_of(1))), TierCorrupt), f"byte {position}"

    def test_flipped_payload_bits_are_corrupt(self, make_tier: MakeTier, medium: Medium) -> None:
        tier = make_tier(NAMESPACE, PAYLOAD_BYTES)
        tier.store(key_of(1), payload_of(1), soon())
        frame = medium.read_frame(NAMESPACE, key_of(1))
        payload_at = frame.index(bytes(payload_of(1)))
        lots = random.Random(2)  # noqa: S311
        for _ in range(200):
            damaged = bytearray(frame)
            damaged[payload_at + lots.randrange(PAYLOAD_BYTES)] ^= 1 << lots.randrange(8)
            medium.write_frame(NAMESPACE, key_of(1), bytes(damaged))
            assert error_of(lambda: load(tier, key_of(1))).reason == CorruptReason.PAYLOAD

    def test_a_frame_of_any_other_length_is_corrupt(self, make_tier: MakeTier, medium: Medium) -> None:
        tier = make_tier(NAMESPACE, PAYLOAD_BYTES)
        tier.store(key_of(1), payload_of(1), soon())
        frame = medium.read_frame(NAMESPACE, key_of(1))
        for length in [*range(0, len(frame), 512), len(frame) - 1, len(frame) + 1, len(frame) + 4096]:
            medium.write_frame(NAMESPACE, key_of(1), (frame + bytes(4096))[:length])
            assert isinstance(error_of(lambda: load(tier, key_of(1))), TierCorrupt), f"{length} bytes"

    def test_a_frame_under_another_key_is_corrupt(self, make_tier: MakeTier, medium: Medium) -> None:
        tier = make_tier(NAMESPACE, PAYLOAD_BYTES)
        for seed in (1, 2):
            tier.store(key_of(seed), payload_of(seed), soon())
        first, second = (medium.read_frame(NAMESPACE, key_of(seed)) for seed in (1, 2))
        medium.write_frame(NAMESPACE, key_of(1), second)
        medium.write_frame(NAMESPACE, key_of(2), first)
        for seed in (1, 2):
            assert error_of(lambda seed=seed: load(tier, key_of(seed))).reason == CorruptReason.KEY  # type: ignore[misc]

    def test_a_frame_of_another_namespace_is_corrupt(self, make_tier: MakeTier, medium: Medium) -> None:
        make_tier(OTHER_NAMESPACE, PAYLOAD_BYTES).store(key_of(1), payload_of(1), soon())
        tier = make_tier(NAMESPACE, PAYLOAD_BYTES)
        tier.store(key_of(1), payload_of(1), soon())
        medium.write_frame(NAMESPACE, key_of(1), medium.read_frame(OTHER_NAMESPACE, key_of(1)))
        assert error_of(lambda: load(tier, key_of(1))).reason == CorruptReason.NAMESPACE

    def test_a_discarded_entry_is_gone_and_can_be_stored_again(self, make_tier: MakeTier) -> None:
        tier = make_tier(NAMESPACE, PAYLOAD_BYTES)
        tier.store(key_of(1), payload_of(1), soon())
        tier.discard(key_of(1), soon())
        tier.discard(key_of(1), soon())
        assert tier.contains([key_of(1)], soon()) == [False]
        assert tier.store(key_of(1), payload_of(2), soon()) is StoreOutcome.STORED
        assert load(tier, key_of(1)) == payload_of(2)

    def test_another_document_under_our_namespace_is_explained(
        self, make_tier: MakeTier, medium: Medium, caplog: Any
    ) -> None:
        """Refused; or quarantined, counted and written again: then the log explains it."""
        medium.write_document(NAMESPACE, OTHER_NAMESPACE.document)
        tier = make_tier(NAMESPACE, PAYLOAD_BYTES)
        assert sum(tier.quarantined.values()) == 0
        try:
            tier.store(key_of(1), payload_of(1), soon())
        except TierRefused as refused:
            error = refused
        else:
            assert load(tier, key_of(1)) == payload_of(1)
            assert sum(tier.quarantined.values()) == 1
            assert "layout: ours 1, stored 2" in caplog.text
            return
        assert sum(tier.quarantined.values()) == 0
        assert error.reason == RefusedReason.NAMESPACE
        assert "layout: ours 1, stored 2" in str(error)
        assert error_of(lambda: load(tier, key_of(1))).reason == RefusedReason.NAMESPACE

    def test_a_deadline_in_the_past_is_a_timeout_and_changes_nothing(self, make_tier: MakeTier) -> None:
        tier = make_tier(NAMESPACE, PAYLOAD_BYTES)
        tier.store(key_of(1), payload_of(1), soon())
        past = time.monotonic() - 1.0
        target = memoryview(bytearray(PAYLOAD_BYTES))
        for call in (
            lambda: tier.contains([key_of(1)], past),
            lambda: tier.load(key_of(1), target, past),
            lambda: tier.store(key_of(2), payload_of(2), past),
            lambda: tier.discard(key_of(1), past),
        ):
            assert isinstance(error_of(call), TierTimeout)
        assert tier.contains([key_of(1), key_of(2)], soon()) == [True, False]
        assert load(tier, key_of(1)) == payload_of(1)

    def test_resident_bytes_count_what_is_stored(self, make_tier: MakeTier) -> None:
        tier = make_tier(NAMESPACE, 1_000_000)
        before = tier.resident_bytes(soon())
        for seed in range(4):
            tier.store(key_of(seed), payload_of(seed, 1_000_000), soon())
        # At most twice: allocators round a megabyte up to their next size class.
        assert 4_000_000 <= tier.resident_bytes(soon()) - before < 8_000_000

    def test_a_tier_within_its_bound_evicts_nothing(self, make_tier: MakeTier, medium: Medium) -> None:
        """Removing a corrupt frame is not an eviction."""
        tier = make_tier(NAMESPACE, PAYLOAD_BYTES)
        for seed in range(4):
            tier.store(key_of(seed), payload_of(seed), soon())
        damaged = bytearray(medium.read_frame(NAMESPACE, key_of(1)))
        damaged[100] ^= 1
        medium.write_frame(NAMESPACE, key_of(1), bytes(damaged))
        assert isinstance(error_of(lambda: load(tier, key_of(1))), TierCorrupt)
        tier.discard(key_of(1), soon())
        assert sum(tier.evictions.values()) == 0
        assert sum(tier.quarantined.values()) == 0
        assert tier.under_pressure is False

    def test_a_local_index_answers_as_contains_does(self, make_tier: MakeTier) -> None:
        tier = make_tier(NAMESPACE, PAYLOAD_BYTES)
        keys = [key_of(seed) for seed in range(20)]
        assert tier.contains_now(keys) is None, "before the first operation"
        for seed in (3, 7, 8):
            tier.store(key_of(seed), payload_of(seed), soon())
        tier.discard(key_of(7), soon())
        wanted = [seed in (3, 8) for seed in range(20)]
        if tier.has_local_index:
            assert tier.contains_now(keys) == tier.contains(keys, soon()) == wanted
            assert [tier.contains_now([key]) for key in keys] == [[there] for there in wanted]
            assert tier.contains_now([]) == []
        else:
            assert tier.contains_now(keys) is None
            assert tier.contains_now([]) is None

    def test_the_state_can_be_read_before_use_and_after_the_end(self, make_tier: MakeTier) -> None:
        tier = make_tier(NAMESPACE, PAYLOAD_BYTES)
        for _ in range(2):
            assert sum(tier.evictions.values()) == sum(tier.quarantined.values()) == 0
            assert tier.under_pressure is False
            assert tier.contains_now([key_of(1)]) is None
            tier.close()

    def test_a_closed_tier_refuses_everything(self, make_tier: MakeTier) -> None:
        tier = make_tier(NAMESPACE, PAYLOAD_BYTES)
        tier.store(key_of(1), payload_of(1), soon())
        tier.close()
        tier.close()
        for call in (
            lambda: tier.contains([key_of(1)], soon()),
            lambda: load(tier, key_of(1)),
            lambda: tier.store(key_of(2), payload_of(2), soon()),
        ):
            error = error_of(call)
            assert isinstance(error, TierRefused)
            assert error.reason == RefusedReason.CLOSED

    def test_many_threads_on_few_keys_never_see_a_wrong_byte(self, make_tier: MakeTier) -> None:
        tier = make_tier(NAMESPACE, PAYLOAD_BYTES)
        wrong: list[object] = []

        def work(seed: int) -> None:
            lots = random.Random(seed)  # noqa: S311
            for _ in range(60):
                number = lots.randrange(6)
                try:
                    match lots.randrange(4):
                        case 0:
                            tier.store(key_of(number), payload_of(number), soon())
                        case 1:
                            tier.discard(key_of(number), soon())
                        case _:
                            if load(tier, key_of(number)) != payload_of(number):
                                wrong.append(number)
                except TierMiss:
                    pass
                except Exception as error:
                    wrong.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


class BoundedTierContract(TierContract):
    """The contract of a tier that evicts to keep to a bound."""

    def test_every_eviction_is_counted_by_its_reason(self, make_small_tier: MakeSmallTier) -> None:
        tier = make_small_tier(12)
        stored = range(40)
        for seed in stored:
            assert tier.store(key_of(seed), payload_of(seed), soon()) is StoreOutcome.STORED
            assert load(tier, key_of(seed)) == payload_of(seed)
        # A tier may go on evicting in the background, and then counts a moment after it removed a frame.
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            present = tier.contains([key_of(seed) for seed in stored], soon())
            if tier.evictions == {EvictionReason.ROOM: len(stored) - sum(present)}:
                break
            assert time.monotonic() < deadline, f"{dict(tier.evictions)}, and {sum(present)} of {len(stored)} present"
        assert sum(present) <= 12
        assert tier.under_pressure is True
        for seed in stored:
            if not present[seed]:
                assert isinstance(error_of(lambda seed=seed: load(tier, key_of(seed))), TierMiss)  # type: ignore[misc]

    def test_a_peek_gives_what_a_load_gives_and_keeps_nothing(self, make_small_tier: MakeSmallTier) -> None:
        """A frame that is read for a copy is evicted as if it had not been read."""
        tier, target = make_small_tier(12), memoryview(bytearray(PAYLOAD_BYTES))
        assert isinstance(tier, PeekableTier)
        assert isinstance(error_of(lambda: tier.peek(key_of(0), target, soon())), TierMiss)
        tier.store(key_of(0), payload_of(0), soon())
        tier.peek(key_of(0), target, soon())
        assert target == payload_of(0)
        for seed in range(1, 60):
            tier.store(key_of(seed), payload_of(seed), soon())
            with suppress(TierMiss):
                tier.peek(key_of(0), target, soon())
        deadline = time.monotonic() + PATIENCE_SECONDS  # as it may go on evicting in the background
        while tier.contains([key_of(0)], soon()) != [False]:
            assert time.monotonic() < deadline, "what was peeked at each time stayed while 59 others came"
