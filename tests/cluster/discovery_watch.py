"""Do gateways follow, and how soon? The engines that Kubernetes reports ready, beside those that each gateway has.

Kubernetes' report is the watch of the engines' EndpointSlices, timed at its arrival here, so the clocks of this machine
and of the client's node should agree (on the lane's own cluster they are one clock). An engine is a pod by its uid: one
that took another's name is not the one before.

That a change has arrived is asserted, of discovery itself: a gateway's polls take out an engine that has gone as well.
How soon depends on the machine too, so it is reported.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import TracebackType
from typing import Any, NamedTuple

from cluster.client_pod import ClientPod
from cluster.kube import Kubernetes, Object
from cluster.report import Report
from cluster.values import OPERATIONS_PORT
from kubernetes.client import DiscoveryV1Api
from kubernetes.watch import Watch
from stack_driver.deadlines import eventually
from urllib3.exceptions import HTTPError

PROMPT_SECONDS = 2.0  # the goal, for the report
FOLLOW_SECONDS_MAX = 30.0  # a tenth of the gateway's resyncSeconds: what takes longer did not come from the watch
SETTLED_SECONDS_MAX = 120.0

Engines = Mapping[str, str]  # uid -> name


class Change(NamedTuple):
    """engines: those that Kubernetes reports ready, or that a gateway has, from this moment on. None: the gateway does
    not answer."""

    at: float
    engines: Engines | None


class DiscoveryWatch:
    """Watch of discovery between entering and leaving the block, which waits until each ready gateway uses the engines
    that are ready."""

    def __init__(self, kubernetes: Kubernetes, client: ClientPod, service: str) -> None:
        self._kubernetes, self._client, self._service = kubernetes, client, service
        self._ready: list[Change] = []
        self._lines: list[dict[str, Any]] = []

    def __enter__(self) -> DiscoveryWatch:
        self._follow = self._client.start_following(self._gateways())
        self._stopping = False
        self._watch = Watch()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        eventually("the watch begins", lambda: bool(self._ready))
        return self

    def _gateways(self) -> list[str]:
        return [f"{pod['status']['podIP']}:{OPERATIONS_PORT}" for pod in self._kubernetes.ready_pods("gateway")]

    def _read(self) -> None:
        events = self._watch.stream(
            DiscoveryV1Api(self._kubernetes.client()).list_namespaced_endpoint_slice,
            self._kubernetes.namespace,
            label_selector=f"kubernetes.io/service-name={self._service}",
        )
        try:
            for event in events:
                self._ready.append(Change(time.time(), _ready_pods(event["raw_object"])))
        except HTTPError:
            if not self._stopping:  # stop() breaks the connection
                raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                eventually("every gateway uses the engines that are ready", self._settled, SETTLED_SECONDS_MAX)
        finally:
            self._stopping = True
            self._watch.stop()
            self._thread.join(60)
            self._lines = self._client.stop_following(self._follow)

    def _settled(self) -> bool:
        """Gateways that came later are not followed, and those that have gone have nothing to agree with."""
        last = {line["gateway"]: line for line in self._client.followed(self._follow)}
        ready = self._ready[-1].engines
        assert ready is not None
        present = [last[gateway] for gateway in self._gateways() if gateway in last]
        return bool(present) and all(line["offered"] == ready and line["up"] == sorted(ready) for line in present)

    def require_followed(self, report: Report, during: str) -> None:
        """A row of its own: `requests` are the changes, `failed` those that a gateway did not get from its watch."""
        with report.case(f"discovery: gateways follow EndpointSlices [{during}]") as row:
            found = lags(self._ready, self._views("offered"))
            missed = {name: lag for name, lag in found.items() if lag > FOLLOW_SECONDS_MAX}
            row.requests, row.failed = len(found), len(missed)
            used = max(lags(self._ready, self._views("up")).values(), default=0.0)
            row.note = f"the slowest took {max(found.values(), default=0.0):.2f} s, and {used:.2f} s until it was used"
            if used > PROMPT_SECONDS:
                row.note = f"WARNING: longer than {PROMPT_SECONDS:.0f} s; {row.note}"
            assert found, "something should have changed"
            assert not missed, f"gateways did not follow: {missed}"

    def _views(self, kind: str) -> list[list[Change]]:
        """Return the changes that each gateway saw. kind: offered or up."""
        views: dict[str, list[Change]] = {}
        for line in self._lines:
            engines = line[kind] if line[kind] is None else {uid: "" for uid in line[kind]}
            views.setdefault(line["gateway"], []).append(Change(line["at"], engines))
        return list(views.values())


def lags(ready: Sequence[Change], gateways: Sequence[Sequence[Change]]) -> dict[str, float]:
    """`+NAME` and `-NAME` -> the longest that any gateway took to begin or end having an engine, in seconds. Pure.

    What Kubernetes takes back before a gateway has followed counts as followed then: nothing is left to follow.
    """
    longest: dict[str, float] = {}
    for number, (before, after) in enumerate(pairwise(ready), 1):
        assert before.engines is not None and after.engines is not None
        for uid in before.engines.keys() ^ after.engines.keys():
            begins = uid in after.engines
            name = (after if begins else before).engines[uid]
            taken_back = (later.at for later in ready[number + 1 :] if (uid in later.engines) != begins)
            seconds_max = next(taken_back, float("inf")) - after.at
            key = f"{'+' if begins else '-'}{name}"
            for gateway in gateways:
                lag = min(_lag(gateway, uid, begins, after.at), seconds_max)
                longest[key] = max(longest.get(key, 0.0), lag)
    return longest


def _lag(gateway: Sequence[Change], uid: str, begins: bool, at: float) -> float:
    """Seconds from `at` until the gateway's view agrees; 0 where it does by then, or where the gateway is gone."""
    agreed = False
    for change in gateway:
        agrees = change.engines is None or (uid in change.engines) == begins
        if change.at > at and (agreed or agrees):
            return 0.0 if agreed else change.at - at
        agreed = agrees
    return 0.0 if agreed else float("inf")


def _ready_pods(endpoint_slice: Object) -> Engines:
    found = endpoint_slice.get("endpoints") or []
    ready = [item["targetRef"] for item in found if item["conditions"].get("ready")]
    return {target["uid"]: target["name"] for target in ready}
