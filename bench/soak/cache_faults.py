"""Emptying the prefix caches of an engine, device and connector, while others ask it."""

from __future__ import annotations

import time
from collections.abc import Mapping

import httpx

from soak.asking import REQUEST_SECONDS
from soak.outages import Outages
from soak.schedule import Fault


class CacheFaults:
    """vLLM answers 200 whether it has reset its caches or not, and 500 where requests that load stand in the way: the
    engines' own counter says how often the connector was reset (`spillway_cpu_tier_resets_total`)."""

    def __init__(self, engines: Mapping[str, str], outages: Outages) -> None:
        self._engines, self._outages = engines, outages

    def strike(self, fault: Fault) -> None:
        name, url = list(self._engines.items())[fault.target]
        if not self._outages.is_open(name):
            return
        preempt = fault.kind == "caches_reset_preempting"
        parameters = {"reset_external": "true", "reset_running_requests": str(preempt).lower()}
        begun = time.monotonic()
        try:
            with httpx.Client(timeout=REQUEST_SECONDS) as client:
                response = client.post(f"{url}/reset_prefix_cache", params=parameters)
        except httpx.HTTPError:
            if self._outages.is_open(name) and self._outages.excuse(name, begun, time.monotonic()) is None:
                raise
            return  # the engine lane has just ended it
        assert response.status_code == 200 or (preempt and response.status_code == 500), response.text
