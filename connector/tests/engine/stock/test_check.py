"""The command for a reader's own device: its configuration, and what it makes of two engines' answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spillway_connector.engine.stock import check

ARGUMENTS = ["--model", "m", "--tier", '{"type": "spillway-nvme", "path": "/kv"}']


def test_the_configuration_is_printed_and_nothing_started(capsys: pytest.CaptureFixture[str]):
    assert check.main([*ARGUMENTS, "--print", "--spec", "NPUTieringOffloadingSpec", "--spec-module", "a.b"]) == 0
    flag, config = capsys.readouterr().out.strip().split(" ", 1)
    assert flag == "--kv-transfer-config"
    extra = json.loads(config.strip("'"))["kv_connector_extra_config"]
    assert extra["spec_name"] == "NPUTieringOffloadingSpec" and extra["spec_module_path"] == "a.b"
    assert extra["secondary_tiers"] == [{"type": "spillway-nvme", "path": "/kv"}]


@pytest.mark.parametrize(
    ("second", "status", "says"),
    [
        ({"tokens": [1, 2], "cached": 4096, "seconds": 0.5}, 0, "the same answer, loaded from the tier"),
        ({"tokens": [1, 3], "cached": 4096, "seconds": 0.5}, 1, "DIFFERENT answers"),
        ({"tokens": [1, 2], "cached": 0, "seconds": 0.5}, 1, "NOTHING was loaded"),
        (None, 1, "the engine that loads after a restart failed"),
    ],
)
def test_the_verdict(
    second: dict[str, Any] | None,
    status: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    runs = iter([{"tokens": [1, 2], "cached": 0, "seconds": 2.0}, second])
    monkeypatch.setattr(check, "_run_engine", lambda engine, tokens: next(runs))
    assert check.main(ARGUMENTS) == status
    assert says in capsys.readouterr().out
