import pytest

from spillway_engine.ascend_acceptance.report import NOTE_OF_EMULATOR, concluded, reasons, versions
from spillway_engine.ascend_versions import AscendVersions

RIGHT = {
    "emulator": False,
    "probe_failed": [],
    **{
        f"batch_memcpy_{mode}_{key}": value
        for mode, path in (("on", "batch"), ("off", "loop"))
        for key, value in {
            "copy_path": path,
            "copy_failures": 0,
            "loaded_bytes": 1 << 20,
            "pinned": True,
            "answers_cached_tokens": 640,
            "answers_different": [],
            "answers_compared_share": 0.8,
        }.items()
    },
}


def test_what_is_right_passes_and_has_no_note() -> None:
    report = concluded(RIGHT)
    assert (report["verdict"], report["reasons"]) == ("passed", [])
    assert "note" not in report


def test_an_emulator_is_named() -> None:
    assert concluded({**RIGHT, "emulator": True})["note"] == NOTE_OF_EMULATOR


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"probe_failed": ["events: other bytes"]}, "probe, events: other bytes"),
        ({"batch_memcpy_on_copy_path": "loop"}, "batchMemcpy on: device copies go by loop, not batch"),
        ({"batch_memcpy_off_copy_failures": 2}, "batchMemcpy off: 2 copies failed"),
        ({"batch_memcpy_on_loaded_bytes": 0}, "batchMemcpy on: nothing was loaded"),
        ({"batch_memcpy_on_answers_cached_tokens": 0}, "batchMemcpy on: nothing was loaded"),
        ({"batch_memcpy_on_pinned": False}, "batchMemcpy on: the CPU tier is not page-locked"),
        ({"batch_memcpy_on_answers_different": ["prompt 1, loaded: token 2"]}, "prompt 1, loaded: token 2"),
        ({"batch_memcpy_on_answers_compared_share": 0.1}, "after 10% of their tokens"),
        ({"batch_memcpy_on_failed": "the engine ended with status 2"}, "the engine ended with status 2"),
    ],
)
def test_each_fault_is_a_reason(change: dict, reason: str) -> None:
    report = concluded({**RIGHT, **change})
    assert report["verdict"] == "failed"
    assert len(report["reasons"]) == 1 and reason in report["reasons"][0]


def test_without_a_reference_nothing_else_was_run() -> None:
    assert reasons({"probe_failed": [], "no_offload_failed": "no memory"}) == ["without offload: no memory"]


def test_versions_are_those_of_the_machine() -> None:
    report = versions(AscendVersions("0.23.0", "25.5.0", "9.1.0", None, None))
    assert (report["driver_version"], report["cann_version"]) == ("25.5.0", "9.1.0")
    assert report["torch_npu_version"] is None and report["spillway_engine_version"]
