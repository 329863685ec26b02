"""Unusual and right values, on the supported Kubernetes in turns: valid objects, and processes that take them."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from chart.rendering import render_many, require_valid
from chart.test_matrix import TURNS, require_a_gateway_that_starts, require_an_engine_that_starts, version_and_helm

UNUSUAL: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("unusual.yaml").read_text())


@pytest.mark.parametrize("turn", range(TURNS))
def test_they_can_be_said(turn: int, tmp_path: Path) -> None:
    names = list(UNUSUAL)[turn::TURNS]
    kubernetes, helm = version_and_helm(turn)

    for rendered in render_many(
        {name: UNUSUAL[name] for name in names}, tmp_path / "spillway", helm, kubernetes
    ).values():
        require_valid(rendered, kubernetes)
        for workload in rendered.of_kind("StatefulSet", "engine"):
            require_an_engine_that_starts(rendered, workload)
        require_a_gateway_that_starts(rendered, tmp_path / "gateway.yaml")
