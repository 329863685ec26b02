import pytest
from demo_samples import LIMITS, PLANNED, counted, sample

from spillway_stack.demo.phases import Phase, attribute


@pytest.mark.parametrize(
    ("phase", "tier"),
    [
        (Phase.COLD, "none"),
        (Phase.DEVICE_HIT, "device"),
        (Phase.GATEWAY, "device"),
        (Phase.CPU_TIER, "cpu"),
        (Phase.OTHER_ENGINE, "nvme"),
        (Phase.RESTARTED, "nvme"),
    ],
)
def test_each_phase_served_as_planned_is_proven(phase: Phase, tier: str) -> None:
    asked = sample(phase)
    assert asked.served.tier == tier == phase.expected_tier("nvme")
    assert asked.fault(LIMITS, "nvme") is None


def test_what_a_shared_tier_was_not_read_for_came_from_the_cpu_tier() -> None:
    served = attribute(counted(device=128, external=3968, read=1280), LIMITS)
    assert served.tokens_by_tier == {"device": 128, "cpu": 2688, "nvme": 1280}
    assert served.tier == "mixed"
    assert served.text() == "128 from device, 2,688 from cpu, 1,280 from nvme, 54 computed"


def test_reading_ahead_of_what_is_handed_over_never_makes_the_cpu_tier_negative() -> None:
    assert attribute(counted(external=1280, read=4096), LIMITS).tokens_by_tier["cpu"] == 0


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("other", Phase)
def test_a_phase_served_from_anywhere_else_is_at_fault(phase: Phase, other: Phase) -> None:
    fault = sample(phase, delta=PLANNED[other]).fault(LIMITS, "nvme")
    assert (fault is None) == (phase.expected_tier("nvme") == other.expected_tier("nvme"))


def test_one_block_short_is_at_fault() -> None:
    fault = sample(Phase.CPU_TIER, delta=counted(external=3968)).fault(LIMITS, "nvme")
    assert fault == "3,968 from cpu, 182 computed"


def test_a_concurrent_request_invalidates_the_proof() -> None:
    fault = sample(Phase.DEVICE_HIT, delta=counted(device=4096, prompt_tokens=5000)).fault(LIMITS, "nvme")
    assert fault is not None
    assert "other requests" in fault


def test_tokens_handed_over_without_a_copy_to_the_device_are_at_fault() -> None:
    planned = PLANNED[Phase.CPU_TIER]
    uncopied = type(planned)(planned.prompt_tokens, 0, planned.external_hit_tokens, 0, 0, {}, {})
    assert sample(Phase.CPU_TIER, delta=uncopied).fault(LIMITS, "nvme") == (
        "0 bytes were copied to the device, 40,960 were due"
    )
