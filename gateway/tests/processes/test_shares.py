from __future__ import annotations

from msgspec import structs

from spillway_gateway.config.settings import GatewayConfig, parse_config
from spillway_gateway.config.shared_limits import SharedLimitsConfig
from spillway_gateway.processes.server import front_config
from spillway_settings.typed import settings_of_json


def test_all_fronts_together_keep_the_bounds_of_one_process_and_count_no_tenant() -> None:
    model = {"name": "m", "engines": [{"name": "e", "url": "http://127.0.0.1:1"}]}
    whole = parse_config({"models": [model], "processes": 3, "connections": {"openMax": 100, "perAddressMax": 2}})
    whole = structs.replace(
        whole, auth=structs.replace(whole.auth, shared_limits=SharedLimitsConfig("redis://limits:6379"))
    )

    front = settings_of_json(GatewayConfig, front_config(whole))

    assert (front.connections.open_max, front.connections.per_address_max) == (34, 1)
    assert front.limits.bodies_bytes_max == -(-whole.limits.bodies_bytes_max // 3)
    assert front.auth.shared_limits is None
    assert front.models == whole.models
