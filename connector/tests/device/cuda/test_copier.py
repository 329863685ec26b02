"""The CUDA transport on the driver's double: what it asks for, what it copies, and what is left after failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from cuda_double import ILLEGAL_ADDRESS, INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY, CudaDouble, DoubleKernel
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spillway_connector.device.copier import Direction
from spillway_connector.device.cuda.driver import CudaDriver
from spillway_connector.device.cuda.transport import CudaTransport
from spillway_connector.device.pinned import PinMethod
from spillway_connector.device.stream_copier import CopyLimits
from spillway_connector.errors import ConfigError, DeviceCopyError
from spillway_connector.plan.copies import CopyPlan
from spillway_connector.plan.copy_table import PATHS, CopyTable
from spillway_connector.testing.clock import SteppedClock
from spillway_connector.testing.copier_contract import CopierContract
from spillway_connector.testing.memory import unnamed_region

ROWS, ROW = 4, 16_384
BOTH = list(Direction)


def only(path: str) -> CopyTable:
    return CopyTable(store=((1 << 62, path),), load=((1 << 62, path),))


class Rig:
    """`device` memory of the region's size, and the transport between them."""

    def __init__(self, path: str = "batch", mode: str = "auto", double: CudaDouble | None = None, **options) -> None:
        self.double = double or CudaDouble()
        self.kernel = DoubleKernel(self.double)
        self.region = unnamed_region(ROWS, ROW)
        self.host = np.asarray(self.region.create_kv_memoryview()).reshape(-1).view(np.uint8)
        self.device = np.zeros(ROWS * ROW, dtype=np.uint8)
        self.driver = CudaDriver(self.double.proc_address)
        self.compute = 0
        self.transport = CudaTransport(
            self.driver, self.region, 0, lambda: self.compute, mode,
            table=only(path), kernel=lambda device: self.kernel, slot_bytes=1024, **options,
        )  # fmt: skip
        self.copiers = [self.transport.copier(direction) for direction in BOTH]

    def copier(self, direction: Direction):
        return self.copiers[BOTH.index(direction)]

    def randomize(self) -> None:
        rng = np.random.default_rng(5)
        self.device[:] = rng.integers(0, 255, self.device.size)
        self.host[:] = rng.integers(0, 255, self.host.size)

    def plan(self, spans) -> CopyPlan:
        columns = np.array(spans, dtype=np.int64).reshape(-1, 3)
        return CopyPlan(
            self.device.ctypes.data + columns[:, 0],
            self.region.address + columns[:, 1],
            np.ascontiguousarray(columns[:, 2]),
        )

    def expected(self, direction: Direction, spans) -> tuple[np.ndarray, np.ndarray]:
        device, host = self.device.copy(), self.host.copy()
        for at_device, at_host, size in spans:
            if direction is Direction.STORE:
                host[at_host : at_host + size] = device[at_device : at_device + size]
            else:
                device[at_device : at_device + size] = host[at_host : at_host + size]
        return device, host

    def close(self) -> None:
        for copier in self.copiers:
            copier.close()
        del self.host
        self.region.cleanup()


@pytest.fixture
def rig():
    """Makes rigs; every one must give back what it took."""
    made: list[Rig] = []

    def make(*arguments, **options) -> Rig:
        made.append(Rig(*arguments, **options))
        return made[-1]

    yield make
    for each in made:
        each.double.dead = 0
        each.close()
        assert each.double.live() == (0, 0, 0, 0)
        assert each.double.contexts == 0


def finish(copier, count=1):
    copier.wait(set(range(100)))
    results = copier.finished()
    assert len(results) == count
    return results


class CudaRig:
    """See copier_contract.CopierRig."""

    def __init__(self, opened: Rig, direction: Direction, path: str) -> None:
        self.device, self.host = opened.device, opened.host
        self.copier = opened.copier(direction)
        self._double = opened.double
        copy = "cuMemcpyDtoHAsync" if direction is Direction.STORE else "cuMemcpyHtoDAsync"
        self._function = copy if path == "loop" else "cuMemcpyBatchAsync"
        self._held = False

    def hold(self) -> None:
        self._held = True
        self._double.streams[0].work.append(lambda: not self._held)

    def release(self) -> None:
        self._held = False

    def fail_next(self) -> None:
        self._double.failures[self._function].append(INVALID_VALUE)


@pytest.fixture(params=PATHS)
def make_rig(request: pytest.FixtureRequest) -> Iterator[Callable[[Direction], CudaRig]]:
    opened: list[Rig] = []

    def make(direction: Direction) -> CudaRig:
        opened.append(Rig(request.param))
        return CudaRig(opened[-1], direction, request.param)

    yield make
    for each in opened:
        each.close()


class TestCudaCopier(CopierContract):
    pass


SPANS = [(40 * k, 32 * (31 - k), 32) for k in range(32)]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("direction", BOTH)
def test_a_plan_is_carried_out(rig, direction, path):
    cuda = rig(path)
    cuda.randomize()
    device, host = cuda.expected(direction, SPANS)
    cuda.copier(direction).submit(1, cuda.plan(SPANS))
    (result,) = finish(cuda.copier(direction))
    assert (result.job_id, result.size_bytes, result.error, result.seconds) == (1, 1024, None, pytest.approx(0.002))
    assert (cuda.device == device).all()
    assert (cuda.host == host).all()
    each = cuda.double.calls["cuMemcpyDtoHAsync"] + cuda.double.calls["cuMemcpyHtoDAsync"]
    assert (each, cuda.double.calls["cuMemcpyBatchAsync"], cuda.kernel.launches[2:]) == {
        "loop": (32, 0, []), "batch": (0, 1, []), "staged": (1, 0, [32]),
    }[path]  # fmt: skip


@st.composite
def word_spans(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    sizes = draw(st.lists(st.integers(1, 30).map(lambda words: 8 * words), min_size=1, max_size=50))
    sides = []
    for _ in range(2):
        order = draw(st.permutations(range(len(sizes))))
        at, starts = 0, [0] * len(sizes)
        for index in order:
            at += 8 * draw(st.integers(0, 3))
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
    st.lists(word_spans(), min_size=1, max_size=3),
    st.sampled_from(BOTH),
    st.sampled_from(PATHS),
    st.integers(0, 1 << 30),
    st.integers(1, 9),
)
def test_jobs_in_any_interleaving_of_the_streams_equal_the_naive_model(jobs, direction, path, seed, descriptors):
    """Jobs share slots and overlap; the double runs whatever the events do not forbid."""
    cuda = Rig(path, double=CudaDouble(seed), limits=CopyLimits(descriptors=descriptors))
    cuda.randomize()
    device, host = cuda.device.copy(), cuda.host.copy()
    for spans in jobs:
        expected = cuda.expected(direction, spans)
        if direction is Direction.STORE:
            for _, at, size in spans:
                host[at : at + size] = expected[1][at : at + size]
        else:
            for at, _, size in spans:
                device[at : at + size] = expected[0][at : at + size]
    copier = cuda.copier(direction)
    for number, spans in enumerate(jobs):
        copier.submit(number, cuda.plan(spans))
        cuda.double.some_steps()
    assert [result.error for result in finish(copier, len(jobs))] == [None] * len(jobs)
    assert (cuda.device == device).all()
    assert (cuda.host == host).all()
    cuda.close()
    assert cuda.double.live() == (0, 0, 0, 0)


@pytest.mark.parametrize("path", PATHS)
def test_a_store_reads_what_kernels_before_it_wrote(rig, path):
    for seed in range(20):
        cuda = rig(path, double=CudaDouble(seed))
        cuda.double.enqueue(0, lambda cuda=cuda: cuda.device.fill(7))
        cuda.copier(Direction.STORE).submit(1, cuda.plan(SPANS))
        finish(cuda.copier(Direction.STORE))
        assert (cuda.host[:1024] == 7).all()


@pytest.mark.parametrize("path", PATHS)
def test_a_load_does_not_overwrite_what_kernels_before_it_read(rig, path):
    for seed in range(20):
        cuda = rig(path, double=CudaDouble(seed))
        cuda.host.fill(9)
        seen = []
        cuda.double.enqueue(0, lambda cuda=cuda, seen=seen: seen.append(cuda.device.copy()))
        cuda.copier(Direction.LOAD).submit(1, cuda.plan(SPANS))
        finish(cuda.copier(Direction.LOAD))
        assert not seen[0].any()
        assert (cuda.device[:32] == 9).all()


def test_loads_may_read_host_rows_early_and_stores_may_not_read_blocks_early(rig):
    cuda = rig("batch")
    for direction in BOTH:
        cuda.copier(direction).submit(1, cuda.plan(SPANS))
        finish(cuda.copier(direction))
    assert [entry[2] for entry in cuda.double.log if entry[0] == "batch"] == [1, 3]  # stream order, any order


def test_both_signatures_of_the_batch_are_served(rig):
    old = rig("batch", double=CudaDouble(batch_versions=(12080,)))
    assert old.driver.batch_version == 12080
    old.randomize()
    _device, host = old.expected(Direction.STORE, SPANS)
    old.copier(Direction.STORE).submit(1, old.plan(SPANS))
    finish(old.copier(Direction.STORE))
    assert (old.host == host).all()


def test_a_driver_without_the_batch_loops(rig):
    cuda = rig("batch", double=CudaDouble(batch_versions=()))
    assert cuda.transport.path.name == "loop"
    cuda.copier(Direction.STORE).submit(1, cuda.plan(SPANS))
    finish(cuda.copier(Direction.STORE))
    assert cuda.double.calls["cuMemcpyDtoHAsync"] == 32


def test_a_batch_refused_as_unsupported_falls_back_without_losing_the_job(rig):
    cuda = rig("batch")
    cuda.randomize()
    _device, host = cuda.expected(Direction.STORE, SPANS)
    cuda.double.failures["cuMemcpyBatchAsync"].append(NOT_SUPPORTED)
    cuda.copier(Direction.STORE).submit(1, cuda.plan(SPANS))
    (result,) = finish(cuda.copier(Direction.STORE))
    assert result.error is None
    assert (cuda.host == host).all()
    assert cuda.transport.path.name == "loop"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("direction", BOTH)
def test_a_refused_copy_fails_its_job_and_no_other(rig, direction, path):
    cuda = rig(path)
    copy = "cuMemcpyDtoHAsync" if direction is Direction.STORE else "cuMemcpyHtoDAsync"
    name = "cuMemcpyBatchAsync" if path == "batch" else copy
    cuda.double.failures[name].append(INVALID_VALUE)
    copier = cuda.copier(direction)
    copier.submit(1, cuda.plan(SPANS))
    copier.submit(2, cuda.plan(SPANS))
    first, second = finish(copier, 2)
    assert (first.job_id, second.job_id, second.error) == (1, 2, None)
    assert isinstance(first.error, DeviceCopyError)
    assert "CUDA_ERROR_INVALID_VALUE" in str(first.error) and name in str(first.error)


def test_a_refused_kernel_fails_its_job_and_the_next_go_without(rig):
    cuda = rig("staged")
    cuda.kernel.refuse = True
    copier = cuda.copier(Direction.LOAD)
    copier.submit(1, cuda.plan(SPANS))
    copier.submit(2, cuda.plan(SPANS))
    first, second = finish(copier, 2)
    assert "no kernel today" in str(first.error)
    assert second.error is None
    assert cuda.double.calls["cuMemcpyBatchAsync"] == 1


def test_no_kernel_at_the_start_means_no_staging(rig):
    double = CudaDouble()
    double.failures["cuMemAlloc"].extend([0, OUT_OF_MEMORY])
    cuda = rig("staged", double=double)
    assert not cuda.transport.path.staged
    assert not double.allocations  # the slot that could be had is given back
    cuda.copier(Direction.STORE).submit(1, cuda.plan(SPANS))
    assert finish(cuda.copier(Direction.STORE))[0].error is None


@pytest.mark.parametrize(
    "spans", [[(40 * k, 32 * k, 32) for k in range(3)], [(41 * k, 33 * k, 32) for k in range(32)]], ids=["few", "odd"]
)
def test_what_the_kernel_is_not_for_goes_by_batch(rig, spans):
    cuda = rig("staged")
    cuda.randomize()
    _device, host = cuda.expected(Direction.STORE, spans)
    cuda.copier(Direction.STORE).submit(1, cuda.plan(spans))
    finish(cuda.copier(Direction.STORE))
    assert (cuda.host == host).all()
    assert cuda.double.calls["cuMemcpyBatchAsync"] == 1


@pytest.mark.parametrize("path", PATHS)
def test_an_unusable_device_fails_every_job_and_ends_no_thread(rig, path):
    cuda = rig(path)
    copier = cuda.copier(Direction.STORE)
    copier.submit(1, cuda.plan(SPANS))
    cuda.double.dead = ILLEGAL_ADDRESS
    (result,) = copier.finished()
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in str(result.error)
    with pytest.raises(DeviceCopyError):
        copier.submit(2, cuda.plan(SPANS))
    assert copier.finished() == []
    copier.wait({1, 2})


def test_a_late_job_is_not_reported_while_it_may_still_write(rig):
    """The driver cannot stop a copy: its blocks must not be given away."""
    clock = SteppedClock()
    cuda = rig("loop")
    copier = cuda.copiers[0]
    copier._clock = clock
    blocked = [True]
    cuda.double.streams[0].work.append(lambda: not blocked[0])
    copier.submit(1, cuda.plan(SPANS))
    clock.advance(3600.0)
    assert copier.finished() == []
    blocked[0] = False
    (result,) = finish(copier)
    assert result.error is None


def test_the_region_is_pinned_until_the_last_copier_closes(rig):
    cuda = rig("loop", pin_chunk_bytes=3 * ROW)
    assert cuda.transport.pin.method is PinMethod.CUDA
    assert list(cuda.double.registered.values()) == [3 * ROW, ROW]
    assert cuda.transport.pin.boundaries == (cuda.region.address + 3 * ROW,)
    cuda.copiers[0].close()
    assert len(cuda.double.registered) == 2
    cuda.copiers[1].close()
    assert not cuda.double.registered


def test_memory_that_cannot_be_pinned_still_copies_but_not_by_kernel(rig):
    double = CudaDouble()
    double.failures["cuMemHostRegister"].append(OUT_OF_MEMORY)
    cuda = rig("staged", double=double)
    assert (cuda.transport.pin.pinned, cuda.transport.path.staged) == (False, False)
    cuda.randomize()
    device, _host = cuda.expected(Direction.LOAD, SPANS)
    cuda.copier(Direction.LOAD).submit(1, cuda.plan(SPANS))
    finish(cuda.copier(Direction.LOAD))
    assert (cuda.device == device).all()


def test_a_missing_function_names_the_driver_that_is_needed():
    with pytest.raises(ConfigError, match=r"no cuEventQuery; install a driver of CUDA 12\.0"):
        CudaDriver(CudaDouble(without=("cuEventQuery",)).proc_address)


def test_a_missing_driver_names_the_file():
    with pytest.raises(ConfigError, match=r"'/nowhere.so' cannot be loaded"):
        CudaDriver.load("/nowhere.so")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("seed", range(10))
def test_what_is_computed_behind_an_awaited_load_reads_its_bytes(rig, path, seed):
    cuda = rig(path, double=CudaDouble(seed))
    cuda.randomize()
    device, _ = cuda.expected(Direction.LOAD, SPANS)
    copier, seen = cuda.copier(Direction.LOAD), np.zeros_like(cuda.device)
    cuda.compute = cuda.driver.create_stream()
    halves = SPANS[:16], SPANS[16:]
    for job_id, spans in enumerate(halves):
        copier.submit(job_id, cuda.plan(spans), awaited=True)

    def read(spans) -> None:
        for at, _, size in spans:
            seen[at : at + size] = cuda.device[at : at + size]

    for job_id, spans in enumerate(halves):
        assert copier.hold_computation(job_id) is None
        cuda.double.enqueue(cuda.compute, lambda spans=spans: read(spans))
    cuda.double.drain()
    for at, _, size in SPANS:
        assert (seen[at : at + size] == device[at : at + size]).all()
    finish(copier, 2)
    cuda.driver.destroy_stream(cuda.compute)


def test_computation_that_waits_learns_of_a_copy_that_was_not_submitted(rig):
    cuda = rig("loop")
    copier = cuda.copier(Direction.LOAD)
    cuda.double.failures["cuMemcpyHtoDAsync"].extend([0, INVALID_VALUE])
    copier.submit(1, cuda.plan(SPANS), awaited=True)
    assert isinstance(copier.hold_computation(1), DeviceCopyError)
    assert isinstance(finish(copier)[0].error, DeviceCopyError)
