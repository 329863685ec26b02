"""A setting of the model alone gets its line in values.yaml."""

from pathlib import Path

import pytest
import yaml

from spillway_settings.values.completion import _comment, with_missing_settings
from spillway_settings.values.kinds import Section

TEXT = (Path(__file__).parents[3] / "charts" / "spillway" / "values.yaml").read_text()
INHERITED = "    queueOvertakeSeconds: 4\n"
LINE = "    maxActive: 1        # adapters in one batch; requests of others wait\n"


class Base(Section, frozen=True):
    waits_seconds: float = 1  # how long it waits


class Derived(Base, frozen=True):
    port: int = 1


def test_an_inherited_setting_comes_behind_its_neighbour_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fields of a base come first, although their lines may be below those of the section's own."""
    monkeypatch.setattr("spillway_settings.values.completion._comment", lambda section, name: f"what {name} does")
    own = "    numCpuBlocks: 2048\n"

    written = with_missing_settings(TEXT.replace(INHERITED, "").replace(own, ""))

    at = written.index("    queueOvertakeSeconds: 4  # what queue_overtake_seconds does\n")
    assert written[:at].splitlines()[-1].startswith("    queueOrder: prefix")
    assert yaml.safe_load(written) == yaml.safe_load(TEXT)


def test_the_comment_of_an_inherited_setting_is_that_of_its_base() -> None:
    assert _comment(Derived, "waits_seconds") == "how long it waits"
    assert _comment(Derived, "port") is None


def test_the_charts_values_have_every_setting() -> None:
    assert with_missing_settings(TEXT) == TEXT


def test_a_missing_setting_comes_behind_its_neighbour_with_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spillway_settings.values.completion._comment", lambda section, name: f"what {name} does")

    written = with_missing_settings(TEXT.replace(LINE, ""))

    at = written.index("    maxActive: 1  # what max_active does\n")
    assert written[:at].splitlines()[-1].startswith("    maxRank:")
    assert yaml.safe_load(written) == yaml.safe_load(TEXT)


def test_a_setting_that_nothing_explains_is_not_written() -> None:
    with pytest.raises(
        ValueError, match=r"engine\.lora\.maxActive: write it into values\.yaml, or give its field a comment"
    ):
        with_missing_settings(TEXT.replace(LINE, ""))
