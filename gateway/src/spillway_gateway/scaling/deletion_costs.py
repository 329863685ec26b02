"""The cost of removing each pod of a model, and the choice of the costs that are worth writing. Pure.

Kubernetes removes the pod of a Deployment that has the least `controller.kubernetes.io/pod-deletion-cost` first. The
cost only orders pods, so it is made of shares of the fleet: every gateway finds about the same shares, however the
clients' connections are spread over the gateways.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SHARE = 1000  # the cost of everything of one kind: sessions, blocks, requests
COST_MAX = 3 * SHARE
STEP = 30  # a smaller change is not worth a write
# Below this number for each pod a difference does not count in full: nearly idle pods are about equal.
SESSIONS_PER_POD = 4
BLOCKS_PER_POD = 128
REQUESTS_PER_POD = 2


@dataclass(frozen=True, slots=True)
class PodWarmth:
    """sessions: the sessions that its engines served last, lately. blocks_alone: the blocks that no other pod holds or
    can load. requests: the requests that run or wait there, whoever sent them."""

    sessions: int = 0
    blocks_alone: int = 0
    requests: int = 0


@dataclass(frozen=True, slots=True)
class Written:
    """The cost that was written for a pod. at: monotonic seconds. instance: the pod's; another of its name has none."""

    cost: int
    at: float
    instance: str = ""


def deletion_costs(pods: Mapping[str, PodWarmth]) -> dict[str, int]:
    """The cost of each pod, 0 to COST_MAX."""
    sessions = max(SESSIONS_PER_POD * len(pods), sum(pod.sessions for pod in pods.values()))
    blocks = max(BLOCKS_PER_POD * len(pods), sum(pod.blocks_alone for pod in pods.values()))
    requests = max(REQUESTS_PER_POD * len(pods), sum(pod.requests for pod in pods.values()))
    return {
        name: round(SHARE * (pod.sessions / sessions + pod.blocks_alone / blocks + pod.requests / requests))
        for name, pod in pods.items()
    }


def due_writes(
    costs: Mapping[str, int],
    written: Mapping[str, Written],
    *,
    now: float,
    seconds_min: float,
    instances: Mapping[str, str],
) -> list[str]:
    """The pods whose cost is to be written now, the largest change first.

    Args:
        costs: The costs of the existing pods.
        written: What was written last.
        now: Monotonic seconds.
        seconds_min: Between two writes for one pod.
        instances: The instances of the existing pods.
    """
    due = []
    for name, cost in costs.items():
        last = written.get(name)
        if last is None or last.instance != instances.get(name, ""):
            due.append((COST_MAX + 1, name))
        elif now - last.at >= seconds_min and abs(cost - last.cost) >= STEP:
            due.append((abs(cost - last.cost), name))
    return [name for _, name in sorted(due, key=lambda each: (-each[0], each[1]))]
