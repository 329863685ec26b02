"""Chat templates through bench/thinking_templates.py: what is decided with each."""

from __future__ import annotations

from pathlib import Path

import pytest
import thinking_templates

TURNS = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<{{ m.role }}>"
    "{{ m.content if keep or loop.index0 > ns.last else m.content.split('</think>')[-1] }}{% endfor %}<assistant>"
)


@pytest.mark.parametrize(
    ("given", "tool_calls", "decided"),
    [
        ([], 0, "sessions named: not kept, decided after 40 answers"),
        ([], 0, "sessions unknown: not kept, decided after 288 answers"),
        ([], 4, "sessions named: kept, decided after 34 answers"),
        (["--set", "keep=true"], 0, "sessions named: kept, decided after 40 answers"),
    ],
)
def test_what_auto_decides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str], tool_calls: int, decided: str
) -> None:
    template = tmp_path / "chat_template.jinja"
    template.write_text(TURNS)
    assert thinking_templates.main([str(template), "--tool-calls", str(tool_calls), *given]) == 0
    assert decided in capsys.readouterr().out
