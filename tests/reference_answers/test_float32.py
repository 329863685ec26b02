"""The recorded margins are those of the bundled model in float32."""

from __future__ import annotations

import pytest

from reference_answers.float32 import measure
from reference_answers.questions import QUESTIONS, read_record
from spillway_stack.bundled_model import prepare


def test_the_record_is_what_the_model_says() -> None:
    for found, recorded in zip(measure(prepare(print), QUESTIONS), read_record(), strict=True):
        assert found.require_margin().answer == recorded.answer
        # float32 rounds too, by less than anything that matters here.
        assert found.margins == pytest.approx(recorded.margins, abs=0.01)
