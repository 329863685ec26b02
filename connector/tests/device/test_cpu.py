from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from spillway_connector.device.copier import Direction
from spillway_connector.device.cpu import HostCopier, copy_spans
from spillway_connector.plan.copies import CopyPlan
from spillway_connector.testing.copier_contract import MEMORY_BYTES, CopierContract


def plan_between(device: np.ndarray, host: np.ndarray, spans: list[tuple[int, int, int]]) -> CopyPlan:
    """spans: (offset in device, offset in host, bytes)."""
    columns = np.array(spans, dtype=np.int64).reshape(-1, 3)
    return CopyPlan(device.ctypes.data + columns[:, 0], host.ctypes.data + columns[:, 1], columns[:, 2])


class CpuRig:
    """See copier_contract.CopierRig."""

    def __init__(self, direction: Direction, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device, self.host = (np.zeros(MEMORY_BYTES, np.uint8) for _ in range(2))
        self._open = threading.Event()
        self._open.set()
        self._failing = False
        monkeypatch.setattr("spillway_connector.device.cpu.copy_spans", self._copy)
        self.copier = HostCopier(direction)

    def _copy(self, direction: Direction, plan: CopyPlan) -> None:
        self._open.wait()
        failing, self._failing = self._failing, False
        if failing:
            raise OSError(14, "bad address")
        copy_spans(direction, plan)

    def hold(self) -> None:
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def fail_next(self) -> None:
        self._failing = True


@pytest.fixture
def make_rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Direction], CpuRig]]:
    rigs: list[CpuRig] = []

    def make(direction: Direction) -> CpuRig:
        rigs.append(CpuRig(direction, monkeypatch))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.release()
        rig.copier.close()


class TestHostCopier(CopierContract):
    pass


@pytest.fixture
def memories():
    rng = np.random.default_rng(7)
    return rng.integers(0, 255, 1 << 16, dtype=np.uint8), rng.integers(0, 255, 1 << 16, dtype=np.uint8)


def test_store_reads_the_device_and_load_writes_it(memories):
    device, host = memories
    plan = plan_between(device, host, [(0, 100, 4096), (9000, 20_000, 1), (30_000, 50_000, 777)])
    device_before = device.copy()
    store = HostCopier(Direction.STORE)
    store.submit(1, plan)
    store.wait({1})
    assert (device == device_before).all()
    for at, to, size in ((0, 100, 4096), (9000, 20_000, 1), (30_000, 50_000, 777)):
        assert (host[to : to + size] == device[at : at + size]).all()
    (result,) = store.finished()
    assert (result.job_id, result.size_bytes, result.error) == (1, 4096 + 1 + 777, None)
    assert store.finished() == []  # each job once
    store.close()

    device[:] = 0
    load = HostCopier(Direction.LOAD)
    load.submit(2, plan)
    load.wait({2})
    assert (device[:4096] == device_before[:4096]).all()
    assert (device[4096:9000] == 0).all()
    load.close()


@pytest.mark.parametrize("refused", [-1, 100])
def test_a_kernel_that_refuses_or_stops_short_loses_nothing(memories, monkeypatch, refused):
    device, host = memories
    monkeypatch.setattr("spillway_connector.device.cpu._process_vm_readv", lambda *_: refused)
    copy_spans(Direction.STORE, plan_between(device, host, [(0, 100, 4096), (9000, 20_000, 5)]))
    assert (host[100:4196] == device[:4096]).all()
    assert (host[20_000:20_005] == device[9000:9005]).all()


def test_more_spans_than_one_call_takes(memories):
    device, host = memories
    spans = [(2 * n, 3 * n, 2) for n in range(5000)]
    copy_spans(Direction.LOAD, plan_between(device, host, spans))
    for at, to, size in spans:
        assert (device[at : at + size] == host[to : to + size]).all()


def test_a_failed_copy_is_a_result_and_the_next_one_runs(memories):
    device, host = memories
    good = plan_between(device, host, [(0, 0, 64)])
    bad = CopyPlan(good.device_addresses, good.host_addresses[:0], good.sizes_bytes)  # lengths differ
    copier = HostCopier(Direction.STORE)
    copier.submit(1, bad)
    copier.submit(2, good)
    copier.wait({1, 2})
    results = {result.job_id: result for result in copier.finished()}
    assert isinstance(results[1].error, ValueError)  # numpy's, on columns of unequal length
    assert results[2].error is None
    copier.close()


def test_computation_waits_for_a_load_and_learns_of_its_failure(make_rig):
    rig = make_rig(Direction.LOAD)
    rig.host[:] = 9
    rig.fail_next()
    for job_id in (1, 2):
        rig.copier.submit(job_id, plan_between(rig.device, rig.host, [(0, 0, 64)]), awaited=True)
    assert isinstance(rig.copier.hold_computation(1), OSError)
    assert rig.copier.hold_computation(2) is None
    assert (rig.device[:64] == 9).all()
    assert rig.copier.hold_computation(3) is None, "unknown jobs have ended"
    assert [result.error is None for result in rig.copier.finished()] == [False, True]
