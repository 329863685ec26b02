"""Values that the documentation and `spillway doctor` name exist, and every fragment of values in it renders."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml
from chart.helm_binaries import ROOT
from chart.rendering import CHART, RenderRefused, render, render_many

from spillway_settings.values.reference import BEGIN, END

VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
OPERATIONS = (
    "docs/operations.md",
    *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs/operations").glob("*")),
)
PAGES = ("README.md", "charts/spillway/README.md", *OPERATIONS, "docs/cuda.md", "docs/versions.md")
NAMING = (
    *PAGES,
    *("docs/ascend.md", "docs/metrics.md", "docs/models.md", "docs/reliability.md", "docs/benchmarks.md"),
    *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs/benchmarks").glob("*.md")),
)
SPELT = (
    *("README.md", "CONTRIBUTING.md", "SECURITY.md", "charts/spillway/README.md"),
    *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")),
)
FENCED = re.compile(r"^([ \t]*)```\w*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?<=\n\n)(?: {4}[^\n]*\n|\n)+")
CAMEL = re.compile(r"(?<![\w./$\"-])[a-z]+(?:[A-Z][a-z]*)+(?![\w/(\"])")
DOTTED = re.compile(r"(?<![\w./$-])[a-zA-Z]+(?:\.[a-zA-Z]+)+(?![\w/(.])")
FILES = ("c", "json", "md", "py", "sh", "so", "tpl", "txt", "yaml")


def paths(values: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for key, value in values.items():
        yield f"{above}{key}"
        if isinstance(value, Mapping):
            yield from paths(value, f"{above}{key}.")


WHOLE = frozenset(paths(VALUES))
# `sharedTier.redis.url` for `engine.offload.sharedTier.redis.url`: where the text says of what.
ENDS = frozenset(".".join(path.split(".")[at:]) for path in WHOLE for at in range(path.count(".") + 1))
KEYS = {key for path in WHOLE for key in path.split(".")}
BEGINNINGS = {end.split(".")[0] for end in ENDS if "." in end}


def fragments(text: str) -> list[dict[str, Any]]:
    """Blocks of code that are values of the chart."""
    blocks = [block for _, block in FENCED.findall(text)] + INDENTED.findall(FENCED.sub("\n", text))
    found = []
    for block in blocks:
        try:
            values = yaml.safe_load(textwrap.dedent(block))
        except yaml.YAMLError:
            continue
        if isinstance(values, dict) and values.keys() <= VALUES.keys():
            found.append(values)
    return found


def unknown_values(text: str) -> list[str]:
    """Dotted names of inline code that begin like a value and are none."""
    named = (name for span in re.findall(r"`([^`\n]+)`", FENCED.sub("", text)) for name in DOTTED.findall(span))
    return sorted(
        {name for name in named if name.split(".")[0] in BEGINNINGS and name.split(".")[-1] not in FILES} - ENDS
    )


# Settings of gateway and engines that the chart writes itself, words of Kubernetes and drivers, names of tests.
OTHER_KEYS = {
    *("apiServer", "caFile", "concurrentRequestsMax", "dataParallelRanks", "emptyAnswersBeforeRemoval", "keysFile"),
    *("engineKeyFile", "kvReplay", "requestsPerMinute", "resyncSeconds", "roleServices", "saltSecretFile", "tokenFile"),
    *("targetRef", "wakeSeconds", "emptyDir", "endPort", "fieldRef", "maxSurge", "seLinuxOptions"),
    *("modelVolume", "perPodClaim", "sharedClaim", "bytesPerToken", "renderSays", "cProfile", "vLLM"),
    "settingNames",
}


def unknown_keys(text: str) -> list[str]:
    """Words of inline code that are spelt like keys and are none."""
    spans = re.findall(r"`([^`\n]+)`", FENCED.sub("", text))
    return sorted({name for span in spans for name in CAMEL.findall(span)} - KEYS - OTHER_KEYS)


@pytest.mark.parametrize("page", [page for page in SPELT if page not in ("docs/ascend.md", "docs/cuda.md")])
def test_keys_without_a_section_exist(page):
    """`storeQueueBytesMax`, whatever its section; calls of Ascend's and CUDA's drivers are spelt alike."""
    by_hand, _, rest = (ROOT / page).read_text().partition(BEGIN)
    assert unknown_keys(by_hand + rest.partition(END)[2]) == []


@pytest.mark.parametrize("page", NAMING)
def test_named_values_exist(page):
    by_hand, _, rest = (ROOT / page).read_text().partition(BEGIN)  # of the table that the model writes
    assert unknown_values(by_hand + rest.partition(END)[2]) == []


@pytest.mark.parametrize("page", PAGES)
def test_fragments_of_values_render(page, tmp_path):
    cases = {str(number): values for number, values in enumerate(fragments((ROOT / page).read_text()))}

    for rendered in render_many(cases, tmp_path / "spillway").values() if cases else ():
        assert rendered.objects


def test_every_chapter_with_values_is_read():
    assert sum(len(fragments((ROOT / page).read_text())) for page in OPERATIONS) >= 11


def test_the_doctor_names_values_that_exist():
    """The doctor's remedies begin a value at the root, as an operator writes it into a file."""
    text = (ROOT / "services/ctl/src/spillway_ctl/findings.py").read_text()
    named = {
        name for name in DOTTED.findall(" ".join(re.findall(r'"([^"\n]*)"', text))) if name.split(".")[0] in VALUES
    }

    assert named and named <= WHOLE


def test_what_does_not_exist_is_found():
    text = (
        "Set `engine.lockMemory: true`, `sharedTier.redis.uri` or `offload.batchMemcpy`.\n\n    engine: {replica: 2}\n"
    )

    assert unknown_values(text) == ["engine.lockMemory", "sharedTier.redis.uri"]
    assert unknown_keys("Raise `ioThread`, `ioThreads` or `storeQueueSizeMax: 2GiB`.") == [
        "ioThread",
        "storeQueueSizeMax",
    ]
    with pytest.raises(RenderRefused, match="replica"):
        render(values=fragments(text)[0])
