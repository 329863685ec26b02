from __future__ import annotations

import asyncio
from typing import Any

import pytest

from spillway_gateway.config.discovery import DiscoveryConfig, DnsDiscovery, KubernetesDiscovery
from spillway_gateway.discovery import sources
from spillway_gateway.discovery.found import SourceStatus
from spillway_gateway.testing.fake_kubernetes import FakeKubernetes, endpoint_slice, pod_endpoint
from spillway_gateway.testing.running import until


def test_where_a_source_looks_is_said_in_words() -> None:
    assert sources.describe(DiscoveryConfig(dns=DnsDiscovery("engines.local"))) == "DNS name engines.local"
    kubernetes = DiscoveryConfig(kubernetes=KubernetesDiscovery("engines"))
    assert sources.describe(kubernetes) == "EndpointSlices of Service engines in the gateway's namespace"


async def test_a_source_that_stops_is_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sources, "RESTART_SECONDS", 0.0)
    api = FakeKubernetes()
    await api.start()
    api.put(endpoint_slice("a", [pod_endpoint("vllm-0", "10.0.0.1")], {"http": 8100}))
    kubernetes = KubernetesDiscovery("engines", namespace="spillway", api_server=api.url)
    status = SourceStatus("the test's source")
    published: list[Any] = []

    def publish(engines: Any) -> None:
        published.append(engines)
        if len(published) == 1:
            raise RuntimeError("a defect")

    task = asyncio.create_task(sources.follow(DiscoveryConfig(kubernetes=kubernetes), status, publish))
    await until(lambda: len(published) == 2)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await api.stop()

    assert status.failures["defect"] == 1
    assert "the test's source: the source stopped and is started again" in caplog.text
