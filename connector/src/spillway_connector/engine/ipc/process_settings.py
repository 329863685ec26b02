"""Series with the settings that a process of the engine applies. `spillway doctor` reads them.

The configuration that an engine was started with says what was asked for; these series say what EngineCore and each
worker made of it.
"""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

import torch
import vllm
from vllm.platforms import current_platform

from spillway_connector import metrics
from spillway_connector.engine.ipc.samples import SEPARATOR, Samples
from spillway_connector.tiers.tier import Clock

logger = logging.getLogger(__name__)

ENGINE_CORE = "EngineCore"
RESEND_SECONDS = 10.0  # vLLM may drop the statistics of a step; gauges that are sent once would be lost


class ProcessSettings:
    """The settings of one process. On the thread that reports its statistics."""

    def __init__(self, process: str, settings: Mapping[str, object], clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._sent_at = float("-inf")
        self._samples = Samples()
        for setting, value in {**_versions(), **settings}.items():
            text = str(value).replace(SEPARATOR, "/")
            logger.debug("%s obeys %s: %s", process, setting, text)
            self._samples.add(metrics.PROCESS_SETTING, 1, process, setting, text)

    def add_to(self, samples: Samples) -> None:
        """All of them, unless they were added less than RESEND_SECONDS ago."""
        now = self._clock()
        if now - self._sent_at >= RESEND_SECONDS:
            self._sent_at = now
            samples.merge(self._samples.samples())


def worker_process(rank: int) -> str:
    return f"worker-{rank}"


def device_name() -> str:
    """The name of the device that this process computes on, as vLLM calls it; its kind if vLLM has no name."""
    try:
        return str(current_platform.get_device_name())
    except (NotImplementedError, RuntimeError):
        return str(current_platform.device_type)


def memory_lock_limit() -> str:
    """The memory that this process may lock, in bytes, or `unlimited`."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


def _versions() -> dict[str, str]:
    try:
        connector = version("spillway-connector")
    except PackageNotFoundError:  # on the path, but not installed
        connector = "unknown"
    return {"vllm_version": vllm.__version__, "torch_version": torch.__version__, "connector_version": connector}
