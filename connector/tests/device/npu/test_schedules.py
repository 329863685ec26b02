"""Random lives of a copier: submits, polls, waits, faults and closes in any order leave nothing behind.

Every job must be reported exactly once, refused or ended; a job that ended well must have moved its bytes.
"""

from __future__ import annotations

import random

import numpy as np
from acl_emulator.control import NOTHING_LIVE, Emulator
from acl_emulator.rig import Rig, rig
from hypothesis import settings

from spillway_connector.device.copier import CopyResult, Direction
from spillway_connector.device.npu.copier import NpuCopier
from spillway_connector.device.stream_copier import CopyLimits
from spillway_connector.errors import DeviceCopyError

SCHEDULES_PER_EXAMPLE = 100  # of a property test: 2,500 with the profile quick, 10,000 with full
SLOTS = 16  # of memory, one job each at a time
SLOT_BYTES = 256
GATE = 5
LIMITS = CopyLimits(descriptors=3, jobs=6, job_seconds=5.0, check_seconds=0.002)
FAULTS = [
    "aclrtMemcpyAsync",
    "aclrtMemcpyBatchAsync",
    "aclrtRecordEvent",
    "aclrtStreamWaitEvent",
    "aclrtCreateEventExWithFlag",
    "aclrtQueryEventStatus",
    "aclrtSynchronizeEventWithTimeout",
    "aclrtEventElapsedTime",
    "aclrtCreateStream",
    "aclrtStreamAbort",
]


class Life:
    """One copier, what was asked of it and what it answered."""

    def __init__(self, npu: Rig, dice: random.Random) -> None:
        self.npu, self.dice = npu, dice
        self.direction = dice.choice(list(Direction))
        self.copier: NpuCopier = npu.copier(self.direction, dice.choice(["auto", "off"]), limits=LIMITS)
        npu.copiers.clear()
        self.submitted: dict[int, int] = {}  # job -> slot
        self.reported: set[int] = set()
        self.free_slots = list(range(SLOTS))

    def submit(self) -> None:
        if not self.free_slots:
            return
        slot = self.free_slots.pop()
        job_id = len(self.submitted)
        self.submitted[job_id] = slot
        start, pieces = slot * SLOT_BYTES, self.dice.randint(1, 8)
        self.source[start : start + SLOT_BYTES] = job_id % 250 + 1
        self.target[start : start + SLOT_BYTES] = 0
        size = SLOT_BYTES // pieces
        try:
            self.copier.submit(
                job_id, self.npu.plan([(start + n * size, start + n * size, size) for n in range(pieces)])
            )
        except DeviceCopyError:
            self.end(job_id)

    @property
    def source(self) -> np.ndarray:
        return self.npu.device if self.direction is Direction.STORE else self.npu.host

    @property
    def target(self) -> np.ndarray:
        return self.npu.host if self.direction is Direction.STORE else self.npu.device

    def end(self, job_id: int, result: CopyResult | None = None) -> None:
        assert job_id not in self.reported, "reported twice"
        self.reported.add(job_id)
        slot = self.submitted[job_id]
        if result is not None and result.error is None:
            start = slot * SLOT_BYTES
            moved = self.target[start : start + result.size_bytes]
            assert (moved == job_id % 250 + 1).all(), "ended well without its bytes"
        self.free_slots.append(slot)

    def poll(self) -> None:
        for result in self.copier.finished():
            self.end(result.job_id, result)

    def wait(self) -> None:
        some = {job_id for job_id in self.submitted if self.dice.random() < 0.5}
        self.copier.wait(some)
        self.poll()
        assert some <= self.reported

    def fail(self) -> None:
        if self.dice.random() < 0.3:
            self.npu.emulator.fail_copy(self.dice.randint(1, 6), 507899)
        else:
            self.npu.emulator.fail(self.dice.choice(FAULTS), self.dice.randint(1, 4), 207001)

    def close(self) -> None:
        self.copier.close()
        self.poll()
        assert self.reported == set(self.submitted), "a job was lost"


def run(npu: Rig, seed: int) -> None:
    dice = random.Random(seed)
    life = Life(npu, dice)
    actions = [life.submit] * 5 + [life.poll] * 3 + [life.wait] + ([life.fail] if seed % 2 else [])
    for _ in range(dice.randint(2, 12)):
        dice.choice(actions)()
    life.close()


def test_random_schedules_leave_nothing(emulator: Emulator):
    with rig(emulator, SLOTS * SLOT_BYTES) as npu:
        for seed in range(SCHEDULES_PER_EXAMPLE * settings().max_examples):
            run(npu, seed)
            emulator.clear_faults()
        live = emulator.live()
        assert (live.streams, live.events, live.unfinished_tasks) == (1, 0, 0), live  # the compute stream
    assert emulator.live() == NOTHING_LIVE
