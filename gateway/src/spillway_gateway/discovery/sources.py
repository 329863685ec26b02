"""Makes the source of engines from the settings of a model's discovery."""

from __future__ import annotations

import asyncio
import logging

from spillway_gateway.config.discovery import DiscoveryConfig
from spillway_gateway.discovery.found import Publish, Source, SourceFailed, SourceStatus
from spillway_gateway.discovery.kubernetes import KubernetesSource

logger = logging.getLogger(__name__)

RESTART_SECONDS = 5.0  # after a defect: a gateway that no longer sees engines come and go must not stay so


def describe(config: DiscoveryConfig) -> str:
    """Name the place that the source reads, for people."""
    if config.kubernetes is not None:
        namespace = config.kubernetes.namespace or "the gateway's namespace"
        services = ", ".join([config.kubernetes.service, *config.kubernetes.role_services])
        return f"EndpointSlices of Service {services} in {namespace}"
    assert config.dns is not None
    return f"DNS name {config.dns.name}"


def make_source(config: DiscoveryConfig, status: SourceStatus, publish: Publish) -> Source:
    """publish gets the whole set of engines each time that it has changed."""
    if config.kubernetes is not None:
        return KubernetesSource(config.kubernetes, status, publish)
    assert config.dns is not None
    from spillway_gateway.discovery.dns import DnsSource  # noqa: PLC0415 - the resolver is loaded only if it is used

    return DnsSource(config.dns, status, publish)


async def follow(config: DiscoveryConfig, status: SourceStatus, publish: Publish) -> None:
    """Run the source until cancelled, and start it again if it stops."""
    while True:
        try:
            await make_source(config, status, publish).run()
        except Exception as error:
            logger.exception("%s: the source stopped and is started again", status.description)
            status.failed(SourceFailed("defect", f"the source stopped ({error.__class__.__name__})"))
        await asyncio.sleep(RESTART_SECONDS)
