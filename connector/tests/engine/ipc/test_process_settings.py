"""The settings that EngineCore and workers report of themselves."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import vllm

from spillway_connector import metrics
from spillway_connector.config import ConnectorConfig
from spillway_connector.device.host_region import HostRegion, region_path
from spillway_connector.engine.ipc.process_settings import RESEND_SECONDS, ProcessSettings, memory_lock_limit
from spillway_connector.engine.ipc.samples import Samples, metric_of
from spillway_connector.engine.worker.transports import OpenTransport, copy_path, open_transport, transport_name
from spillway_connector.testing.clock import SteppedClock


def said(samples: Samples) -> dict[tuple[str, str], str]:
    """(process, setting) -> value."""
    found = {}
    for key, amount in samples.samples().items():
        metric, (process, setting, value) = metric_of(key)
        assert (metric, amount) == (metrics.PROCESS_SETTING, 1)
        found[process, setting] = value
    return found


def test_settings_are_sent_with_versions_and_again_after_a_while():
    """One report alone is not enough, because vLLM may drop the statistics of a step."""
    clock = SteppedClock()
    settings = ProcessSettings("worker-1", {"cpu_blocks": 40, "device": "a|b"}, clock)
    first, second, third = Samples(), Samples(), Samples()
    settings.add_to(first)
    settings.add_to(second)
    clock.advance(RESEND_SECONDS)
    settings.add_to(third)

    found = said(first)
    assert found["worker-1", "cpu_blocks"] == "40"
    assert found["worker-1", "device"] == "a/b", "the separator of samples' keys"
    assert found["worker-1", "vllm_version"] == vllm.__version__
    assert not second
    assert third.samples() == first.samples()


def test_two_processes_are_told_apart():
    samples = Samples()
    for process in ("EngineCore", "worker-0"):
        ProcessSettings(process, {"cpu_blocks": 7}).add_to(samples)
    assert {process for process, _ in said(samples)} == {"EngineCore", "worker-0"}


def test_the_cpu_transport_has_no_way_of_copying_to_name():
    region = HostRegion(region_path(f"test-settings-{os.getpid()}"), 2, 4096)
    try:
        transport = open_transport(ConnectorConfig.parse({"num_cpu_blocks": 1}), region)
    finally:
        region.cleanup()
    assert (transport_name(transport), copy_path(transport)) == ("cpu", "none")


def test_a_device_names_the_path_that_it_resolved():
    device = SimpleNamespace(path=SimpleNamespace(name="loop"))
    assert copy_path(OpenTransport(None, device)) == "loop"


@pytest.mark.parametrize(("limit", "shown"), [(1 << 16, "65536"), (-1, "unlimited")])
def test_the_memory_lock_limit_is_in_bytes(limit, shown, monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda kind: (limit, limit))
    assert memory_lock_limit() == shown
