"""`null`: where values.yaml has it for a default it changes nothing, elsewhere it is refused by name, but for a few."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart.helm_binaries import Helm, helms
from chart.rendering import CHART, RenderRefused, laid_over, nested, render, require_valid
from chart.test_matrix import require_a_gateway_that_starts, require_an_engine_that_starts

VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
# Read by Kubernetes, which has defaults of its own for what is below.
WHOLE = ("podSecurityContext", "securityContext")
# Of which a pod, or the chart, can do without.
OPTIONAL = {
    *("engine.cpu.request", "engine.offload.numCpuBlocks", "gateway.opsPort", "gateway.resources.limits.memory"),
    *("gateway.resources.requests.cpu", "redis.cpu.request"),
    "monitoring.dashboards.labels.grafana_dashboard",
}


def settings(tree: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, default) of everything in values.yaml that holds no further settings."""
    for key, value in tree.items():
        here = f"{path}.{key}" if path else key
        if isinstance(value, dict) and value and key not in WHOLE:
            yield from settings(value, here)
        else:
            yield here, value


@pytest.fixture(params=helms(), ids=lambda helm: f"helm{helm.major}")
def helm(request: pytest.FixtureRequest) -> Helm:
    return request.param


def test_a_default_of_null_may_be_written_down(helm: Helm) -> None:
    empty = [path for path, default in settings(VALUES) if default is None]

    assert len(empty) > 50
    assert render(values=laid_over(*[nested(path, None) for path in empty]), helm=helm).text == render(helm=helm).text


def test_null_for_any_other_setting_is_refused_by_its_name(helm: Helm) -> None:
    given = {path for path, default in settings(VALUES) if default is not None}

    with pytest.raises(RenderRefused) as refused:
        render(values=laid_over(*[nested(path, None) for path in given]), helm=helm)

    lines = [line.removeprefix("- ") for line in str(refused.value).splitlines() if line.startswith("- ")]
    assert len(given) > 350
    assert {line.partition(":")[0] for line in lines} == given - OPTIONAL
    assert {line.partition(": ")[2] for line in lines} == {
        "null given, but nothing stands in for its default; remove the line"
    }


def test_what_can_be_done_without(helm: Helm, tmp_path: Path) -> None:
    values = laid_over(*[nested(path, None) for path in OPTIONAL], nested("engine.offload.cpuBytes", "4GiB"))
    used = yaml.safe_load("{redis: {enabled: true}, engine: {offload: {sharedTier: {type: redis}}}}")

    rendered = render(values=laid_over(values, used), helm=helm)

    require_valid(rendered, "1.32")
    require_an_engine_that_starts(rendered, rendered.one("StatefulSet", "engine"))
    require_a_gateway_that_starts(rendered, tmp_path / "gateway.yaml")
