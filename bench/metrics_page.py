"""Values that a process of the stack reports at /metrics."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families

Page = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def reading(url: str) -> Page:
    """Value of each sample by its name and labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as reply:
        text = reply.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(page: Page, name: str, **labels: str) -> float:
    """Sum of the samples of this name that have these labels."""
    return sum(value for (found, has), value in page.items() if found == name and labels.items() <= dict(has).items())
