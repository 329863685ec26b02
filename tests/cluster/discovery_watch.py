"""How soon do gateways follow? What Kubernetes tells of ready engines beside what each gateway uses, all the time.

Kubernetes' own word is the watch of the engines' EndpointSlices; its time is that of its arrival here, so the clocks of
this machine and of the client's node should agree (on the lane's own cluster they are one clock).
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from dataclasses import dataclass
from types import TracebackType

from cluster.client_pod import ClientPod
from cluster.kube import Kubernetes, Object
from cluster.report import Report
from cluster.values import OPERATIONS_PORT
from stack_driver.deadlines import eventually

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
        assert self._kubernetes.namespace is not None
        selector = f"kubernetes.io/service-name={self._service}"
        command = ["kubectl", "-n", self._kubernetes.namespace, "get", "endpointslices", "-l", selector, "--watch"]
        environment = {**os.environ, **self._kubernetes.environment}
        self._process = subprocess.Popen([*command, "-o", "json"], stdout=subprocess.PIPE, text=True, env=environment)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        eventually("the watch begins", lambda: bool(self._ready))
        return self

    def _read(self) -> None:
        assert self._process.stdout is not None
        lines: list[str] = []
        for line in self._process.stdout:
            lines.append(line)
            if line == "}\n":  # kubectl indents what is inside
                self._ready.append(Change(time.time(), _ready_pods(json.loads("".join(lines)))))
                lines.clear()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(10)
        self._thread.join(10)
        for line in self._client.stop_following(self._follow):
            engines = None if line["engines"] is None else frozenset(line["engines"])
            self._gateways.setdefault(line["gateway"], []).append(Change(line["at"], engines))

    def lags(self) -> dict[str, float]:
        """`+NAME` and `-NAME` -> the longest that any gateway took to begin or end using an engine, in seconds.

        A gateway asks engines itself and may know sooner than Kubernetes; then it took no time.
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
        """Whether Kubernetes itself changed its mind within the time that gateways have."""
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
