"""Host-to-host copies for the CPU platform, where "device" memory is ordinary memory.

A thread per direction keeps the copies off the model thread. No barrier with the computation is needed: the CPU
platform computes eagerly on the thread that submits, so what a job reads has been written, and what it overwrites
has been read, when `submit` is called.

A batch of spans moves in one system call (process_vm_readv(2) on the own process id). A memmove per span is as fast on
an idle machine, but takes the GIL once per span: beside a busy scheduler thread 94 MB in 960 spans took 2.5 s that way
and 0.03 s this way (docs/benchmarks.md).
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import time

import numpy as np

from spillway_connector.device.copier import CopyResult, Direction
from spillway_connector.errors import DeviceCopyError
from spillway_connector.plan.copies import Addresses, CopyPlan

_IOV_MAX = 1024  # descriptors a call takes: IOV_MAX of Linux
_libc = ctypes.CDLL(None)
_process_vm_readv = _libc.process_vm_readv
_process_vm_readv.restype = ctypes.c_ssize_t
_process_vm_readv.argtypes = [
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
]


class HostCopier:
    """The jobs of one direction, in order, on a thread per copier. See copier.Copier for the contract."""

    def __init__(self, direction: Direction) -> None:
        self._direction = direction
        self._jobs: queue.SimpleQueue[tuple[int, CopyPlan] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[CopyResult] = queue.SimpleQueue()
        self._running: dict[int, threading.Event] = {}  # changed by the model thread only
        self._errors: dict[int, Exception] = {}  # of failed jobs that `finished` has not reported
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"spillway-{direction.value}", daemon=True)
        self._thread.start()

    def submit(self, job_id: int, plan: CopyPlan, *, awaited: bool = False) -> None:
        if self._closed:
            raise DeviceCopyError(f"the {self._direction.value} transport is closed")
        if job_id in self._running:
            raise DeviceCopyError(f"{self._direction.value} job {job_id} is in flight already")
        self._running[job_id] = threading.Event()
        self._jobs.put((job_id, plan))

    def finished(self) -> list[CopyResult]:
        results: list[CopyResult] = []
        while True:
            try:
                result = self._results.get_nowait()
            except queue.Empty:
                return results
            del self._running[result.job_id]
            self._errors.pop(result.job_id, None)
            results.append(result)

    def wait(self, job_ids: set[int]) -> None:
        for job_id in job_ids:
            done = self._running.get(job_id)
            if done is not None:
                done.wait()

    def hold_computation(self, job_id: int) -> Exception | None:
        self.wait({job_id})
        return self._errors.get(job_id)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job_id, plan = job
            done = self._running[job_id]
            started = time.perf_counter()
            error: Exception | None = None
            try:
                copy_spans(self._direction, plan)
            except Exception as caught:  # of any kind: the job must still be reported
                error = caught
            if error is not None:
                self._errors[job_id] = error
            self._results.put(CopyResult(job_id, plan.total_bytes, time.perf_counter() - started, error))
            done.set()


def copy_spans(direction: Direction, plan: CopyPlan) -> None:
    """Move every span of a plan now, on this thread."""
    for batch in plan.batches(_IOV_MAX):
        source, target = batch.device_addresses, batch.host_addresses
        if direction is Direction.LOAD:
            source, target = target, source
        if not _copy_in_one_call(target, source, batch.sizes_bytes):
            for to, origin, size in zip(target.tolist(), source.tolist(), batch.sizes_bytes.tolist(), strict=True):
                ctypes.memmove(to, origin, size)


def _copy_in_one_call(target: Addresses, source: Addresses, sizes: Addresses) -> bool:
    """Copy all pieces in one call; return False if the kernel refuses the call or stops early (a strict seccomp
    profile), so that the caller copies in another way."""
    spans_to, spans_from = _iovecs(target, sizes), _iovecs(source, sizes)
    count = len(sizes)
    moved = _process_vm_readv(os.getpid(), spans_to.ctypes.data, count, spans_from.ctypes.data, count, 0)
    return bool(moved == int(sizes.sum()))


def _iovecs(addresses: Addresses, sizes: Addresses) -> Addresses:
    """`struct iovec[n]`: shape (n, 2) int64, address and length."""
    return np.ascontiguousarray(np.stack((addresses, sizes), axis=1))
