"""A setting of the model alone gets its line in values.yaml."""

from pathlib import Path

import pytest
import yaml

from spillway_settings.values.completion import with_missing_settings

TEXT = (Path(__file__).parents[3] / "charts" / "spillway" / "values.yaml").read_text()
LINE = "    maxActive: 1        # adapters in one batch; requests of others wait\n"


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
