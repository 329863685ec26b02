from __future__ import annotations

import pytest

from spillway_connector.device.npu_probe import main


@pytest.fixture
def probe(emulator, capsys):
    """(exit status, lines) of a run on the emulator."""

    def run() -> tuple[int, list[str]]:
        status = main(["--library", str(emulator.path), "--megabytes", "32"])
        return status, capsys.readouterr().out.splitlines()

    return run


def verdicts(lines: list[str]) -> dict[str, str]:
    return {line[6:].split(":")[0]: line[:4] for line in lines if line[4:6] == "  "}


def test_every_check_passes_and_no_rate_is_claimed(probe):
    status, lines = probe()
    assert status == 0
    assert lines[0].startswith("EMULATOR")
    assert not [line for line in lines if "GB/s" in line]
    found = verdicts(lines)
    assert {name for name, verdict in found.items() if verdict == "PASS"} == {"versions", "events", "pinning", "batch"}
    assert "FAIL" not in found.values()
    assert any("4096 x 4 KiB" in line and "loop" in line and "batch" in line for line in lines)


def test_memory_that_cannot_be_registered_is_a_failure(probe, emulator):
    emulator.fail("aclrtHostRegisterV2", 1, 507899, times=99)
    status, lines = probe()
    assert status == 1
    assert verdicts(lines)["pinning"] == "FAIL"
    assert verdicts(lines)["events"] == "PASS"  # pageable memory is slow, not wrong


def test_a_batch_that_a_new_cann_refuses_is_a_failure(probe, emulator):
    emulator.fail("aclrtMemcpyBatchAsync", 1, 507899, times=10_000)
    status, lines = probe()
    assert status == 1
    assert verdicts(lines)["batch"] == "FAIL"
    assert any("507899" in line for line in lines if line.startswith("FAIL"))


def test_what_an_old_runtime_lacks_is_reported(emulator_8_3, capsys, monkeypatch):
    monkeypatch.setenv("ACL_EMULATOR_CANN", "8.3.RC1")
    assert main(["--library", str(emulator_8_3.path), "--megabytes", "32"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert verdicts(lines)["batch"] == "INFO"
    assert verdicts(lines)["pinning"] == "FAIL"
    assert any("not exported: aclrtMemcpyBatchAsync" in line for line in lines)


def test_no_runtime_at_all(capsys):
    assert main(["--library", "/nowhere.so"]) == 1
    assert "cannot be loaded" in capsys.readouterr().out
