from pathlib import Path

from spillway_stack.state_folder import StateFolder, last_lines, write_json


def test_what_is_written_is_read_and_nothing_else_stays(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    write_json(folder.state_file, {"a": 1})

    assert folder.read_state() == {"a": 1}
    assert list(tmp_path.iterdir()) == [folder.state_file]


def test_no_file_and_half_a_file_are_no_state(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    assert folder.read_state() is None
    folder.state_file.write_text('{"supervisor": {')

    assert folder.read_state() is None


def test_the_end_of_a_long_log(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("".join(f"line {number}\n" for number in range(100_000)))

    assert last_lines(log, 2) == ["line 99998", "line 99999"]
    assert last_lines(tmp_path / "none.log", 2) == []
