"""The recorded margins are those of the bundled model in float32."""

from __future__ import annotations

import pytest

from reference_answers.float32 import measure
from reference_answers.questions import QUESTIONS, read_record
from spillway_stack.bundled_model import prepare


def test_the_record_equals_the_model() -> None:
    for found, recorded in zip(measure(prepare(print), QUESTIONS), read_record(), strict=True):
        assert found.require_margin().answer == recorded.answer
        # float32 rounds too, by an insignificant amount.
        assert found.margins == pytest.approx(recorded.margins, abs=0.01)
