"""Several processes in one directory: real ones, killed for real."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spillway_connector.errors import TierMiss
from spillway_connector.testing.tier_contract import NAMESPACE, PAYLOAD_BYTES, error_of, key_of, load, payload_of, soon
from spillway_connector.tiers.disk.slab.claims import Claim
from spillway_connector.tiers.disk.slab.fingerprint import fingerprint_of
from spillway_connector.tiers.disk.slab.index import SlabIndex
from spillway_connector.tiers.disk.slab.layout import slot_bytes_of
from spillway_connector.tiers.disk.slab.policy import WRITING
from spillway_connector.tiers.disk.slab.tier import SlabTier
from spillway_connector.tiers.tier import StoreOutcome

SLOT_BYTES = slot_bytes_of(PAYLOAD_BYTES)
MAX_BYTES = 24 * SLOT_BYTES
_CHILD = """
import json, os, sys, threading
from pathlib import Path
from spillway_connector.testing.tier_contract import NAMESPACE, PAYLOAD_BYTES, key_of, payload_of, soon
from spillway_connector.tiers.disk.slab.tier import SlabTier
from spillway_connector.errors import TierMiss
root, max_bytes, first, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
tier = SlabTier(NAMESPACE, PAYLOAD_BYTES, root, max_bytes=max_bytes)
tier.prepare(soon())
payloads = {seed: bytes(payload_of(seed)) for seed in range(60)}
report = {"wrong": 0, "highest": 0, "hits": 0, "errors": []}
print("ready", flush=True)
sys.stdin.readline()

def size(path):
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0

def work(part):
    target = memoryview(bytearray(PAYLOAD_BYTES))
    for step in range(rounds):
        seed = (first + step + 7 * part) % 60
        try:
            tier.store(key_of(seed), memoryview(payloads[seed]), soon())
            if step % 10 == 0:
                report["highest"] = max(report["highest"], sum(map(size, root.rglob("*.slab")), 0))
                print("step", flush=True)
        except Exception as error:
            report["errors"].append(repr(error))
        for other in (seed, (first + 40 - step) % 60):
            try:
                tier.load(key_of(other), target, soon())
                report["hits"] += 1
                report["wrong"] += target != payloads[other]
            except TierMiss:
                pass
            except Exception as error:
                report["errors"].append(repr(error))

threads = [threading.Thread(target=work, args=(part,)) for part in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
tier.close()
print(json.dumps({**report, "evicted": sum(tier.evictions.values())}))
"""


class Children:
    """Ends those that are left."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._started: list[subprocess.Popen[str]] = []

    def start(self, first: int, rounds: int) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(self.root), str(MAX_BYTES), str(first), str(rounds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._started.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        return child

    def end(self) -> None:
        for child in self._started:
            child.kill()
            child.communicate()


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Children]:
    started = Children(tmp_path / "kv")
    try:
        yield started
    finally:
        started.end()


def _index(root: Path) -> SlabIndex:
    index = SlabIndex.open(root / "slab" / str(SLOT_BYTES), writable=False)
    assert index is not None
    return index


def test_processes_that_evict_against_each_other_serve_no_wrong_byte(children: Children) -> None:
    started = [children.start(first, rounds=150) for first in (0, 30, 45)]
    for child in started:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    reports = [json.loads(child.communicate(timeout=120)[0].splitlines()[-1]) for child in started]
    assert [report["errors"] for report in reports] == [[], [], []]
    assert [report["wrong"] for report in reports] == [0, 0, 0]
    assert all(report["highest"] <= MAX_BYTES for report in reports)
    assert all(report["evicted"] > 0 and report["hits"] > 0 for report in reports)
    index = _index(children.root)
    assert index.used == int((index.state != 0).sum())
    assert not (index.state == WRITING).any()
    assert list((children.root / "slab" / "writers").iterdir()) == []


def test_a_process_killed_at_any_instant_leaves_only_whole_frames(children: Children) -> None:
    for round_number in range(6):
        witness = children.start(10 * round_number, rounds=60)
        victim = children.start(10 * round_number + 30, rounds=100_000)
        for child in (witness, victim):
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        assert victim.stdout is not None
        for _ in range(2 + round_number):
            victim.stdout.readline()  # until it is in the midst of its work
        victim.kill()
        victim.communicate()
        report = json.loads(witness.communicate(timeout=120)[0].splitlines()[-1])
        assert report["errors"] == []
        assert report["wrong"] == 0
        assert report["highest"] <= MAX_BYTES
        tier = SlabTier(NAMESPACE, PAYLOAD_BYTES, children.root, max_bytes=MAX_BYTES)
        tier.prepare(soon())
        index = _index(children.root)
        assert not (index.state == WRITING).any()
        assert index.used == int((index.state != 0).sum()) > 0
        served = 0
        for seed in range(60):
            try:
                assert load(tier, key_of(seed)) == payload_of(seed)
                served += 1
            except TierMiss:
                pass
        assert served == index.used  # nothing was lost but what was being written
        tier.discard(key_of(1), soon())
        assert tier.store(key_of(1), payload_of(1), soon()) is StoreOutcome.STORED
        tier.close()


def claim(tier: SlabTier, seed: int) -> Claim | StoreOutcome:
    """Claim a slot, as a store does before it writes."""
    tier.prepare(soon())
    return tier._claims.claim(fingerprint_of(key_of(seed), tier._pair), tier._pair[0], 0, soon())


def test_the_slot_of_an_ended_writer_is_released_and_that_of_a_running_one_is_not(children: Children) -> None:
    root = children.root
    running = SlabTier(NAMESPACE, PAYLOAD_BYTES, root, max_bytes=MAX_BYTES)
    ended = SlabTier(NAMESPACE, PAYLOAD_BYTES, root, max_bytes=MAX_BYTES)
    for tier, seed in ((running, 1), (ended, 2)):
        assert isinstance(claim(tier, seed), Claim)
    other = SlabTier(NAMESPACE, PAYLOAD_BYTES, root, max_bytes=MAX_BYTES)
    for seed in (1, 2):  # both writers run
        assert other.store(key_of(seed), payload_of(seed), soon()) is StoreOutcome.PENDING
    ended.close()
    assert other.store(key_of(2), payload_of(2), soon()) is StoreOutcome.STORED
    assert other.store(key_of(1), payload_of(1), soon()) is StoreOutcome.PENDING
    assert other.contains([key_of(1), key_of(2)], soon()) == [False, True]
    running.close()
    other.close()
    last = SlabTier(NAMESPACE, PAYLOAD_BYTES, root, max_bytes=MAX_BYTES)
    assert last.store(key_of(1), payload_of(1), soon()) is StoreOutcome.STORED
    last.close()


def test_what_another_engine_is_writing_is_neither_there_nor_promised(tmp_path: Path) -> None:
    first, second = (SlabTier(NAMESPACE, PAYLOAD_BYTES, tmp_path, max_bytes=100 << 20) for _ in range(2))
    first.prepare(soon())
    assert isinstance(claim(first, 1), Claim)
    assert second.store(key_of(1), payload_of(1), soon()) is StoreOutcome.PENDING
    assert second.contains([key_of(1)], soon()) == second.contains_now([key_of(1)]) == [False]
    assert isinstance(error_of(lambda: load(second, key_of(1))), TierMiss)
    first.close()  # before the block is complete
    assert second.store(key_of(1), payload_of(1), soon()) is StoreOutcome.STORED
    assert load(second, key_of(1)) == payload_of(1)
    second.close()
