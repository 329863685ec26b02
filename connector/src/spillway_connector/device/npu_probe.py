"""Check the transport's assumptions on a real NPU: `python -m spillway_connector.device.npu_probe`.

Needs no vLLM and no torch: run it in the engine's image with CANN's environment sourced. Every line is PASS, FAIL or
INFO; the exit status is 1 when a line is FAIL. docs/ascend.md lists the assumption behind each line.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spillway_connector.device.copier import Direction
from spillway_connector.device.host_region import HostRegion, region_path
from spillway_connector.device.npu.acl import (
    DEFAULT_LIBRARY,
    EVENT_SYNC,
    FEATURE_NOT_SUPPORTED,
    Acl,
    AclError,
    CopyKind,
    version_at_least,
)
from spillway_connector.device.npu.acl_batch import CopyPath
from spillway_connector.device.npu.copier import NpuCopier
from spillway_connector.device.npu.registrars import acl_registrar, torch_npu_registrar
from spillway_connector.device.pinned import HostPin, pin_host_memory
from spillway_connector.device.spans import Spans
from spillway_connector.device.stream_copier import CopyLimits
from spillway_connector.errors import ConfigError, SpillwayError
from spillway_connector.plan.copies import CopyPlan
from spillway_connector.plan.copy_table import BATCH, LOOP

_MIB = 1 << 20
_PIECES_BYTES = (4 << 10, 16 << 10, 64 << 10, 144 << 10, 256 << 10, 1 << 20, 4 << 20)
_BATCH_LENGTHS = (4096, 8192, 20_480)
_MAX_PIECES = 16_384
_ROUNDS = 5
_TIMEOUT_MS = 30_000
_OPTIONAL = (
    "aclrtMemcpyBatchAsync",
    "aclrtMemcpyBatchAsyncV2",
    "aclrtHostRegisterV2",
    "aclrtCreateEventExWithFlag",
    "aclrtSynchronizeEventWithTimeout",
    "aclrtStreamAbort",
    "aclsysGetVersionStr",
)


@dataclass(frozen=True, slots=True)
class Timing:
    """The times of one plan: seconds on the device, and seconds that the submitting thread was busy."""

    device_seconds: float
    submit_seconds: float


class Probe:
    """The device side and the host side (a mapping in /dev/shm, as the CPU tier's) of every check."""

    def __init__(self, acl: Acl, device: int, region: HostRegion, device_memory: int) -> None:
        self.acl = acl
        self.device = device
        self.region = region
        self.device_memory = device_memory
        self.failed = False
        self.host: npt.NDArray[np.uint8] = np.frombuffer(region.create_kv_memoryview().cast("B"), dtype=np.uint8)

    def report(self, verdict: str, name: str, detail: str) -> None:
        self.failed = self.failed or verdict == "FAIL"
        print(f"{verdict}  {name}: {detail}", flush=True)

    def check(self, name: str, act: Callable[..., tuple[str, str]], *arguments: object) -> None:
        try:
            verdict, detail = act(self, *arguments)
        except SpillwayError as error:
            verdict, detail = "FAIL", str(error)
        self.report(verdict, name, detail)

    def plan(self, piece_bytes: int, count: int, *, gaps: bool = True) -> CopyPlan:
        """Pieces that do not touch, at the same offsets on both sides."""
        offsets = np.arange(count, dtype=np.int64) * piece_bytes * (2 if gaps else 1)
        sizes = np.full(count, piece_bytes, dtype=np.int64)
        return CopyPlan(self.device_memory + offsets, self.region.address + offsets, sizes)

    def gigabytes_a_second(self, plan: CopyPlan, timing: Timing) -> str:
        if self.acl.is_emulator:
            return "ran (emulator: no rate)"
        return f"{plan.total_bytes / timing.device_seconds / 1e9:.2f} GB/s"

    def time(self, direction: Direction, path: str, plan: CopyPlan, pin: HostPin, rounds: int = _ROUNDS) -> Timing:
        """Median of some rounds behind an unmeasured one. Raises DeviceCopyError."""
        copier = NpuCopier(
            direction,
            self.acl,
            self.device,
            CopyPath(path, "probe"),
            lambda: 0,
            host_pinned=pin.pinned,
            host_boundaries=pin.boundaries,
            limits=CopyLimits(job_seconds=_TIMEOUT_MS / 1e3),
        )
        with contextlib.closing(copier):
            timings = []
            for job_id in range(rounds + 1):
                started = time.perf_counter()
                copier.submit(job_id, plan)
                submit_seconds = time.perf_counter() - started
                copier.wait({job_id})
                (result,) = copier.finished()
                if result.error is not None:
                    raise result.error
                timings.append(Timing(max(result.seconds, 1e-9), submit_seconds))
        measured = timings[1:]
        return Timing(
            statistics.median(timing.device_seconds for timing in measured),
            statistics.median(timing.submit_seconds for timing in measured),
        )


def versions(probe: Probe) -> tuple[str, str]:
    answers = probe.acl.package_versions()
    reported = ", ".join(f"{name} {version}" for name, version in answers.items()) or "no query answers"
    absent = [name for name in _OPTIONAL if not probe.acl.has(name)]
    detail = f"{reported}; interface {probe.acl.interface_version()}; not exported: {', '.join(absent) or 'nothing'}"
    return ("PASS" if answers else "FAIL"), detail


def events(probe: Probe) -> tuple[str, str]:
    """A copy on one stream, a wait for it on another, the event recorded again: the wait must keep what it saw."""
    acl, size = probe.acl, probe.region.size_bytes // 2
    first, second, event = acl.create_stream(), acl.create_stream(), acl.create_event(EVENT_SYNC)
    one = np.array([size], dtype=np.int64)
    upper, lower = np.array([probe.region.address + size]), np.array([probe.region.address])
    npu = np.array([probe.device_memory])
    try:
        probe.host[:size] = np.random.default_rng(1).integers(0, 255, size, dtype=np.uint8)
        probe.host[size:] = 0
        acl.memcpy_each(Spans(npu, lower, one), CopyKind.HOST_TO_DEVICE, first, hold_gil=False)
        acl.record_event(event, first)
        acl.stream_wait_event(second, event)
        if acl.events_are_reusable:
            acl.record_event(event, second)
        acl.memcpy_each(Spans(upper, npu, one), CopyKind.DEVICE_TO_HOST, second, hold_gil=False)
        acl.synchronize_stream(second, _TIMEOUT_MS)
    finally:
        acl.discard_stream(first)
        acl.discard_stream(second)
        acl.destroy_event(event)
    equal = bool((probe.host[:size] == probe.host[size : 2 * size]).all())
    sort = "reusable" if acl.events_are_reusable else "to be reset (slower: each job makes new ones)"
    return ("PASS" if equal else "FAIL"), f"a copy waited for another stream's; events are {sort}"


def pinning(probe: Probe, pin: HostPin) -> tuple[str, str]:
    """A return of 0 proves nothing: the submit of a large copy must also be much shorter than the copy."""
    if not pin.pinned:
        return "FAIL", f"the mapping in /dev/shm cannot be registered (best: {pin.method.value}); see the log above"
    plan = probe.plan(probe.region.size_bytes, 1, gaps=False)
    store = probe.time(Direction.STORE, LOOP, plan, pin)
    asynchronous = store.submit_seconds < 0.5 * store.device_seconds
    detail = (
        f"by {pin.method.value}, mlock {'too' if pin.locked else 'failed'}; {probe.region.size_bytes // _MIB} MiB "
        f"submitted in {store.submit_seconds * 1e3:.2f} ms, copied in {store.device_seconds * 1e3:.2f} ms"
    )
    if asynchronous or probe.acl.is_emulator:
        return "PASS", detail
    return "FAIL", f"{detail}: the copy is not asynchronous"


def batches(probe: Probe, pin: HostPin) -> tuple[str, str]:
    """Both directions, byte by byte."""
    if not probe.acl.has("aclrtMemcpyBatchAsync"):
        return "INFO", "the runtime has no aclrtMemcpyBatchAsync: batch_memcpy auto will loop"
    count, size = 64, 16 << 10
    plan = probe.plan(size, count)
    pieces = probe.host[: 2 * count * size].reshape(count, 2, size)[:, 0]
    wanted = np.random.default_rng(2).integers(0, 255, (count, size), dtype=np.uint8)
    pieces[:] = wanted
    try:
        probe.time(Direction.LOAD, BATCH, plan, pin, rounds=1)
        pieces[:] = 0
        probe.time(Direction.STORE, BATCH, plan, pin, rounds=1)
    except AclError as error:
        version = probe.acl.cann_version()
        expected = version is not None and version_at_least(version, 8, 5) is False
        return ("INFO" if expected else "FAIL"), str(error)
    if not (pieces == wanted).all():
        return "FAIL", "other bytes came back"
    return "PASS", f"{count} descriptors each way, equal bytes"


def batch_refusal(probe: Probe) -> tuple[str, str]:
    """The documented answer of a device without batches is 207000; any other code would fail jobs, not fall back."""
    call = probe.acl.batch_call(
        Spans(*(np.array([value], dtype=np.int64) for value in (probe.region.address, probe.device_memory, 0))),
        CopyKind.DEVICE_TO_HOST,
        probe.device,
    )
    stream = probe.acl.create_stream()
    try:
        call.submit(stream)
        return "INFO", "a descriptor of no bytes is accepted"
    except AclError as error:
        return "INFO", f"a descriptor of no bytes is answered with {error.code}" + (
            " (this device has no batches)" if error.code == FEATURE_NOT_SUPPORTED else ""
        )
    finally:
        probe.acl.discard_stream(stream)


def batch_lengths(probe: Probe) -> tuple[str, str]:
    """Measure how many descriptors one call takes, and how long the submitting thread is held."""
    stream, answers = probe.acl.create_stream(), []
    try:
        for length in _BATCH_LENGTHS:
            plan = probe.plan(512, length)
            spans = Spans(plan.host_addresses, plan.device_addresses, plan.sizes_bytes)
            call = probe.acl.batch_call(spans, CopyKind.DEVICE_TO_HOST, probe.device)
            started = time.perf_counter()
            try:
                call.submit(stream)
                answers.append(f"{length} in {(time.perf_counter() - started) * 1e3:.2f} ms")
            except AclError as error:
                answers.append(f"{length} refused with {error.code}")
            probe.acl.synchronize_stream(stream, _TIMEOUT_MS)
    finally:
        probe.acl.discard_stream(stream)
    return "INFO", ", ".join(answers)


def registration_seams(probe: Probe, pin_in: Callable[[int], HostPin]) -> tuple[str, str]:
    """Return how a copy across two registrations behaves. The transport cuts it in two; this shows whether it must."""
    pin = pin_in(probe.region.size_bytes // 2)
    try:
        if not pin.boundaries:
            return "INFO", "the memory was not registered in two pieces"
        whole = probe.plan(probe.region.size_bytes, 1, gaps=False)
        cut = probe.time(Direction.STORE, LOOP, whole, pin)
        stream = probe.acl.create_stream()
        spans = Spans(whole.host_addresses, whole.device_addresses, whole.sizes_bytes)
        started = time.perf_counter()
        try:
            probe.acl.memcpy_each(spans, CopyKind.DEVICE_TO_HOST, stream, hold_gil=False)
            held = f"taken in {(time.perf_counter() - started) * 1e3:.2f} ms of the submitting thread"
            probe.acl.synchronize_stream(stream, _TIMEOUT_MS)
        except AclError as error:
            held = f"refused with {error.code}"
        finally:
            probe.acl.discard_stream(stream)
    finally:
        pin.release()
    return "INFO", f"one copy across is {held}; cut in two it is submitted in {cut.submit_seconds * 1e3:.2f} ms"


def rates(probe: Probe, pin: HostPin, label: str) -> tuple[str, str]:
    """GB/s by size of piece, direction and path, beside one contiguous copy."""
    for direction in Direction:
        whole = probe.plan(probe.region.size_bytes, 1, gaps=False)
        limit = probe.time(direction, LOOP, whole, pin)
        name = f"rate {direction.value}, {label}"
        probe.report("INFO", name, f"contiguous {probe.gigabytes_a_second(whole, limit)}")
        for piece in _PIECES_BYTES:
            count = min(probe.region.size_bytes // (2 * piece), _MAX_PIECES)
            if count == 0:
                continue
            plan, measured = probe.plan(piece, count), []
            for path in (LOOP, BATCH):
                if path == BATCH and not probe.acl.has("aclrtMemcpyBatchAsync"):
                    continue
                timing = probe.time(direction, path, plan, pin)
                measured.append(
                    f"{path} {probe.gigabytes_a_second(plan, timing)}, "
                    f"{timing.submit_seconds / count * 1e6:.2f} us of the thread a piece"
                )
            probe.report("INFO", f"{name}, {count} x {piece >> 10} KiB", "; ".join(measured))

    return "INFO", f"{label} measured"


def run(acl: Acl, device: int, megabytes: int) -> int:
    """Print every check; the exit status."""
    acl.set_device(device)
    with contextlib.ExitStack() as cleanup:
        region = HostRegion(region_path(f"npu-probe-{os.getpid()}"), 2, megabytes * _MIB // 2)
        region.unlink_name()
        cleanup.callback(region.cleanup)
        region.populate(0, region.size_bytes)
        device_memory = acl.malloc(region.size_bytes)
        cleanup.callback(acl.free, device_memory)
        failed = run_checks(Probe(acl, device, region, device_memory))
    print("FAILED: see the lines above" if failed else "every check passed")
    return int(failed)


def run_checks(probe: Probe) -> bool:
    """Whether a check failed. Registers memory and unregisters it again."""
    acl, region = probe.acl, probe.region
    hook = torch_npu_registrar()
    registrars = [acl_registrar(acl), *([hook] if hook is not None else [])]

    def pin_in(chunk_bytes: int) -> HostPin:
        return pin_host_memory(region.address, region.num_rows, region.row_bytes, registrars, chunk_bytes)

    probe.check("versions", versions)
    probe.check("rates", rates, HostPin.unpinned(), "pageable")
    probe.check("registration seams", registration_seams, pin_in)
    pin = pin_in(region.size_bytes)
    try:
        probe.check("events", events)
        probe.check("pinning", pinning, pin)
        probe.check("batch", batches, pin)
        if acl.has("aclrtMemcpyBatchAsync"):
            probe.check("batch answers", batch_refusal)
            probe.check("batch lengths", batch_lengths)
        probe.check("rates", rates, pin, "pinned")
    finally:
        pin.release()
    return probe.failed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="npu_probe", description="check the NPU transport's assumptions")
    parser.add_argument("--library", default=None, help=f"the ACL runtime; default {DEFAULT_LIBRARY}")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--megabytes", type=int, default=256, help="memory on each side; at least 32")
    options = parser.parse_args(arguments)
    try:
        acl = Acl(options.library)
        if acl.is_emulator:
            print("EMULATOR: this checks the code, not an NPU; its figures measure nothing")
        return run(acl, options.device, max(32, options.megabytes))
    except (ConfigError, AclError) as error:
        print(f"FAIL  start: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
