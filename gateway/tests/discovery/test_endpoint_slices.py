"""Slices add up to engines, in whatever order they arrive."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.config.discovery import KubernetesDiscovery
from spillway_gateway.config.ranks import ranks_of
from spillway_gateway.discovery.endpoint_slices import EndpointSlice, Reduction, SliceTable, WatchEvent, engines_of
from spillway_gateway.testing.fake_kubernetes import endpoint_slice, pod_endpoint
from spillway_settings.roles import EngineRole

PORTS = {"http": 8100, "kv-events": 8200, "kv-replay": 8300}
CONFIG = KubernetesDiscovery("engines", kv_events_port="kv-events", kv_replay_port="kv-replay")


def decoded(piece: dict[str, Any]) -> EndpointSlice:
    return msgspec.json.decode(json.dumps(piece), type=EndpointSlice)


def reduced(*pieces: dict[str, Any], config: KubernetesDiscovery = CONFIG) -> Reduction:
    return engines_of([decoded(piece) for piece in pieces], config)


def test_a_pod_becomes_an_engine_with_its_name_and_ports() -> None:
    (engine,), problems = reduced(endpoint_slice("a", [pod_endpoint("vllm-0", "10.0.0.1")], PORTS))

    assert (engine.config.name, engine.config.url) == ("vllm-0", "http://10.0.0.1:8100")
    assert (engine.config.kv_events, engine.config.kv_replay) == ("tcp://10.0.0.1:8200", "tcp://10.0.0.1:8300")
    assert (engine.withheld, problems) == (None, ())


@pytest.mark.parametrize(
    ("conditions", "withheld"),
    [
        ({"ready": True}, None),
        ({"ready": None}, None),  # unknown counts as ready
        ({"ready": False}, "its pod is not ready"),
        ({"ready": True, "serving": False}, "its pod is not ready"),  # publishNotReadyAddresses
        ({"ready": False, "serving": True, "terminating": True}, "its pod is terminating"),
        ({"ready": False, "serving": False, "terminating": True}, "its pod is terminating"),
        ({"ready": True, "serving": True, "terminating": True}, "its pod is terminating"),
        ({"ready": True, "serving": True, "terminating": False}, None),
    ],
)
def test_conditions_decide_whether_new_requests_may_go_there(conditions: dict[str, Any], withheld: str | None) -> None:
    (engine,), _ = reduced(endpoint_slice("a", [pod_endpoint("p", "10.0.0.1", **conditions)], PORTS))

    assert engine.withheld == withheld


def test_the_service_of_a_slice_says_what_its_engines_are_for() -> None:
    config = msgspec.structs.replace(CONFIG, role=EngineRole.DECODE, role_services={"prompts": EngineRole.PREFILL})
    found, _ = reduced(
        endpoint_slice("a", [pod_endpoint("d-0", "10.0.0.1")], PORTS),
        endpoint_slice("b", [pod_endpoint("p-0", "10.0.0.2")], PORTS, service="prompts"),
        config=config,
    )
    assert {engine.config.name: engine.config.role for engine in found} == {"d-0": "decode", "p-0": "prefill"}


def test_ranks_of_further_pods_publish_their_events_there() -> None:
    config = KubernetesDiscovery(
        "engines",
        namespace="llm",
        kv_events_port=8200,
        kv_replay_port=8300,
        data_parallel_ranks=4,
        nodes_per_replica=2,
    )
    piece = endpoint_slice("s", [pod_endpoint("set-1", "10.0.0.1")], {"http": 8100})

    (found,) = reduced(piece, config=config).engines

    assert found.config.workers == ("set-1-1.set.llm",)
    ranks = ranks_of(found.config)
    assert [rank.url for rank in ranks] == ["http://10.0.0.1:8100"] * 4
    assert [rank.kv_events for rank in ranks] == [
        "tcp://10.0.0.1:8200",
        "tcp://10.0.0.1:8201",
        "tcp://set-1-1.set.llm:8202",
        "tcp://set-1-1.set.llm:8203",
    ]
    assert ranks[3].kv_replay == "tcp://set-1-1.set.llm:8303"


def test_missing_conditions_and_target_are_no_fault() -> None:
    bare = {"addresses": ["10.0.0.7"]}
    named = {"addresses": ["10.0.0.8"], "hostname": "gpu-8"}
    (first, second), _ = reduced(endpoint_slice("a", [bare, named, {"addresses": []}], PORTS))

    assert (first.config.name, second.config.name) == ("10.0.0.7", "gpu-8")


def test_both_families_of_a_pod_are_one_engine_by_its_ipv4_address() -> None:
    four = endpoint_slice("four", [pod_endpoint("p", "10.0.0.1")], PORTS)
    six = endpoint_slice("six", [pod_endpoint("p", "fd00::1", ready=False)], PORTS, family="IPv6")
    (engine,), _ = reduced(six, four)
    assert (engine.config.url, engine.withheld) == ("http://10.0.0.1:8100", "its pod is not ready")

    (alone,), _ = reduced(six)
    assert (alone.config.url, alone.config.kv_events) == ("http://[fd00::1]:8100", "tcp://[fd00::1]:8200")


def test_a_pod_in_two_slices_at_once_is_one_engine() -> None:
    before = endpoint_slice("old", [pod_endpoint("p", "10.0.0.1"), pod_endpoint("q", "10.0.0.2")], PORTS)
    after = endpoint_slice("new", [pod_endpoint("p", "10.0.0.1")], PORTS)

    assert [engine.config.name for engine in reduced(before, after).engines] == ["p", "q"]


def test_a_replaced_pod_under_the_same_name_or_address_is_another_instance() -> None:
    first = reduced(endpoint_slice("a", [pod_endpoint("vllm-0", "10.0.0.1", uid="one")], PORTS)).engines[0]
    second = reduced(endpoint_slice("a", [pod_endpoint("vllm-0", "10.0.0.1", uid="two")], PORTS)).engines[0]
    moved = reduced(endpoint_slice("a", [pod_endpoint("vllm-0", "10.0.0.2", uid="two")], PORTS)).engines[0]

    assert first.config == second.config
    assert len({first.instance, second.instance, moved.instance}) == 3

    both = [
        pod_endpoint("vllm-0", "10.0.0.1", uid="z", ready=False, terminating=True),
        pod_endpoint("vllm-0", "10.0.0.2"),
    ]
    for endpoints in (both, both[::-1]):
        (engine,), _ = reduced(endpoint_slice("a", endpoints, PORTS))
        assert (engine.config.url, engine.withheld) == ("http://10.0.0.2:8100", None)


def test_ports_by_number_need_no_name_and_a_missing_name_is_told() -> None:
    numbered = KubernetesDiscovery("engines", port=9000, kv_events_port=9001)
    (engine,), problems = reduced(endpoint_slice("a", [pod_endpoint("p", "10.0.0.1")], {}), config=numbered)
    assert (engine.config.url, engine.config.kv_events) == ("http://10.0.0.1:9000", "tcp://10.0.0.1:9001")
    assert (engine.config.kv_replay, problems) == (None, ())

    engines, problems = reduced(endpoint_slice("a", [pod_endpoint("p", "10.0.0.1")], {"web": 80}))
    assert engines == ()
    assert "EndpointSlice a has no TCP port named 'http'; its ports: 'web'" in problems

    (engine,), problems = reduced(endpoint_slice("a", [pod_endpoint("p", "10.0.0.1")], {"http": 80}))
    assert (engine.config.kv_events, engine.config.kv_replay) == (None, None)  # served without events
    assert len(problems) == 2


# -- properties ------------------------------------------------------------------------------------------------------

conditions = st.fixed_dictionaries(
    {key: st.sampled_from([None, True, False]) for key in ("ready", "serving", "terminating")}
)
endpoints = st.builds(
    lambda pod, address, uid, given: pod_endpoint(f"pod-{pod}", f"10.0.0.{address}", uid=f"uid-{pod}-{uid}", **given),
    st.integers(0, 5),
    st.integers(1, 6),
    st.integers(0, 1),
    conditions,
)
bodies = st.builds(
    lambda found, ports, family: ("", found, ports, family),
    st.lists(endpoints, max_size=5),
    st.sampled_from([PORTS, {"http": 8100}, {"web": 1}]),
    st.sampled_from(["IPv4", "IPv6", "FQDN"]),
)
# The history of each slice: every body it ever had, and whether it was deleted in the end.
histories = st.dictionaries(
    st.sampled_from("abcd"), st.tuples(st.lists(bodies, min_size=1, max_size=4), st.booleans()), max_size=4
)


@given(histories, st.randoms(use_true_random=False))
def test_any_order_of_events_ends_where_a_list_does(histories: dict[str, Any], chance: random.Random) -> None:
    """Events of one slice come in order, those of different slices in any; repeats and bookmarks are harmless."""
    queues: list[list[WatchEvent]] = []
    listed: list[EndpointSlice] = []
    for name, (versions, deleted) in histories.items():
        pieces = [decoded(endpoint_slice(name, found, ports, family=family)) for _, found, ports, family in versions]
        queue = [WatchEvent("MODIFIED" if at else "ADDED", str(at), piece) for at, piece in enumerate(pieces)]
        if deleted:
            queue.append(WatchEvent("DELETED", "9", pieces[-1]))
        else:
            listed.append(pieces[-1])
        queues.append(queue)
    table = SliceTable()
    while any(queues):
        queue = chance.choice([queue for queue in queues if queue])
        event = queue.pop(0)
        table.apply(event)
        if chance.random() < 0.3:
            table.apply(event)
        if chance.random() < 0.3:
            assert not table.apply(WatchEvent("BOOKMARK", "5", None))

    expected = engines_of(listed, CONFIG)
    chance.shuffle(listed)

    assert engines_of(table.slices.values(), CONFIG) == engines_of(listed, CONFIG) == expected


@given(st.lists(endpoints, max_size=8), st.randoms(use_true_random=False))
def test_the_place_of_an_endpoint_does_not_matter(found: list[Any], chance: random.Random) -> None:
    together = reduced(endpoint_slice("a", found, PORTS))
    shuffled = list(found)
    chance.shuffle(shuffled)
    cut = chance.randint(0, len(shuffled))
    apart = reduced(endpoint_slice("a", shuffled[:cut], PORTS), endpoint_slice("b", shuffled[cut:], PORTS))

    assert apart.engines == together.engines
    names = [engine.config.name for engine in together.engines]
    assert names == sorted(set(names))
    offered = {engine.config.name for engine in together.engines if engine.withheld is None}
    for endpoint in found:
        if endpoint["conditions"].get("terminating"):
            uid = endpoint["targetRef"]["uid"]
            assert not any(uid in engine.instance for engine in together.engines if engine.config.name in offered)
