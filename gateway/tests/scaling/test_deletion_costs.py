from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.scaling.deletion_costs import (
    BLOCKS_PER_POD,
    COST_MAX,
    REQUESTS_PER_POD,
    SESSIONS_PER_POD,
    STEP,
    PodWarmth,
    Written,
    deletion_costs,
    due_writes,
)

counts = st.integers(0, 10**9)
warmths = st.builds(PodWarmth, counts, counts, counts)
fleets = st.dictionaries(st.text("abcdef", min_size=1, max_size=3), warmths, max_size=8)


@given(fleets)
def test_costs_are_within_bounds_and_a_pod_that_has_more_of_everything_costs_no_less(
    pods: dict[str, PodWarmth],
) -> None:
    costs = deletion_costs(pods)
    assert costs.keys() == pods.keys()
    assert all(0 <= cost <= COST_MAX for cost in costs.values())
    for one, warm in pods.items():
        for other, cold in pods.items():
            if (
                warm.sessions >= cold.sessions
                and warm.blocks_alone >= cold.blocks_alone
                and warm.requests >= cold.requests
            ):
                assert costs[one] >= costs[other]


@given(fleets, st.integers(2, 9))
def test_a_gateway_that_sees_a_part_of_each_pods_sessions_finds_the_same_order(
    pods: dict[str, PodWarmth], gateways: int
) -> None:
    whole = {name: PodWarmth(gateways * pod.sessions, pod.blocks_alone, pod.requests) for name, pod in pods.items()}
    enough = sum(pod.sessions for pod in pods.values()) >= SESSIONS_PER_POD * len(pods)
    if enough:
        assert deletion_costs(whole) == deletion_costs(pods)


def test_each_kind_of_warmth_alone_makes_a_pod_cost_more() -> None:
    many = {
        "sessions": PodWarmth(sessions=10 * SESSIONS_PER_POD),
        "blocks": PodWarmth(blocks_alone=10 * BLOCKS_PER_POD),
        "requests": PodWarmth(requests=10 * REQUESTS_PER_POD),
    }
    for kind, warm in many.items():
        costs = deletion_costs({"idle": PodWarmth(), kind: warm})
        assert costs["idle"] == 0 and costs[kind] >= STEP


def test_nearly_idle_pods_are_about_equal() -> None:
    costs = deletion_costs({name: PodWarmth() for name in "abc"} | {"d": PodWarmth(0, 3, 0)})
    assert max(costs.values()) < STEP


@given(
    st.dictionaries(st.sampled_from("abcd"), st.integers(0, COST_MAX)),
    st.dictionaries(
        st.sampled_from("abcd"),
        st.builds(Written, st.integers(0, COST_MAX), st.floats(0, 100), st.sampled_from(["", "other"])),
    ),
    st.floats(0, 200),
    st.floats(0.1, 100),
)
def test_a_write_is_due_for_a_new_pod_or_a_step_and_not_too_often(
    costs: dict[str, int], written: dict[str, Written], now: float, seconds: float
) -> None:
    due = due_writes(costs, written, now=now, seconds_min=seconds, instances=dict.fromkeys(costs, ""))
    assert len(set(due)) == len(due)
    for name, cost in costs.items():
        last = written.get(name)
        if last is None or last.instance:
            assert name in due
        else:
            assert (name in due) == (now - last.at >= seconds and abs(cost - last.cost) >= STEP)
