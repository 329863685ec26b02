from __future__ import annotations

import io
from pathlib import Path

import pytest

from spillway_ctl.errors import CommandError
from spillway_ctl.named_text import read_named


def test_a_dash_is_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("a: 1", encoding="utf-8")
    monkeypatch.setattr("sys.stdin", io.StringIO("b: 2"))

    assert (read_named(file), read_named("-")) == ("a: 1", "b: 2")


@pytest.mark.parametrize(("contents", "why"), [(None, "No such file"), (b"\xff", "can't decode")])
def test_what_cannot_be_read_is_named_with_its_option(tmp_path: Path, contents: bytes | None, why: str) -> None:
    file = tmp_path / "a.yaml"
    if contents is not None:
        file.write_bytes(contents)

    with pytest.raises(CommandError, match=f"^--rendered {file}: cannot be read .*{why}"):
        read_named(str(file), "--rendered")
