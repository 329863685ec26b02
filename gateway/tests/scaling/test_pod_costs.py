"""Costs from a fleet's own state, written to an API server that speaks the protocol."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from spillway_gateway.config.discovery import DiscoveryConfig, KubernetesDiscovery
from spillway_gateway.config.settings import EngineConfig, ModelConfig, RoutingConfig
from spillway_gateway.fleet.event_decoder import BlockStored, Tier
from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.fleet.prefix_index import PrefixIndex
from spillway_gateway.fleet.sessions import SessionKey
from spillway_gateway.scaling.pod_costs import ANNOTATION, SESSION_SECONDS, WRITES_MAX, PodCosts
from spillway_gateway.testing.fake_kubernetes import FakeKubernetes

SECONDS = 30.0


class Scene:
    """Three pods of one Deployment; a stepped clock."""

    def __init__(self, config: KubernetesDiscovery) -> None:
        self.now = 1000.0
        index = PrefixIndex("m", bytes_max=1 << 22, orphans_max=10, default_block_tokens=16, clock=lambda: self.now)
        model = ModelConfig("m", discovery=DiscoveryConfig(kubernetes=config))
        self.config = config
        self.fleet = ModelFleet(model, RoutingConfig(), index, lambda: self.now)
        for name in ("pod-a", "pod-b", "pod-c"):
            self.fleet.add_engine(EngineConfig(name, f"http://{name}:8000"), instance=f"uid of {name}")
        self.costs = PodCosts([self.fleet], clock=lambda: self.now)

    def compute(self, engine: str, blocks: int) -> None:
        event = BlockStored(
            block_hashes=list(range(1, blocks + 1)),
            parent_hash=None,
            token_ids=list(range(16 * blocks)),
            block_tokens=16,
            tier=Tier.DEVICE,
            lora_name=None,
            extra_keys=[],
            group=0,
            spec_kind=None,
        )
        self.fleet.index.apply(engine, event)

    def serve(self, engine: str, sessions: int) -> None:
        for number in range(sessions):
            self.fleet.sessions.served(SessionKey.of("t", f"{engine} {number}".encode()), engine, self.now)

    async def look(self) -> None:
        await self.costs.look(self.fleet, self.config, SECONDS)


@pytest.fixture
async def api() -> AsyncIterator[FakeKubernetes]:
    made = FakeKubernetes()
    made.annotations = {name: {"kept": "yes"} for name in ("pod-a", "pod-b", "pod-c")}
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
def scene(api: FakeKubernetes) -> Scene:
    return Scene(
        KubernetesDiscovery(
            "engines", namespace="spillway", api_server=api.url, pod_deletion_cost_seconds=SECONDS, timeout_seconds=5.0
        )
    )


def cost_of(api: FakeKubernetes, pod: str) -> int:
    return int(api.annotations[pod][ANNOTATION])


async def test_the_pod_with_sessions_and_with_blocks_of_its_own_costs_more(api: FakeKubernetes, scene: Scene) -> None:
    scene.compute("pod-a", 400)
    scene.serve("pod-b", 40)
    await scene.look()

    assert cost_of(api, "pod-c") == 0 < min(cost_of(api, "pod-a"), cost_of(api, "pod-b"))
    assert api.annotations["pod-a"]["kept"] == "yes"
    assert scene.costs.outcomes == {("m", "written"): 3}


async def test_blocks_that_another_pod_has_too_cost_nothing(api: FakeKubernetes, scene: Scene) -> None:
    scene.compute("pod-a", 400)
    scene.compute("pod-b", 400)
    await scene.look()

    assert [cost_of(api, pod) for pod in ("pod-a", "pod-b", "pod-c")] == [0, 0, 0]


async def test_writes_are_few(api: FakeKubernetes, scene: Scene) -> None:
    scene.serve("pod-a", 40)
    await scene.look()
    await scene.look()
    assert api.patches == 3  # nothing has changed

    scene.serve("pod-b", 40)
    await scene.look()
    assert api.patches == 3  # too soon

    scene.now += SECONDS
    await scene.look()
    assert api.patches == 5  # pod-c's has not changed
    assert cost_of(api, "pod-a") == cost_of(api, "pod-b") > 0

    scene.now += SESSION_SECONDS + 1
    await scene.look()
    assert cost_of(api, "pod-a") == cost_of(api, "pod-b") == 0  # the sessions are over


async def test_a_pod_that_terminates_is_left_alone_and_its_blocks_are_no_one_elses(
    api: FakeKubernetes, scene: Scene
) -> None:
    scene.compute("pod-a", 400)
    scene.compute("pod-b", 400)
    scene.fleet.engines["pod-b"].withhold("its pod is terminating", terminating=True)
    await scene.look()

    assert ANNOTATION not in api.annotations["pod-b"]
    assert cost_of(api, "pod-a") > 0
    assert scene.costs.costs["m"].keys() == {"pod-a", "pod-c"}


async def test_a_new_pod_under_an_old_name_gets_its_cost(api: FakeKubernetes, scene: Scene) -> None:
    await scene.look()
    api.annotations["pod-a"] = {}
    scene.fleet.remove_engine("pod-a")
    scene.fleet.add_engine(EngineConfig("pod-a", "http://pod-a:8000"), instance="another uid")
    await scene.look()

    assert cost_of(api, "pod-a") == 0


async def test_a_pod_that_is_gone_is_not_asked_for_again_at_once(api: FakeKubernetes, scene: Scene) -> None:
    del api.annotations["pod-b"]
    await scene.look()
    await scene.look()

    assert scene.costs.outcomes == {("m", "written"): 2, ("m", "gone"): 1}


async def test_what_the_role_does_not_allow_is_said_once_with_its_remedy(
    api: FakeKubernetes, scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    api.may_patch = False
    with caplog.at_level(logging.WARNING):
        await scene.look()
        scene.now += SECONDS
        await scene.look()

    assert scene.costs.outcomes == {("m", "failed"): 6}
    (said,) = [record.getMessage() for record in caplog.records if "deletion cost" in record.getMessage()]
    assert "allow patch of pods in a Role" in said


async def test_an_api_server_that_is_away_costs_a_look_and_is_tried_again(api: FakeKubernetes, scene: Scene) -> None:
    await api.stop()
    await scene.look()
    assert scene.costs.outcomes == {("m", "failed"): 3}

    await api.start()
    await scene.look()
    assert api.patches == 0  # not at once
    scene.now += SECONDS
    await scene.look()
    assert api.patches == 3


async def test_a_look_writes_a_bounded_number(scene: Scene) -> None:
    written: list[str] = []

    async def write(config: KubernetesDiscovery, pod: str, annotations: Mapping[str, str]) -> bool:
        written.append(pod)
        return True

    for number in range(2 * WRITES_MAX):
        scene.fleet.add_engine(EngineConfig(f"more-{number}", f"http://more-{number}:8000"))
    costs = PodCosts([scene.fleet], write, clock=lambda: scene.now)
    await costs.look(scene.fleet, scene.config, SECONDS)
    assert len(written) == WRITES_MAX
    await costs.look(scene.fleet, scene.config, SECONDS)
    await costs.look(scene.fleet, scene.config, SECONDS)
    assert sorted(written) == sorted(scene.fleet.engines)


async def test_only_models_that_ask_for_it_are_looked_at(scene: Scene) -> None:
    written: list[str] = []
    pauses = 0

    async def write(config: KubernetesDiscovery, pod: str, annotations: Mapping[str, str]) -> bool:
        written.append(pod)
        return True

    class Enough(Exception):
        pass

    async def pause(seconds: float) -> None:
        nonlocal pauses
        pauses += 1
        if pauses == 3:
            raise Enough

    fleets: list[Any] = [scene.fleet]
    off = ModelFleet(
        ModelConfig("off", discovery=DiscoveryConfig(kubernetes=KubernetesDiscovery("other"))),
        RoutingConfig(),
        PrefixIndex("off", bytes_max=1 << 20, orphans_max=1, default_block_tokens=16, clock=lambda: scene.now),
    )
    off.add_engine(EngineConfig("left-alone", "http://left-alone:8000"))
    fleets.append(off)
    costs = PodCosts(fleets, write, clock=lambda: scene.now, pause=pause)
    with pytest.raises(Enough):
        await costs.run()

    assert sorted(written) == ["pod-a", "pod-b", "pod-c"]
    cost, writes = costs.families()
    assert {sample.labels["engine"] for sample in cost.samples} == {"pod-a", "pod-b", "pod-c"}
    assert [
        (sample.labels["outcome"], sample.value) for sample in writes.samples if sample.name.endswith("_total")
    ] == [("written", 3)]
