"""Tests that compare texts of real engines ask questions whose answer does not depend on rounding."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from reference_answers import questions
from reference_answers.margins import MARGIN_LEAST
from reference_answers.questions import QUESTIONS, Measured, NearTie, read_record, write_record

ROOT = Path(__file__).resolve().parents[2]
# Scripts that contain their question, as they run without this repository.
SCRIPTS = ("tests/cluster/client/load.py",)


def test_no_recorded_answer_rests_on_a_near_tie() -> None:
    recorded = read_record()
    assert [one.question for one in recorded] == list(QUESTIONS)
    for one in recorded:
        assert one.answer.strip()
        assert min(one.require_margin().margins) >= MARGIN_LEAST


def test_a_near_tie_is_refused_when_answers_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "RECORD", tmp_path / "questions.json")
    sure = Measured("a?", "a", (1.0, 0.5))
    with pytest.raises(NearTie, match=r"'b\?' -> 'b': token 2 leads by 0.499, 0.5 is needed"):
        write_record([sure, Measured("b?", "b", (1.0, 0.499))], "somewhere")
    assert not (tmp_path / "questions.json").exists()

    write_record([sure], "somewhere")
    assert read_record() == [sure]


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_ask_a_recorded_question(script: str) -> None:
    spec = importlib.util.spec_from_file_location(Path(script).stem, ROOT / script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    assert module.QUESTION in QUESTIONS
