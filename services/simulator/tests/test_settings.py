"""Settings: what is wrong is named, what is right arrives."""

from __future__ import annotations

import pytest

from spillway_simulator.errors import SettingsError
from spillway_simulator.settings import load_settings, parse_settings


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"egines": 2}, "egines: unknown setting; did you mean 'engines'"),
        ({"engines": 65}, "engines: 65 given, a whole number from 1 to 64 needed"),
        ({"engines": True}, "engines: True given, a whole number"),
        ({"speed": 0}, "speed: 0 given, a finite number above 0"),
        ({"preset": "h100"}, "h200-qwen3-14b-nvme"),
        ({"eventForm": "xml"}, "eventForm: 'xml' given, array or map needed"),
        ({"maxBatchedTokens": 10}, "more than maxRunning"),
        ({"cpuBlocks": 0, "sharedBlocks": 5}, "needs cpuBlocks"),
        ({"rates": {"stepSecond": 1}}, "unknown; known are"),
        ({"rates": {"cpu.loadTokensPerSecond": 0}}, "above 0"),
        ({"rates": {"stepSeconds": -1}}, "rates.stepSeconds: -1 given, a finite number of at least 0"),
        ({"rates": {"stepSeconds": "x"}}, "rates.stepSeconds: 'x' given, a finite number"),
    ],
)
def test_mistakes_are_named(document, message):
    with pytest.raises(SettingsError, match=message):
        parse_settings(document)


def test_a_file_and_overrides_make_settings(tmp_path):
    file = tmp_path / "simulator.yaml"
    file.write_text("engines: 3\nrates: {stepSeconds: 0.5}\n")
    made = load_settings(file, ["speed=10", "rates.shared.loadTokensPerSecond=7", "model=m"])
    assert (made.engines, made.speed, made.model) == (3, 10.0, "m")
    assert (made.engine_rates.step_seconds, made.engine_rates.shared.load_tokens_per_second) == (0.5, 7.0)
    assert made.engine_rates.sources[-1][0] == "overridden"


def test_an_override_without_a_value_is_refused():
    with pytest.raises(SettingsError, match="KEY=VALUE"):
        load_settings(None, ["speed"])
