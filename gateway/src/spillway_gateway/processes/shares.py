"""Each front's share of what bounds a whole gateway. Pure."""

from __future__ import annotations

import math

from msgspec import structs

from spillway_gateway.config.settings import GatewayConfig
from spillway_settings.typed import settings_json


def front_config(config: GatewayConfig) -> bytes:
    """The configuration of one front, as JSON. Bounds of connections, memory and retries are divided, so that all
    fronts together keep within them; what tenants and engines are allowed is counted by the router alone, so fronts do
    not know what shares the limits of replicas."""
    fronts = config.processes
    connections, limits, continuation = config.connections, config.limits, config.continuation

    def share(whole: int) -> int:
        return math.ceil(whole / fronts)

    divided = structs.replace(
        config,
        auth=structs.replace(config.auth, shared_limits=None),
        connections=structs.replace(
            connections,
            open_max=share(connections.open_max),
            per_address_max=share(connections.per_address_max),
        ),
        limits=structs.replace(
            limits,
            bodies_bytes_max=share(limits.bodies_bytes_max),
            replies_bytes_max=share(limits.replies_bytes_max),
            upstream_connections_max=share(limits.upstream_connections_max),
            retry_burst=share(limits.retry_burst),
        ),
        continuation=structs.replace(continuation, bytes_max=share(continuation.bytes_max)),
    )
    return settings_json(divided)
