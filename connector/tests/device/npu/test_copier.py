"""The NPU transport on the emulator: what it copies, in which order, and what is left after failures."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest
from acl_emulator.rig import Rig, rig
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spillway_connector.device.copier import Direction
from spillway_connector.device.stream_copier import CopyLimits, split_at
from spillway_connector.errors import DeviceCopyError
from spillway_connector.plan.copies import CopyPlan
from spillway_connector.testing.clock import SteppedClock
from spillway_connector.testing.copier_contract import CopierContract

BOTH = list(Direction)
MODES = ["auto", "off"]
SPANS = [(0, 100, 4096), (9000, 20_000, 1), (30_000, 50_000, 777)]


class NpuRig:
    """See copier_contract.CopierRig."""

    def __init__(self, rig: Rig, direction: Direction, mode: str, gate: int) -> None:
        self.device, self.host = rig.device, rig.host
        self.copier = rig.copier(direction, mode)
        self._rig, self._mode, self._gate = rig, mode, gate

    def hold(self) -> None:
        self._rig.emulator.gate(self._rig.compute, self._gate)

    def release(self) -> None:
        self._rig.emulator.open_gate(self._gate)

    def fail_next(self) -> None:
        self._rig.emulator.fail("aclrtMemcpyBatchAsync" if self._mode == "auto" else "aclrtMemcpyAsync", 1, 107000)


@pytest.fixture(params=["auto", "off"])
def make_rig(emulator, request: pytest.FixtureRequest) -> Iterator[Callable[[Direction], NpuRig]]:
    with ExitStack() as opened:
        gates = itertools.count(3)  # an open one stays open
        yield lambda direction: NpuRig(opened.enter_context(rig(emulator)), direction, request.param, next(gates))


class TestNpuCopier(CopierContract):
    pass


@pytest.fixture
def npu(emulator):
    with rig(emulator) as opened:
        yield opened


def randomize(npu: Rig, seed: int = 5) -> None:
    rng = np.random.default_rng(seed)
    npu.device[:] = rng.integers(0, 255, npu.device.size)
    npu.host[:] = rng.integers(0, 255, npu.host.size)


def expected_after(npu: Rig, direction: Direction, spans) -> tuple[np.ndarray, np.ndarray]:
    """(device, host) as byte-by-byte copies would leave them."""
    device, host = npu.device.copy(), npu.host.copy()
    for at_device, at_host, size in spans:
        for byte in range(size):
            if direction is Direction.STORE:
                host[at_host + byte] = device[at_device + byte]
            else:
                device[at_device + byte] = host[at_host + byte]
    return device, host


def finish(copier, count=1):
    """The results of everything submitted: `count` jobs, in order."""
    copier.wait(set(range(100)))
    results = copier.finished()
    assert len(results) == count
    return results


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("direction", BOTH)
def test_a_plan_is_carried_out(npu, direction, mode):
    randomize(npu)
    device, host = expected_after(npu, direction, SPANS)
    copier = npu.copier(direction, mode)
    copier.submit(1, npu.plan(SPANS))
    (result,) = finish(copier)
    assert (result.job_id, result.size_bytes, result.error) == (1, 4874, None)
    assert result.seconds >= 0
    assert (npu.device == device).all()
    assert (npu.host == host).all()
    assert copier.finished() == []  # each job once
    used = "aclrtMemcpyBatchAsync" if mode == "auto" else "aclrtMemcpyAsync"
    assert npu.emulator.calls(used) == (1 if mode == "auto" else 3)


@st.composite
def random_spans(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Spans that overlap on neither side, in any order."""
    sizes = draw(st.lists(st.integers(1, 300), min_size=1, max_size=40))
    sides = []
    for _ in range(2):
        order = draw(st.permutations(range(len(sizes))))
        gaps = draw(st.lists(st.integers(0, 50), min_size=len(sizes), max_size=len(sizes)))
        at, starts = 0, [0] * len(sizes)
        for index, gap in zip(order, gaps):
            at += gap
            starts[index] = at
            at += sizes[index]
        sides.append(starts)
    return list(zip(*sides, sizes))


@settings(
    max_examples=3 * settings.default.max_examples // 2,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    random_spans(),
    st.sampled_from(BOTH),
    st.sampled_from(MODES),
    st.integers(1, 9),
    st.lists(st.integers(0, 15), max_size=3),
)
def test_random_plans_equal_the_naive_model(emulator, spans, direction, mode, descriptors, cuts):
    with rig(emulator) as npu:
        randomize(npu)
        device, host = expected_after(npu, direction, spans)
        boundaries = tuple(sorted(npu.host.ctypes.data + cut * 1000 for cut in cuts))
        copier = npu.copier(direction, mode, limits=CopyLimits(descriptors=descriptors), host_boundaries=boundaries)
        copier.submit(1, npu.plan(spans))
        (result,) = finish(copier)
        assert (result.error, result.size_bytes) == (None, sum(size for *_, size in spans))
        assert (npu.device == device).all()
        assert (npu.host == host).all()


def test_spans_are_cut_at_ends_of_registrations():
    columns = [np.array(c, dtype=np.int64) for c in ([100, 900, 2000], [1000, 1090, 1200], [90, 110, 50])]
    cut = split_at(CopyPlan(*columns), (1050, 1090, 1150, 1200))
    assert cut.host_addresses.tolist() == [1000, 1050, 1090, 1150, 1200]
    assert cut.device_addresses.tolist() == [100, 150, 900, 960, 2000]
    assert cut.sizes_bytes.tolist() == [50, 40, 60, 50, 50]
    assert columns[2].tolist() == [90, 110, 50]  # the plan itself is not changed


def test_calls_are_of_bounded_length(npu):
    copier = npu.copier(Direction.STORE, limits=CopyLimits(descriptors=100))
    copier.submit(1, npu.plan([(n * 16, n * 24, 8) for n in range(250)]))
    assert finish(copier)[0].error is None
    lengths = [line.split("num_batches=")[1].split()[0] for line in npu.emulator.log() if "BatchAsync" in line]
    assert lengths == ["100", "100", "50"]


# -- ordering against the computation


@pytest.mark.parametrize("mode", MODES)
def test_a_store_sees_what_a_slow_kernel_writes(npu, mode):
    """A copy that does not wait for the compute stream has run long before the kernel writes (vllm#45704)."""
    npu.device[:] = 1
    npu.emulator.gate(npu.compute, 3)
    npu.emulator.fill(npu.compute, npu.device, 2)
    copier = npu.copier(Direction.STORE, mode)
    copier.submit(1, npu.plan([(0, 0, 65_536)]))
    assert not npu.emulator.wait_tasks(3, timeout_ms=50)  # the copy stream has not moved
    assert copier.finished() == []
    npu.emulator.open_gate(3)
    assert finish(copier)[0].error is None
    assert (npu.host == 2).all()


@pytest.mark.parametrize("mode", MODES)
def test_a_load_leaves_a_slow_kernel_its_input(npu, mode):
    """The kernel reads, and another one zeroes, the blocks that the load is for (vllm#47282)."""
    npu.device[:], npu.host[:] = 1, 9
    seen = np.zeros_like(npu.device)
    npu.emulator.gate(npu.compute, 3)
    npu.emulator.copy_out(npu.compute, seen, npu.device)
    npu.emulator.fill(npu.compute, npu.device, 0)
    copier = npu.copier(Direction.LOAD, mode)
    copier.submit(1, npu.plan([(0, 0, 65_536)]))
    assert not npu.emulator.wait_tasks(4, timeout_ms=50)
    npu.emulator.open_gate(3)
    assert finish(copier)[0].error is None
    assert (seen == 1).all()
    assert (npu.device == 9).all()


def test_the_compute_stream_is_asked_at_every_submit(npu):
    """Reading its handle is what makes torch_npu hand queued kernels to the device."""
    asked = []
    copier = npu.copier(Direction.STORE)
    copier._compute_stream = lambda: asked.append(1) or npu.compute
    for job_id in range(3):
        copier.submit(job_id, npu.plan(SPANS))
    assert len(asked) == 3
    finish(copier, 3)


def test_the_model_thread_synchronises_nothing(npu):
    store, load = npu.copier(Direction.STORE), npu.copier(Direction.LOAD)
    for job_id in range(20):
        store.submit(job_id, npu.plan(SPANS))
        load.submit(job_id, npu.plan(SPANS))
        store.finished()
        load.finished()
    assert not [line for line in npu.emulator.log() if "Synchronize" in line]


def test_directions_have_streams_of_their_own(npu):
    """A store that waits for a kernel does not hold back a load of another compute stream."""
    store, load = npu.copier(Direction.STORE), npu.copier(Direction.LOAD)
    npu.emulator.gate(npu.compute, 3)
    store.submit(1, npu.plan(SPANS))
    other = npu.emulator.create_stream()
    load._compute_stream = lambda: other
    load.submit(1, npu.plan(SPANS))
    assert finish(load)[0].error is None
    assert store.finished() == []
    npu.emulator.open_gate(3)
    assert finish(store)[0].error is None
    npu.emulator.destroy_stream(other)


def test_descriptor_arrays_outlive_the_submit(npu):
    """The emulator reads them when the copy runs, and fails the stream when they have changed."""
    npu.emulator.gate(npu.compute, 3)
    copier = npu.copier(Direction.STORE)
    copier.submit(1, npu.plan([(n * 16, n * 16, 8) for n in range(2000)]))
    churn = [np.full(2000, 7, dtype=np.int64) for _ in range(50)]  # takes freed memory, were there any
    npu.emulator.open_gate(3)
    assert finish(copier)[0].error is None
    assert len(churn) == 50


def test_pageable_memory_is_copied_too(emulator):
    with rig(emulator, pinned=False) as npu:
        randomize(npu)
        copier = npu.copier(Direction.STORE)
        copier.submit(1, npu.plan([(0, 0, 65_536)]))
        assert (npu.host == npu.device).all()  # the call itself did it
        assert finish(copier)[0].error is None


# -- failures


def test_a_batch_refused_as_unsupported_becomes_a_loop_and_loses_nothing(npu, monkeypatch):
    monkeypatch.setenv("ACL_EMULATOR_BATCH", "unsupported")
    randomize(npu)
    store = npu.copier(Direction.STORE)
    store.submit(1, npu.plan([(0, 0, 65_536)]))
    store.submit(2, npu.plan(SPANS))
    assert [result.error for result in finish(store, 2)] == [None, None]
    assert store._path.name == "loop"
    assert npu.emulator.calls("aclrtMemcpyBatchAsync") == 1


@pytest.mark.parametrize(("mode", "function"), [("auto", "aclrtMemcpyBatchAsync"), ("off", "aclrtMemcpyAsync")])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_refused_copy_fails_its_job_alone(npu, mode, function, nth):
    randomize(npu)
    copier = npu.copier(Direction.STORE, mode, limits=CopyLimits(descriptors=1))
    npu.emulator.fail(function, nth, 107000)
    copier.submit(1, npu.plan(SPANS))
    copier.submit(2, npu.plan([(0, 0, 65_536)]))
    first, second = finish(copier, 2)
    assert (first.job_id, second.job_id, second.error) == (1, 2, None)
    assert isinstance(first.error, DeviceCopyError)
    assert function in str(first.error)
    assert (npu.host == npu.device).all()


def test_a_failed_job_is_reported_when_its_memory_is_free_not_before(npu):
    """The batch breaks off in the middle: what it has begun still reads the blocks."""
    copier = npu.copier(Direction.STORE)
    npu.emulator.gate(npu.compute, 3)
    npu.emulator.break_batch(after=2, code=507899)
    copier.submit(1, npu.plan(SPANS))
    assert copier.finished() == []
    npu.emulator.open_gate(3)
    (result,) = finish(copier)
    assert "507899" in str(result.error)
    assert (npu.host[100:4196] == npu.device[:4096]).all()


@pytest.mark.parametrize("function", ["aclrtStreamWaitEvent", "aclrtCreateEventExWithFlag", "aclrtRecordEvent"])
def test_a_job_that_cannot_begin_is_refused_and_touches_nothing(npu, function):
    copier = npu.copier(Direction.STORE)
    npu.device[:] = 7
    npu.emulator.fail(function, 1, 207001)
    with pytest.raises(DeviceCopyError, match="207001"):
        copier.submit(1, npu.plan(SPANS))
    copier.wait({1})
    assert copier.finished() == []
    assert (npu.host == 0).all()
    copier.submit(2, npu.plan(SPANS))
    assert finish(copier)[0].error is None


def test_without_an_end_event_the_stream_is_given_up(npu):
    copier = npu.copier(Direction.STORE)
    copier.submit(1, npu.plan(SPANS))
    npu.emulator.fail("aclrtRecordEvent", 3, 207001)  # barrier, start, end
    with pytest.raises(DeviceCopyError, match="207001"):
        copier.submit(2, npu.plan(SPANS))
    assert [result.job_id for result in copier.finished()] == [1]
    copier.submit(3, npu.plan(SPANS))
    assert finish(copier)[0].error is None


def test_a_plan_that_makes_no_sense_is_a_failed_job(npu):
    copier = npu.copier(Direction.STORE, "off")
    plan = npu.plan(SPANS)
    copier.submit(1, CopyPlan(plan.device_addresses, plan.host_addresses[:1], plan.sizes_bytes))
    assert isinstance(finish(copier)[0].error, DeviceCopyError)


def test_a_copy_that_fails_on_the_device_is_found_out(npu):
    """The event of a failed copy never comes, so the copier asks the stream about a job that takes too long."""
    clock = SteppedClock()
    copier = npu.copier(Direction.STORE, clock=clock)
    npu.emulator.fail_copy(2, 507054)
    for job_id in (1, 2):
        copier.submit(job_id, npu.plan(SPANS))
    assert npu.emulator.wait_tasks(0, timeout_ms=60_000)
    assert copier.finished() == []
    clock.advance(1.5)
    first, second = copier.finished()
    assert (first.job_id, second.job_id) == (1, 2)
    assert "HBM multi-bit ECC" in str(first.error)
    assert "HBM multi-bit ECC" in str(second.error)
    copier.submit(3, npu.plan(SPANS))  # on a new stream
    assert finish(copier)[0].error is None


def test_waiting_for_a_copy_that_failed_on_the_device_ends(npu):
    copier = npu.copier(Direction.STORE, limits=CopyLimits(check_seconds=0.01))
    npu.emulator.fail_copy(1, 507899)
    copier.submit(1, npu.plan(SPANS))
    copier.wait({1})
    assert "507899" in str(copier.finished()[0].error)


def test_a_job_that_never_ends_fails_at_its_deadline(npu):
    clock = SteppedClock()
    copier = npu.copier(Direction.LOAD, clock=clock, limits=CopyLimits(job_seconds=30))
    npu.emulator.gate(npu.compute, 3)  # never opened
    copier.submit(1, npu.plan(SPANS))
    clock.advance(29)
    assert copier.finished() == []
    clock.advance(2)
    (result,) = copier.finished()
    assert "has not ended after 31 s" in str(result.error)
    assert (npu.device == 0).all()


def test_waiting_has_a_deadline(npu):
    copier = npu.copier(Direction.LOAD, limits=CopyLimits(job_seconds=0.05, check_seconds=0.01))
    npu.emulator.gate(npu.compute, 3)
    copier.submit(1, npu.plan(SPANS))
    copier.wait({1})
    assert "has not ended after" in str(copier.finished()[0].error)


def test_a_query_that_fails_gives_the_stream_up(npu):
    copier = npu.copier(Direction.STORE)
    npu.emulator.gate(npu.compute, 3)
    copier.submit(1, npu.plan(SPANS))
    npu.emulator.fail("aclrtQueryEventStatus", 1, 507899)
    assert "507899" in str(copier.finished()[0].error)


def test_no_new_stream_after_a_failure_refuses_until_there_is_one(npu):
    copier = npu.copier(Direction.STORE, limits=CopyLimits(check_seconds=0.01))
    npu.emulator.fail_copy(1, 507899)
    copier.submit(1, npu.plan(SPANS))
    copier.wait({1})
    npu.emulator.fail("aclrtCreateStream", 1, 207001)
    with pytest.raises(DeviceCopyError, match="no new store stream"):
        copier.submit(2, npu.plan(SPANS))
    copier.submit(3, npu.plan(SPANS))
    assert [result.error is None for result in finish(copier, 2)] == [False, True]


def test_no_more_jobs_than_allowed_are_in_flight(npu):
    copier = npu.copier(Direction.STORE, limits=CopyLimits(jobs=2))
    npu.emulator.gate(npu.compute, 3)
    for job_id in (1, 2):
        copier.submit(job_id, npu.plan(SPANS))
    with pytest.raises(DeviceCopyError, match="2 store jobs are in flight"):
        copier.submit(3, npu.plan(SPANS))
    with pytest.raises(DeviceCopyError, match="in flight already"):
        copier.submit(1, npu.plan(SPANS))
    npu.emulator.open_gate(3)
    copier.wait({2})
    copier.submit(3, npu.plan(SPANS))
    assert [result.job_id for result in finish(copier, 3)] == [1, 2, 3]


# -- life and end


def test_events_are_used_again(npu):
    copier = npu.copier(Direction.STORE)
    for job_id in range(50):
        copier.submit(job_id, npu.plan(SPANS))
        finish(copier)
    assert npu.emulator.calls("aclrtCreateEventExWithFlag") == 3


def test_an_empty_plan_ends_without_the_device(npu):
    copier = npu.copier(Direction.STORE)
    copier.submit(1, npu.plan([]))
    (result,) = copier.finished()
    assert (result.size_bytes, result.error) == (0, None)
    assert npu.emulator.calls("aclrtRecordEvent") == 0


def test_close_finishes_what_was_submitted_and_keeps_its_result(npu):
    closed = []
    npu.device[:] = 4
    copier = npu.copier(Direction.STORE, on_close=lambda: closed.append(1))
    npu.emulator.delay_copies(1000)
    copier.submit(1, npu.plan([(0, 0, 65_536)]))
    copier.close()
    copier.close()
    assert (npu.host == 4).all()
    assert copier.finished()[0].error is None
    assert closed == [1]
    with pytest.raises(DeviceCopyError, match="closed"):
        copier.submit(2, npu.plan(SPANS))


def test_another_thread_sets_its_device_first(npu):
    copier = npu.copier(Direction.STORE)
    raised = []

    def use():
        try:
            copier.submit(1, npu.plan(SPANS))
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert raised == []
    assert finish(copier)[0].error is None


def test_runtimes_without_reusable_events_work_too(emulator_old_events):
    with rig(emulator_old_events) as npu:
        randomize(npu)
        copier = npu.copier(Direction.STORE)
        for job_id in range(5):
            copier.submit(job_id, npu.plan([(0, 0, 65_536)]))
            copier.wait({job_id})  # by asking: this runtime cannot wait for an event with a deadline
        assert [result.error for result in copier.finished()] == [None] * 5
        assert (npu.host == npu.device).all()
        emulator_old_events.fail("aclrtStreamWaitEvent", 1, 207001)
        with pytest.raises(DeviceCopyError):
            copier.submit(9, npu.plan(SPANS))
        copier.submit(10, npu.plan(SPANS))
        assert finish(copier)[0].error is None


def test_an_old_runtime_loops(emulator_8_3):
    with rig(emulator_8_3, pinned=False) as npu:
        randomize(npu)
        copier = npu.copier(Direction.STORE)
        copier.submit(1, npu.plan([(0, 0, 65_536)]))
        assert finish(copier)[0].error is None
        assert (npu.host == npu.device).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("direction", BOTH)
def test_nothing_is_enqueued_while_a_graph_is_captured(npu, direction, mode):
    """The barrier would become part of the graph. The job is refused, and the next one after the capture runs."""
    copier = npu.copier(direction, mode)
    npu.emulator.capture(npu.compute, True)
    before = len(npu.emulator.log())
    with pytest.raises(DeviceCopyError, match=rf"{direction.value} job 1 came while a graph is captured"):
        copier.submit(1, npu.plan(SPANS))
    assert copier.finished() == []
    during = npu.emulator.log()[before:]
    assert len(during) == 1 and " aclmdlRICaptureGetInfo " in during[0]
    npu.emulator.capture(npu.compute, False)
    copier.submit(1, npu.plan(SPANS))
    copier.wait({1})
    assert [(result.job_id, result.error) for result in copier.finished()] == [(1, None)]


def test_a_runtime_that_cannot_tell_captures_is_taken_for_one_without(npu):
    copier = npu.copier(Direction.STORE)
    npu.emulator.fail("aclmdlRICaptureGetInfo", 1, 207000)
    copier.submit(1, npu.plan(SPANS))
    copier.wait({1})
    assert [result.error for result in copier.finished()] == [None]


# -- computation that waits for a load


@pytest.mark.parametrize("mode", MODES)
def test_what_is_computed_behind_an_awaited_load_reads_its_bytes(npu, mode):
    """The device waits; the model thread goes on while no copy has moved."""
    npu.device[:], npu.host[:] = 1, 9
    npu.emulator.gate(npu.compute, 3)  # the copies wait for what was computed before
    copier = npu.copier(Direction.LOAD, mode)
    half = npu.device.nbytes // 2
    copier.submit(1, npu.plan([(0, 0, half)]), awaited=True)
    copier.submit(2, npu.plan([(half, half, half)]), awaited=True)
    seen = np.zeros_like(npu.device)
    npu.emulator.delay_copies(20_000)
    for job_id, part in ((1, slice(None, half)), (2, slice(half, None))):
        assert copier.hold_computation(job_id) is None
        npu.emulator.copy_out(npu.compute, seen[part], npu.device[part])
    assert copier.finished() == []
    npu.emulator.open_gate(3)
    assert npu.emulator.wait_tasks(0, timeout_ms=30_000)
    assert (seen == 9).all()
    assert not [line for line in npu.emulator.log() if "Synchronize" in line]
    assert [result.error for result in finish(copier, 2)] == [None, None]


def test_computation_that_waits_learns_of_a_copy_that_was_not_submitted(npu):
    copier = npu.copier(Direction.LOAD, "off")
    npu.emulator.fail("aclrtMemcpyAsync", 2, 107000)
    copier.submit(1, npu.plan(SPANS), awaited=True)
    copier.submit(2, npu.plan(SPANS), awaited=True)
    assert isinstance(copier.hold_computation(1), DeviceCopyError)
    assert copier.hold_computation(2) is None
    assert [result.error is None for result in finish(copier, 2)] == [False, True]


def test_where_computation_cannot_wait_the_host_does(npu):
    npu.device[:], npu.host[:] = 1, 9
    copier = npu.copier(Direction.LOAD)
    copier.submit(1, npu.plan([(0, 0, 65_536)]), awaited=True)
    npu.emulator.fail("aclrtStreamWaitEvent", 1, 207001)
    assert isinstance(copier.hold_computation(1), DeviceCopyError)
    assert (npu.device == 9).all(), "no copy may write to blocks that were given to another request"
    assert finish(copier)[0].error is None
