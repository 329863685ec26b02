"""Unusual and right values, each on one supported Kubernetes in turns: valid objects, and processes that take them."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from chart.helm_binaries import helms
from chart.rendering import render, require_valid
from chart.test_matrix import VERSIONS, require_a_gateway_that_starts, require_an_engine_that_starts

UNUSUAL: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("unusual.yaml").read_text())


@pytest.mark.parametrize("name", UNUSUAL)
def test_it_can_be_said(name: str, tmp_path: Path) -> None:
    number = list(UNUSUAL).index(name)
    kubernetes = VERSIONS[number % len(VERSIONS)]

    rendered = render(values=UNUSUAL[name], kubernetes=kubernetes, helm=helms()[number % 2])

    require_valid(rendered, kubernetes)
    for workload in rendered.of_kind("StatefulSet", "engine"):
        require_an_engine_that_starts(rendered, workload)
    require_a_gateway_that_starts(rendered, tmp_path / "gateway.yaml")
