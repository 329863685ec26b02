"""Sessions in a real size class: across processes and restarts, within bounds, and with a file that is lost or
damaged."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spillway_connector.plan.sessions import SessionFollower, SessionHint, SessionUse, session_tag
from spillway_connector.testing.clock import SteppedClock
from spillway_connector.testing.tier_contract import NAMESPACE, PAYLOAD_BYTES, key_of, load, payload_of, soon
from spillway_connector.tiers.disk.slab import session_file
from spillway_connector.tiers.disk.slab.layout import slot_bytes_of
from spillway_connector.tiers.disk.slab.session_file import OFF_SECONDS, USES_MAX
from spillway_connector.tiers.disk.slab.tier import SlabTier
from spillway_connector.tiers.sealed import SEAL_BYTES, SealedTier, SealKey, sealed_namespace
from spillway_connector.tiers.tier import NO_TENANT, EvictionReason, SessionTier, StoreOutcome, Tier

SLOT_BYTES = slot_bytes_of(PAYLOAD_BYTES)
NEVER = 1e9
ANN, BOB = b"tenant-a", b"tenant-b"
FRAMES = 22  # that the bound holds beside the index and the sessions
MAX_BYTES = FRAMES * SLOT_BYTES + 10 * 4096


class Node:
    """Tiers of one directory, on one stepped clock."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = SteppedClock(1000.0)
        self.follower = SessionFollower()
        self._tiers: list[SlabTier] = []

    def start(self, **options: Any) -> SlabTier:
        tier = SlabTier(
            NAMESPACE,
            PAYLOAD_BYTES,
            self.root,
            **{"max_bytes": MAX_BYTES} | options,
            clock=self.clock,
            wall_clock=lambda: 1_700_000_000 + self.clock(),
        )
        self._tiers.append(tier)
        return tier

    def turn(
        self, tier: SessionTier, name: str, seeds: range, due: float | None, *, tenant: bytes = ANN, ended: bool = False
    ) -> None:
        """One request of a session, as the connector reports it; the clock steps by a second behind it."""
        hint = SessionHint(name.encode(), ended, due)
        keys = [key_of(seed) for seed in seeds]
        self.follower.begin_request(tenant, hint, self.clock())
        tier.use_session(self.follower.use(tenant, hint, keys, self.clock()))
        for seed in seeds:
            self.store(tier, seed, tenant=tenant, session=name)
        tier.use_session(self.follower.use(tenant, hint, keys, self.clock()))
        tier.use_session(self.follower.end_request(tenant, hint, self.clock()))
        self.clock.advance(1)

    def store(
        self, tier: SessionTier, seed: int, *, tenant: bytes = ANN, session: str | None = None, own_room: bool = False
    ) -> StoreOutcome:
        payload = payload_of(seed, tier.payload_bytes)
        if session is None:
            return tier.store(key_of(seed), payload, NEVER, tenant)
        tag = session_tag(SessionHint(session.encode()))
        return tier.store_of_session(key_of(seed), payload, NEVER, tenant, tag, own_room=own_room)

    def end(self) -> None:
        for tier in self._tiers:
            tier.close()

    @property
    def sessions(self) -> Path:
        return self.root / "slab" / str(SLOT_BYTES) / "sessions"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    started = Node(tmp_path / "kv")
    yield started
    started.end()


def held(tier: Tier, seeds: range = range(60)) -> list[int]:
    return [seed for seed, there in zip(seeds, tier.contains([key_of(seed) for seed in seeds], NEVER), strict=True)
            if there]  # fmt: skip


def fill(node: Node, tier: SessionTier) -> None:
    """Three sessions of seven chunks: back in 300 s, 20 s and 100 s. One slot is free."""
    for name, first, due in (("late", 0, 300.0), ("soon", 7, 20.0), ("next", 14, 100.0)):
        node.turn(tier, name, range(first, first + 7), due)
    assert held(tier) == list(range(FRAMES - 1))


def test_a_full_size_class_gives_up_the_end_of_the_session_that_comes_back_last(node: Node):
    tier = node.start()
    fill(node, tier)
    for seed in range(30, 39):
        assert node.store(tier, seed) is StoreOutcome.STORED
    assert held(tier) == [*range(7, 20), *range(30, 39)]
    assert tier.evictions == {EvictionReason.ROOM: 8}


def test_chunks_of_an_ended_session_go_first_but_those_that_others_use(node: Node):
    tier = node.start()
    fill(node, tier)
    node.turn(tier, "other", range(7, 9), 500)
    node.turn(tier, "soon", range(7, 14), None, ended=True)
    for seed in range(30, 36):
        node.store(tier, seed)
    assert held(tier) == [*range(9), *range(14, 21), *range(30, 36)]


def test_what_a_session_announces_does_not_move_another_tenants_eviction(node: Node):
    plain, announced = node.start(), Node(node.root.with_name("other"))
    for each, tier in ((node, plain), (announced, announced.start())):
        for seed in range(11):
            each.store(tier, seed, tenant=BOB)
        due = 10.0 if each is announced else None
        each.turn(tier, "ann", range(11, 22), due)
        for seed in range(30, 42):
            each.store(tier, seed, tenant=BOB)
        assert held(tier, range(11)) == [] and len(held(tier, range(11, 22))) == 10
    announced.end()


@pytest.mark.parametrize(("due", "outcome"), [(50.0, StoreOutcome.STORED), (301.0, StoreOutcome.NOT_ADMITTED)])
def test_room_of_its_own_is_only_what_the_tenant_uses_later(node: Node, due: float, outcome: StoreOutcome):
    tier = node.start()
    fill(node, tier)
    hint = SessionHint(b"new", return_seconds=due)
    node.follower.begin_request(ANN, hint, node.clock())
    tier.use_session(node.follower.use(ANN, hint, [], node.clock()))
    assert node.store(tier, 40, session="new", own_room=True) is StoreOutcome.STORED, "while there is room"
    assert node.store(tier, 41, session="new", own_room=True) is outcome
    assert (6 in held(tier)) == (outcome is StoreOutcome.NOT_ADMITTED)
    assert node.store(tier, 42, session="new", own_room=True, tenant=BOB) is StoreOutcome.NOT_ADMITTED
    assert node.store(tier, 43, session="unknown", own_room=True) is StoreOutcome.NOT_ADMITTED


def test_a_tenant_at_its_quota_gives_up_the_end_of_its_last_session(node: Node):
    tier = node.start(tenant_max_bytes=6 * SLOT_BYTES)
    node.turn(tier, "late", range(3), 300)
    node.turn(tier, "soon", range(3, 6), 20)
    node.turn(tier, "bob", range(10, 13), 5000, tenant=BOB)
    node.store(tier, 6)
    node.store(tier, 7)
    assert held(tier) == [0, 3, 4, 5, 6, 7, 10, 11, 12]
    node.turn(tier, "soon", range(3, 6), None, ended=True)
    node.store(tier, 8)
    assert held(tier) == [0, 3, 4, 6, 7, 8, 10, 11, 12]
    assert tier.evictions == {EvictionReason.TENANT: 3}


def test_who_loads_what_an_ended_session_left_keeps_it(node: Node):
    tier = node.start()
    fill(node, tier)
    node.turn(tier, "soon", range(7, 14), None, ended=True)
    node.store(tier, 30)
    load(tier, key_of(13), NEVER)
    for seed in range(31, 37):
        node.store(tier, seed)
    assert 13 in held(tier) and set(range(7, 13)).isdisjoint(held(tier))


_CHILD = """
import sys
from pathlib import Path
from spillway_connector.plan.sessions import SessionFollower, SessionHint, session_tag
from spillway_connector.testing.tier_contract import NAMESPACE, PAYLOAD_BYTES, key_of, payload_of, soon
from spillway_connector.tiers.disk.slab.tier import SlabTier
tier = SlabTier(NAMESPACE, PAYLOAD_BYTES, Path(sys.argv[1]), max_bytes=int(sys.argv[2]))
follower = SessionFollower()
for name, first, due in ((b"late", 0, 3000.0), (b"soon", 7, 2000.0), (b"next", 14, 2500.0)):
    hint, keys = SessionHint(name, return_seconds=due), [key_of(first + at) for at in range(7)]
    follower.begin_request(b"tenant-a", hint, 0.0)
    tier.use_session(follower.use(b"tenant-a", hint, keys, 0.0))
    for at in range(7):
        tier.store_of_session(key_of(first + at), payload_of(first + at), soon(), b"tenant-a", session_tag(hint),
                              own_room=False)
    tier.use_session(follower.use(b"tenant-a", hint, keys, 0.0))
    tier.use_session(follower.end_request(b"tenant-a", hint, 0.0))
tier.maintain(soon())
print("done", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("killed", [False, True], ids=["runs on", "killed"])
def test_a_process_evicts_by_what_another_ones_sessions_said(tmp_path: Path, killed: bool):
    """The other process runs, or was killed: what it noted is in the node's file."""
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(tmp_path / "kv"), str(MAX_BYTES)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "done\n"
        if killed:
            child.kill()
            child.wait()
        tier = SlabTier(NAMESPACE, PAYLOAD_BYTES, tmp_path / "kv", max_bytes=MAX_BYTES)
        try:
            for seed in range(30, 39):
                assert tier.store(key_of(seed), payload_of(seed), soon()) is StoreOutcome.STORED
            there = tier.contains([key_of(seed) for seed in range(60)], soon())
            assert [seed for seed in range(60) if there[seed]] == [*range(7, 20), *range(30, 39)]
            assert load(tier, key_of(7)) == payload_of(7)
        finally:
            tier.close()
    finally:
        child.kill()
        child.communicate()


def test_a_session_that_another_engine_of_the_node_serves_on_is_the_same_session(node: Node):
    first, second = node.start(), node.start()
    fill(node, first)
    node.follower = SessionFollower()  # of the other engine, which never saw it
    node.turn(second, "late", range(7), 1)
    second.maintain(NEVER)
    for seed in range(30, 37):
        node.store(first, seed)
    assert held(first) == [*range(15), *range(30, 37)]


def test_a_process_that_stores_nothing_still_tells_the_others_of_its_sessions(node: Node):
    """The process's maintenance thread writes its sessions soon after each use; otherwise it runs once a minute."""
    tier = node.start()
    fill(node, tier)
    before = node.sessions.read_bytes()
    tier.use_session(SessionUse(ANN, session_tag(SessionHint(b"late")), (), True, None, None))
    deadline = time.monotonic() + 30
    while node.sessions.read_bytes() == before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert node.sessions.read_bytes() != before


def spoil_by_removal(path: Path) -> None:
    path.unlink()


def spoil_by_zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def spoil_by_noise(path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[:4096] + os.urandom(len(raw) - 4096))


def spoil_by_cutting(path: Path) -> None:
    fresh = path.with_name("cut")
    fresh.write_bytes(path.read_bytes()[:5000])
    fresh.replace(path)


@pytest.mark.parametrize("spoil", [spoil_by_removal, spoil_by_zeros, spoil_by_noise, spoil_by_cutting])
def test_a_lost_or_damaged_file_costs_hits_and_never_a_byte(node: Node, spoil: Callable[[Path], None]):
    tier = node.start()
    fill(node, tier)
    tier.close()
    spoil(node.sessions)
    again = node.start()
    for seed in range(30, 50):
        node.store(again, seed)
    there = held(again)
    assert len(there) == FRAMES
    for seed in there:
        assert load(again, key_of(seed), NEVER) == payload_of(seed)
    node.turn(again, "new", range(50, 56), 30)
    node.turn(again, "new", range(50, 56), 30)
    assert set(range(50, 56)) <= set(held(again))


def test_an_index_that_was_rebuilt_has_no_sessions_until_requests_name_some(node: Node):
    """A rebuilt index numbers generations again, so that what was noted may speak of other entries."""
    tier = node.start()
    fill(node, tier)
    tier.close()
    (node.sessions.parent / "index").unlink()
    again = node.start()
    again.prepare(NEVER)
    assert not node.sessions.exists() and held(again) == list(range(FRAMES - 1))
    fill(node, again)
    for seed in range(30, 32):
        node.store(again, seed)
    assert 6 not in held(again)


def test_without_sessions_there_is_no_file_and_nothing_is_looked_at(node: Node):
    tier = node.start()
    for seed in range(40):
        node.store(tier, seed, session="never announced", own_room=False)
    assert not node.sessions.exists()
    assert held(tier)[-1] == 39


def test_the_file_is_within_the_bound(node: Node):
    tier = node.start()
    for seed in range(40):
        node.store(tier, seed)
    node.turn(tier, "one", range(40, 42), 10)
    assert node.sessions.exists()
    assert sum(path.stat().st_size for path in node.root.rglob("*") if path.is_file()) <= MAX_BYTES
    assert {40, 41} <= set(held(tier))


def test_where_the_file_cannot_be_made_stores_go_on_without_sessions(node: Node, monkeypatch, caplog):
    def full(folder: Path, shape: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    tier = node.start()
    with monkeypatch.context() as patched:
        patched.setattr(session_file, "create_sessions", full)
        fill(node, tier)
        for seed in range(30, 39):
            assert node.store(tier, seed) is StoreOutcome.STORED
    assert caplog.text.count("sessions do not count") == 1
    node.clock.advance(OFF_SECONDS)
    node.turn(tier, "late", range(40, 43), 300)
    assert node.sessions.exists()


def test_what_is_noted_waits_for_the_lock_in_bounded_memory(node: Node):
    tier = node.start()
    for number in range(USES_MAX + 10):
        hint = SessionHint(b"%d" % number, return_seconds=5)
        tier._sessions.note(node.follower.use(ANN, hint, [key_of(1)], node.clock()))
    assert len(tier._sessions._uses) == USES_MAX
    tier.prepare(NEVER)
    while tier._sessions._uses:
        tier.maintain(NEVER)
    assert node.sessions.exists()


def test_a_sealed_size_class_follows_sessions_too(node: Node):
    key = SealKey("test", bytes(range(32)))
    namespace = sealed_namespace(NAMESPACE, key)
    inner = SlabTier(
        namespace, PAYLOAD_BYTES - 4096 + SEAL_BYTES, node.root, max_bytes=MAX_BYTES, clock=node.clock,
        wall_clock=node.clock,
    )  # fmt: skip
    tier = SealedTier.of(inner, namespace, PAYLOAD_BYTES - 4096, key)
    assert isinstance(tier, SessionTier) and not isinstance(SealedTier, SessionTier)
    node.turn(tier, "late", range(10), 300)
    node.turn(tier, "soon", range(10, 20), 20)
    count = len(held(tier))
    while count == len(held(tier)):
        node.store(tier, 30 + count)
        count += 1
    assert 9 not in held(tier) and 10 in held(tier)
    assert load(tier, key_of(10), NEVER) == payload_of(10, tier.payload_bytes)
    assert node.store(tier, 99, tenant=NO_TENANT, session="x", own_room=True) is StoreOutcome.NOT_ADMITTED
    tier.close()


def test_what_is_renewed_outlives_others_and_the_end_of_its_session(node: Node) -> None:
    """Another process makes the room, which knows of no retention."""
    tier, other = node.start(), node.start()
    keys = [key_of(seed) for seed in range(4)]
    node.turn(tier, "kept", range(4), 10.0)
    tier.renew(keys, NEVER, ANN)
    node.turn(tier, "kept", range(4), None, ended=True)
    for seed in range(100, 100 + 3 * FRAMES):
        node.store(other, seed)
        if not seed % 5:
            node.clock.advance(30)
            tier.renew(keys, NEVER, ANN)
    assert tier.contains(keys, NEVER) == [True] * 4
    for seed in range(200, 200 + 5 * FRAMES):
        node.store(other, seed)
        assert node.store(other, seed) is StoreOutcome.PRESENT, "asked for again"
    assert tier.contains(keys, NEVER) == [False] * 4, "chunks that are no longer renewed leave in their turn"
