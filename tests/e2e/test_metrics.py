"""The connector's series on /metrics of a real engine of each vLLM: names, labels and their values, as docs/metrics.md
lists them."""

from __future__ import annotations

import pytest
from stack_driver.engine_metrics import Sample
from stack_driver.running_stack import RunningStack

from spillway_connector import metrics
from spillway_connector.metrics import Kind, Metric

pytestmark = pytest.mark.tiers("upgrade")

OF_VLLM = {"model_name", "engine"}
# Of an engine that has computed, stored, been reset and loaded: its series, by the label that divides them.
EXPECTED = {
    metrics.DEVICE_COPY_BYTES: {"direction": {"store", "load"}},
    metrics.DEVICE_COPY_SECONDS: {"direction": {"store", "load"}},
    metrics.CPU_TIER_BLOCKS: {"state": {"used", "retained", "total"}},
    metrics.CPU_TIER_RESETS: {"outcome": {"done"}},
    metrics.PROCESS_SETTING: {"process": {"EngineCore", "worker-0"}, "setting": {"cpu_blocks", "vllm_version"}},
    metrics.TIER_LOOKUPS: {"outcome": {"hit", "miss"}},
    metrics.TIER_READ_BYTES: {"tier": {"redis"}},
    metrics.TIER_READ_SECONDS: {"tier": {"redis"}},
    metrics.TIER_WRITTEN_BYTES: {"tier": {"redis"}},
    metrics.TIER_WRITE_SECONDS: {"tier": {"redis"}},
    metrics.TIER_QUEUE_BYTES: {"tier": {"redis"}},
    metrics.TIER_READY: {"tier": {"redis"}},
    metrics.PREFILL_RATE: {},
}


@pytest.mark.parametrize("index", [0, 1])
def test_series_have_the_labels_that_are_documented(stack: RunningStack, index: int) -> None:
    engine = stack.engines[index]
    known = stack.compute_and_store(engine)
    assert stack.ask_shared(engine, known).source == "shared"
    engine.nudge()
    samples = engine.metrics().samples
    for metric in metrics.ALL:
        for sample in _of(metric, samples):
            assert sample.labels.keys() == {*metric.labels} | OF_VLLM, sample
            assert all(sample.labels.values()), sample
    for metric, labels in EXPECTED.items():
        found = _of(metric, samples)
        assert found, f"{metric.name} is not on the page"
        for label, values in labels.items():
            assert values <= {sample.labels[label] for sample in found}, f"{metric.name}: {found}"


def _of(metric: Metric, samples: tuple[Sample, ...]) -> list[Sample]:
    name = f"{metric.name}_total" if metric.kind is Kind.COUNTER else metric.name
    return [sample for sample in samples if sample.name == name]
