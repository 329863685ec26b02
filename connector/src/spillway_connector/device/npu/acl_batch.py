"""Submission of descriptors to the runtime: one batched call, or one call each. The process decides this when it runs,
not when it is built.

vllm-ascend decides when its wheel is built; a wheel built against old headers then never batches, and one built
against new headers fails on an old CANN.
"""

from __future__ import annotations

import contextlib
import logging

import numpy as np

from spillway_connector.device.npu.acl import Acl, AclError, CopyKind, version_at_least
from spillway_connector.device.spans import Spans
from spillway_connector.errors import ConfigError
from spillway_connector.plan.copy_table import BATCH, LOOP

logger = logging.getLogger(__name__)

_FUNCTION = "aclrtMemcpyBatchAsync"
_PROBE_BYTES = 512
_PROBE_TIMEOUT_MS = 5_000


class CopyPath:
    """The path in use, shared by both directions of a worker; it can only ever fall from batch to loop."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        self.reason = reason
        logger.info("Spillway: device copies by %s (%s)", name, reason)

    @property
    def is_batch(self) -> bool:
        return self.name == BATCH

    def fall_back(self, reason: str) -> None:
        """The device refused a batch: every copy is a separate call from now on."""
        if self.name == BATCH:
            self.name, self.reason = LOOP, reason
            logger.warning("Spillway: device copies by loop from now on: %s", reason)


def choose_copy_path(acl: Acl, mode: str, device: int) -> CopyPath:
    """mode: batch_memcpy's auto, on or off. The calling thread has set `device`.

    Raises ConfigError for `on` if a batch cannot work: the symbol is missing, the version too old, or the
    device refuses.
    """
    if mode == "off":
        return CopyPath(LOOP, "batch_memcpy: off")
    obstacle = _obstacle(acl)
    if mode == "on":
        obstacle = obstacle or _refusal(acl, device)
        if obstacle is not None:
            raise ConfigError(
                f"batch_memcpy: 'on' cannot work here: {obstacle}; it needs CANN 8.5 or newer on an Atlas A2 or A3: "
                "set batch_memcpy to 'auto' or 'off', or upgrade CANN"
            )
        return CopyPath(BATCH, f"batch_memcpy: on, CANN {acl.cann_version() or 'of unknown version'}")
    if obstacle is not None:
        return CopyPath(LOOP, f"batch_memcpy: auto, {obstacle}")
    return CopyPath(BATCH, f"batch_memcpy: auto, CANN {acl.cann_version() or 'of unknown version'}")


def _obstacle(acl: Acl) -> str | None:
    if not acl.has(_FUNCTION):
        return f"the runtime exports no {_FUNCTION}"
    version = acl.cann_version()
    # A runtime of unknown version that has the function is tried: its refusal (207000) falls back.
    if version is not None and version_at_least(version, 8, 5) is False:
        return f"CANN is {version}, older than 8.5"
    return None


def _refusal(acl: Acl, device: int) -> str | None:
    """Try one small batch each way; the first real job would be too late to refuse to start."""
    sizes = np.full(2, _PROBE_BYTES, dtype=np.int64)
    offsets = np.array([0, _PROBE_BYTES], dtype=np.int64)
    try:
        with contextlib.ExitStack() as cleanup:
            host = acl.malloc_host(2 * _PROBE_BYTES)
            cleanup.callback(acl.free_host, host)
            npu = acl.malloc(2 * _PROBE_BYTES)
            cleanup.callback(acl.free, npu)
            stream = acl.create_stream()
            cleanup.callback(acl.destroy_stream, stream)
            for target, source, kind in (
                (npu, host, CopyKind.HOST_TO_DEVICE),
                (host, npu, CopyKind.DEVICE_TO_HOST),
            ):
                call = acl.batch_call(Spans(target + offsets, source + offsets, sizes), kind, device)
                call.submit(stream)
                acl.synchronize_stream(stream, _PROBE_TIMEOUT_MS)
    except AclError as error:
        return str(error)
    return None
