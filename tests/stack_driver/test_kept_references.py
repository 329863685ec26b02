"""Kept answers equal the computed ones, and a different engine has others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from reference_answers.margins import Scored

from spillway_stack.settings import StackSettings
from stack_driver import kept_references
from stack_driver.kept_references import kept_file, read, write
from stack_driver.known_answers import KnownAnswers
from stack_driver.prompts import make_prompts

OFF = StackSettings(port=20_000, offload=False, shared_tier="none")


@pytest.fixture
def made() -> dict[str, KnownAnswers]:
    cold, hit = Scored((1, 2), ({1: -0.5}, {2: -0.25})), Scored((3,), ({3: -0.1, 4: -2.5},))
    return {prompt.name: KnownAnswers(prompt, {0: cold, 256: hit}) for prompt in make_prompts(7)}


def test_what_was_written_is_read_in_its_order(made: dict[str, KnownAnswers], tmp_path: Path) -> None:
    file = tmp_path / "folder" / "kept.json"
    write(file, made)
    found = read(file, None)
    assert found == made and list(found) == list(made)
    assert read(file, 7) == made
    assert read(file, 8) is None
    assert [path.name for path in file.parent.iterdir()] == ["kept.json"]


@pytest.mark.parametrize("text", ["", "{", "{}x", "[1]", '[{"prompt": "x", "answers": {}}]', '{"a": 1}'])
def test_unreadable_answers_and_those_of_other_prompts_are_computed_again(text: str, tmp_path: Path) -> None:
    (tmp_path / "kept.json").write_text(text)
    assert read(tmp_path / "kept.json", None) is None
    assert read(tmp_path / "missing.json", None) is None


def test_a_changed_prompt_is_noticed(made: dict[str, KnownAnswers], tmp_path: Path) -> None:
    write(tmp_path / "kept.json", made)
    kept = json.loads((tmp_path / "kept.json").read_text())
    kept[3]["prompt"] = kept[2]["prompt"]
    (tmp_path / "kept.json").write_text(json.dumps(kept))
    assert read(tmp_path / "kept.json", None) is None


def test_an_equal_engine_on_another_port_has_the_same_answers() -> None:
    assert kept_file(OFF) == kept_file(replace(OFF, port=21_000))


def test_another_engine_another_cpu_and_other_code_have_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = [kept_file(OFF), kept_file(replace(OFF, engine_overrides=("model.dtype=float32",)))]
    monkeypatch.setattr(kept_references, "cpu_flags", lambda _: frozenset({"avx2"}))
    files.append(kept_file(OFF))
    (tmp_path / "__init__.py").write_text("")
    monkeypatch.setattr(kept_references.spillway_engine, "__file__", str(tmp_path / "__init__.py"))
    files.append(kept_file(OFF))
    monkeypatch.setattr(kept_references, "version", lambda _: "0.0")
    files.append(kept_file(OFF))
    assert len(set(files)) == len(files)


def test_answers_of_another_model_are_not_kept() -> None:
    assert kept_file(replace(OFF, model="/models/mine")) is None
