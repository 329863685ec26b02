import json
from pathlib import Path

import pytest
from demo_samples import counted, rows_of, sample, whole_run

from spillway_stack.demo.phases import Phase
from spillway_stack.demo.report import write_report

# What issue trackers and scripts may rely on.
KEYS = [
    *("phase", "engine", "tier", "prompt_tokens", "cached_tokens", "ttft_seconds", "ratio_to_recompute", "identical"),
]


def test_a_good_run_has_one_proven_row_per_phase() -> None:
    rows = rows_of(whole_run())
    assert [row.tier for row in rows] == ["none", "device", "cpu", "nvme", "nvme", "device"]
    assert [row.engine for row in rows] == ["engine-0"] * 3 + ["engine-1", "engine-0", "engine-0"]
    assert [row.ratio_to_recompute for row in rows] == [1.0, 40.0, 10.0, 8.0, 5.0, 36.36]
    assert [row.cached_tokens for row in rows] == [0, 4096, 4096, 4096, 4096, 4096]
    assert all(row.identical and row.identical_to_cold and row.is_proven and row.reference == "cold" for row in rows)


def test_figures_are_medians_of_the_documents() -> None:
    samples = [sample(Phase.COLD, document, ttft_seconds=seconds) for document, seconds in enumerate((9.0, 2.0, 3.0))]
    (row,) = rows_of(samples)
    assert row.ttft_seconds == 3.0
    assert row.ttft_seconds_samples == (9.0, 2.0, 3.0)


def test_where_a_device_hit_rounds_differently_it_is_the_reference() -> None:
    samples = [
        sample(phase, document, token_ids=(1, 2) if phase is Phase.COLD and document == 1 else (7, 8))
        for phase in Phase
        for document in range(3)
    ]
    cold, device, *others = rows_of(samples)
    assert cold.identical and cold.reference == "cold"
    assert not device.identical and device.reference == "cold" and device.is_proven
    for row in others:
        assert row.identical and row.reference == "device hit" and not row.identical_to_cold and row.is_proven


@pytest.mark.parametrize("phase", [Phase.GATEWAY, Phase.CPU_TIER, Phase.OTHER_ENGINE, Phase.RESTARTED])
def test_a_hit_that_equals_neither_reference_is_a_fault(phase: Phase) -> None:
    samples = [
        sample(each, document, token_ids=(9,) if each is phase and document == 2 else (1, 2))
        for each in Phase
        for document in range(3)
    ]
    for row in rows_of(samples):
        assert row.identical == (row.phase != phase.value) == row.is_proven


@pytest.mark.parametrize(("lead", "proven"), [(0.3, True), (3.0, False)])
def test_a_near_tie_that_went_the_other_way_is_rounding_and_a_sure_token_is_a_fault(lead: float, proven: bool) -> None:
    samples = [
        sample(each, document, token_ids=(1, 9, 5) if each is Phase.RESTARTED else (1, 2, 3), leads=(4.0, lead, 4.0))
        for each in Phase
        for document in range(3)
    ]
    row = next(row for row in rows_of(samples) if row.phase == Phase.RESTARTED.value)
    assert (row.identical, row.differs_by_rounding, row.is_proven) == (False, proven, proven)


def test_documents_served_from_different_tiers_are_mixed_and_named() -> None:
    samples = [
        *(sample(Phase.COLD, document) for document in range(2)),
        *(sample(Phase.DEVICE_HIT, document) for document in range(2)),
        sample(Phase.CPU_TIER, 0),
        sample(Phase.CPU_TIER, 1, delta=counted(external=4096, read=4096)),
    ]
    row = rows_of(samples)[-1]
    assert row.tier == "mixed"
    assert not row.served_as_planned and not row.is_proven
    assert row.notes == ("document 2: 4,096 from nvme, 54 computed",)


def test_only_the_gateways_own_headers_are_kept() -> None:
    row = next(row for row in rows_of(whole_run()) if row.phase == Phase.GATEWAY.value)
    assert row.headers == {"x-spillway-engine": "engine-0"}


def test_the_report_is_a_list_of_rows_with_the_promised_keys(tmp_path: Path) -> None:
    path = tmp_path / "build" / "demo" / "report.json"
    write_report(rows_of(whole_run()), path)
    rows = json.loads(path.read_text())
    assert len(rows) == len(Phase)
    for row in rows:
        assert list(row)[: len(KEYS)] == KEYS
    assert rows[2]["phase"] == "CPU tier, after eviction"
    assert rows[2]["ttft_seconds"] == 0.4
    assert [entry.name for entry in path.parent.iterdir()] == ["report.json"]


def test_a_report_that_cannot_be_put_in_place_leaves_nothing_half_written(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.mkdir()
    with pytest.raises(OSError, match="directory"):
        write_report(rows_of(whole_run()), path)
    assert list(tmp_path.iterdir()) == [path]
