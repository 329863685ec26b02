"""How soon do gateways follow? The engines that Kubernetes reports ready, beside those that each gateway uses.

Kubernetes' report is the watch of the engines' EndpointSlices, timed at its arrival here, so the clocks of this machine
and of the client's node should agree (on the lane's own cluster they are one clock).
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from types import TracebackType

from cluster.client_pod import ClientPod
from cluster.kube import Kubernetes, Object
from cluster.report import Report
from cluster.values import OPERATIONS_PORT
from kubernetes.client import DiscoveryV1Api
from kubernetes.watch import Watch
from stack_driver.deadlines import eventually
from urllib3.exceptions import HTTPError

PROMPT_SECONDS = 2.0


@dataclass(frozen=True)
class Change:
    """engines: those that are ready, or that a gateway uses, from this moment on. None: the gateway does not answer."""

    at: float
    engines: frozenset[str] | None


class DiscoveryWatch:
    """Between entering and leaving the block."""

    def __init__(self, kubernetes: Kubernetes, client: ClientPod, service: str) -> None:
        self._kubernetes, self._client, self._service = kubernetes, client, service
        self._ready: list[Change] = []
        self._gateways: dict[str, list[Change]] = {}

    def __enter__(self) -> DiscoveryWatch:
        addresses = [f"{pod['status']['podIP']}:{OPERATIONS_PORT}" for pod in self._kubernetes.ready_pods("gateway")]
        self._follow = self._client.start_following(addresses)
        self._stopping = False
        self._watch = Watch()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        eventually("the watch begins", lambda: bool(self._ready))
        return self

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
        self._stopping = True
        self._watch.stop()
        self._thread.join(10)
        for line in self._client.stop_following(self._follow):
            engines = None if line["engines"] is None else frozenset(line["engines"])
            self._gateways.setdefault(line["gateway"], []).append(Change(line["at"], engines))

    def lags(self) -> dict[str, float]:
        """`+NAME` and `-NAME` -> the longest that any gateway took to begin or end using an engine, in seconds.

        A gateway polls engines itself and may notice before Kubernetes does; that counts as 0 s.
        """
        longest: dict[str, float] = {}
        for before, after in zip(self._ready, self._ready[1:]):
            assert before.engines is not None and after.engines is not None
            turns = [(name, True) for name in after.engines - before.engines]
            turns += [(name, False) for name in before.engines - after.engines]
            for name, used in turns:
                if self._undone(name, used, after.at):
                    continue
                key = f"{'+' if used else '-'}{name}"
                for gateway in self._gateways.values():
                    longest[key] = max(longest.get(key, 0.0), _lag(gateway, name, used, after.at))
        return longest

    def _undone(self, name: str, used: bool, at: float) -> bool:
        """Whether Kubernetes took it back within the time that gateways have."""
        later = (change for change in self._ready if at < change.at < at + PROMPT_SECONDS)
        return any(change.engines is not None and (name in change.engines) != used for change in later)

    def require_prompt(self, report: Report, during: str) -> None:
        """A row of its own: `requests` are the changes, `failed` those that a gateway followed late."""
        with report.case(f"discovery: gateways follow within {PROMPT_SECONDS:.0f} s [{during}]") as row:
            lags = self.lags()
            late = {name: round(lag, 2) for name, lag in lags.items() if lag > PROMPT_SECONDS}
            row.requests, row.failed = len(lags), len(late)
            row.note = f"the slowest took {max(lags.values(), default=0.0):.2f} s"
            assert lags, "something should have changed"
            assert not late, f"gateways were late to follow: {late}"


def _ready_pods(endpoint_slice: Object) -> frozenset[str]:
    found = endpoint_slice.get("endpoints") or []
    return frozenset(item["targetRef"]["name"] for item in found if item["conditions"].get("ready"))


def _lag(gateway: list[Change], name: str, used: bool, at: float) -> float:
    """Seconds from `at` until the gateway's view agrees; 0 where it does by then, or where the gateway is gone."""
    state: bool | None = None
    for change in gateway:
        agrees = change.engines is None or (name in change.engines) == used
        if change.at <= at:
            state = agrees
        elif state:
            return 0.0
        elif agrees:
            return change.at - at
    return 0.0 if state else float("inf")
