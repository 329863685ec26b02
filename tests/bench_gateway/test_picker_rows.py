from __future__ import annotations

from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import picker
import pytest

ENGINE_PORT, GATEWAY_PORT, ENVOY_PORT = 1001, 1002, 1003


@pytest.mark.parametrize(
    ("rows", "measured", "envoys"),
    [
        ("gateway", {"engines alone", "gateway", "gateway, old"}, 0),
        ("engines alone,envoy and picker", {"engines alone", "envoy and picker", "envoy and picker, old"}, 2),
        (",".join(picker.ROWS), None, 5),
    ],
)
async def test_only_the_chosen_rows_are_measured_beside_the_engines_alone(
    monkeypatch: pytest.MonkeyPatch, rows: str, measured: set[str] | None, envoys: int
) -> None:
    started, asked = 0, set()

    @asynccontextmanager
    async def running_envoy(config: object, threads: int) -> AsyncIterator[str]:
        nonlocal started
        started += 1
        yield f"http://127.0.0.1:{ENVOY_PORT}"

    async def run(sent: object, target: picker.Target, cell: picker.Cell, seconds: float) -> tuple[object, str]:
        asked.add(cell.row)
        return {}, ""

    monkeypatch.setattr(picker, "running_envoy", running_envoy)
    monkeypatch.setattr(picker, "_run", run)
    given: Namespace = picker._parse(["--rows", rows, "--tokens", "10", "--connections", "1"])
    targets = {picker.ALONE: picker.Target([ENGINE_PORT])}
    pickers = {}
    for suffix in ("", ", old"):
        for row in (picker.GATEWAY, picker.PICKER, picker.KEPT):
            targets[row + suffix] = picker.Target([GATEWAY_PORT])
        pickers |= dict.fromkeys((picker.PICKER + suffix, picker.KEPT + suffix), GATEWAY_PORT)
    await picker._measure(given, targets, pickers)

    assert asked == ({*targets, picker.ENVOY} if measured is None else measured)
    assert started == envoys


def test_a_row_that_does_not_exist_is_refused_with_the_names_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        picker._parse(["--rows", "gateways"])
    assert "engines alone" in capsys.readouterr().err
