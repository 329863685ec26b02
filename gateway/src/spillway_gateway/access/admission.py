"""The queue in front of engines that are all full: bounded, with a deadline, fair.

While a model has room a request passes without waiting. Otherwise it queues by priority, and within one priority
tenants take turns, so one that sends a thousand requests delays another's first by one place and not by a thousand.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable

from spillway_gateway.access.keys import Priority
from spillway_gateway.config.settings import AdmissionConfig
from spillway_gateway.errors import GatewayOverloaded


class Admission:
    """Of one model. capacity: requests that its engines may have together, as of now."""

    def __init__(self, config: AdmissionConfig, capacity: Callable[[], int]) -> None:
        self._config = config
        self._capacity = capacity
        self._seconds = {
            Priority.HIGH: config.high_wait_seconds,
            Priority.NORMAL: config.normal_wait_seconds,
            Priority.LOW: config.low_wait_seconds,
        }
        # priority -> tenant -> those who wait; the first tenant is next, and goes to the end when served
        self._waiting: dict[Priority, OrderedDict[str, deque[asyncio.Future[None]]]] = {
            priority: OrderedDict() for priority in Priority
        }
        self.admitted_requests = 0
        self.waiting_requests = 0
        self.refused_total = 0

    async def enter(self, tenant: str, priority: Priority) -> None:
        """Returns when the request may be sent; leave() has to follow. Raises GatewayOverloaded."""
        if not self.waiting_requests and self.admitted_requests < self._capacity():
            self.admitted_requests += 1
            return
        config = self._config
        if self.waiting_requests >= config.waiting_requests_max:
            self.refused_total += 1
            raise GatewayOverloaded(f"all engines are full and {config.waiting_requests_max} requests wait for them")
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[priority].setdefault(tenant, deque()).append(place)
        self.waiting_requests += 1
        seconds = self._seconds[priority]
        try:
            async with asyncio.timeout(seconds):
                await place
        except TimeoutError:
            self._forget(place, tenant, priority)
            self.refused_total += 1
            raise GatewayOverloaded(f"all engines were full for {seconds:g} s") from None
        except asyncio.CancelledError:
            self._forget(place, tenant, priority)
            raise

    def leave(self) -> None:
        """An admitted request is over."""
        self.admitted_requests -= 1
        self.wake()

    def wake(self) -> None:
        """Let in whom there is room for; also called when an engine becomes ready."""
        while self.waiting_requests and self.admitted_requests < self._capacity():
            place = self._next()
            self.waiting_requests -= 1
            if not place.done():  # else it gave up in this very turn of the loop
                self.admitted_requests += 1
                place.set_result(None)

    def _next(self) -> asyncio.Future[None]:
        for tenants in self._waiting.values():  # by priority
            if tenants:
                tenant, places = tenants.popitem(last=False)
                place = places.popleft()
                if places:
                    tenants[tenant] = places  # at the end: the other tenants' turn
                return place
        raise AssertionError("waiting_requests counts somebody who does not wait")

    def _forget(self, place: asyncio.Future[None], tenant: str, priority: Priority) -> None:
        """Whoever gives up leaves the queue; if the place was given in the same moment, it goes to the next."""
        if place.done() and not place.cancelled():
            self.leave()
            return
        places = self._waiting[priority].get(tenant)
        if places is not None and place in places:
            places.remove(place)
            self.waiting_requests -= 1
            if not places:
                del self._waiting[priority][tenant]
