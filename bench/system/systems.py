"""The systems that are compared: who routes, over which engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from routing_policies.blind import RoundRobin
from routing_policies.policy import Fleet, Policy, RoutedRequest
from routing_policies.spillway import Spillway

from spillway_settings.queue_order import OVERTAKE_SECONDS
from system.design import Answers, Design, Storing
from system.rates import BLOCK_TOKENS


class Pinned(Policy):
    """The client sends all sessions of a place to one engine, places in turn. engines: that it uses; None: all."""

    name = "pinned"

    def __init__(self, engines: int | None = None) -> None:
        self._used = engines

    def start(self, fleet: Fleet, engines: int, seed: int) -> None:
        self._live = list(range(self._used or engines))

    def choose(self, request: RoutedRequest) -> int:
        return self._live[int(request.session.split("/", 1)[0]) % len(self._live)]

    def engine_down(self, engine: int) -> None:
        self._live.remove(engine)

    def engine_up(self, engine: int) -> None:
        self._live.append(engine)


@dataclass(frozen=True, slots=True)
class System:
    """One row of the table. about: what it stands for."""

    about: str
    policy: Callable[[], Policy]
    design: Design


def _gateway() -> Policy:
    return Spillway(BLOCK_TOKENS)


def _gateway_with_names() -> Policy:
    return Spillway(BLOCK_TOKENS, sessions=True)


PROTECT_SHARE = 0.4
HOLD_SHARE = 0.25
ROUND_TRIPS_MS = (1, 10, 50)
_INSTALLED = Design(Storing.EXCLUSIVE, PROTECT_SHARE, OVERTAKE_SECONDS, recognised=True)


def _with_queue(tiers: str, storing: Storing, *, shared: bool = False, node: bool = False) -> System:
    """Make a system that protects the chunks of waiting requests and orders the queue by prefix."""
    design = Design(storing, PROTECT_SHARE, OVERTAKE_SECONDS, shared=shared, node=node)
    return System(f"Spillway, {tiers}, {storing}, protect and order", _gateway, design)


# Beside spillway_recognised each has one thing more, which needs a load of its own kind (simulate.py).
FOR_AGENTS: dict[str, System] = {
    "spillway_named": System(
        "Spillway, sessions that requests name", _gateway_with_names, replace(_INSTALLED, recognised=False, named=True)
    ),
    "spillway_retained": System(
        "Spillway, prompts retained if asked for", _gateway, replace(_INSTALLED, hold_share=HOLD_SHARE)
    ),
    **{
        f"spillway_answers_{answers}": System(
            f"Spillway, generatedTokens: {answers}", _gateway, replace(_INSTALLED, answers=answers)
        )
        for answers in Answers
    },
    "spillway_fair": System("Spillway, fairSteps: on", _gateway, replace(_INSTALLED, fair_steps=True)),
}

SYSTEMS: dict[str, System] = {
    "vllm_round_robin": System("vLLM, prefix caching, round robin", RoundRobin, Design(Storing.NEVER)),
    "vllm_offload_router": System(
        "vLLM's CPU offload, sessions on three of four engines, as vllm-router left them", lambda: Pinned(3), Design()
    ),
    "vllm_offload_pinned": System("vLLM's CPU offload, sessions pinned by the client", Pinned, Design()),
    "vllm_lazy_pinned": System("vLLM's SimpleCPUOffloadConnector, lazy, pinned", Pinned, Design(Storing.LAZY)),
    "spillway_cpu": System("Spillway, CPU tier", _gateway, Design()),
    "spillway_nvme": System("Spillway, CPU tier and NVMe", _gateway, Design(shared=True)),
    "spillway_protect": System(
        "Spillway, requests that wait keep their blocks", _gateway, Design(protect_share=PROTECT_SHARE)
    ),
    "spillway_order": System("Spillway, prefixes at hand first", _gateway, Design(overtake_seconds=OVERTAKE_SECONDS)),
    "spillway_lazy": System("Spillway, lazy stores", _gateway, Design(Storing.LAZY)),
    "spillway_exclusive": System("Spillway, exclusive tiers", _gateway, Design(Storing.EXCLUSIVE)),
    "spillway_exclusive_protect": System(
        "Spillway, exclusive and protect", _gateway, Design(Storing.EXCLUSIVE, PROTECT_SHARE)
    ),
    "spillway_exclusive_order": System(
        "Spillway, exclusive and order", _gateway, Design(Storing.EXCLUSIVE, 0.0, OVERTAKE_SECONDS)
    ),
    "spillway_all": System(
        "Spillway, exclusive, protect and order",
        _gateway,
        Design(Storing.EXCLUSIVE, PROTECT_SHARE, OVERTAKE_SECONDS),
    ),
    "spillway_recognised": System(
        "Spillway, exclusive, protect and order, conversations recognised",
        _gateway,
        _INSTALLED,
    ),
    "spillway_eager": System(
        "Spillway, as installed but with storing: eager", _gateway, replace(_INSTALLED, storing=Storing.EAGER)
    ),
    "spillway_nvme_eager": _with_queue("NVMe", Storing.EAGER, shared=True),
    "spillway_nvme_late": _with_queue("NVMe", Storing.EXCLUSIVE, shared=True),
    "spillway_node_eager": _with_queue("one CPU tier for the node", Storing.EAGER, node=True),
    "spillway_node_late": _with_queue("one CPU tier for the node", Storing.EXCLUSIVE, node=True),
    **{
        f"spillway_chain_{milliseconds}_ms": System(
            f"Spillway, NVMe over an object store {milliseconds} ms away, eager, protect and order",
            _gateway,
            Design(Storing.EAGER, PROTECT_SHARE, OVERTAKE_SECONDS, shared=True, bucket_ms=milliseconds),
        )
        for milliseconds in ROUND_TRIPS_MS
    },
    "oracle": System("Spillway, a CPU tier without end", _gateway, Design(endless=True)),
}
