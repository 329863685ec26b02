import io

from spillway_stack.progress import QUIET_SECONDS, ComponentLine, ProgressDisplay


def line(state: str, seconds: float = 0.0) -> list[ComponentLine]:
    return [ComponentLine("engine-0", state, seconds, "loading")]


def test_without_a_terminal_only_changes_are_written() -> None:
    out = io.StringIO()
    display = ProgressDisplay(out, is_terminal=False)

    display.show(line("starting"), now=0)
    display.show(line("starting", 1), now=1)
    display.show(line("ready", 2), now=2)
    display.show(line("ready", 900), now=900)

    assert [text.split()[1] for text in out.getvalue().splitlines()] == ["starting", "ready"]


def test_a_long_wait_is_not_silent() -> None:
    out = io.StringIO()
    display = ProgressDisplay(out, is_terminal=False)

    display.show(line("starting"), now=0)
    display.show(line("starting", QUIET_SECONDS), now=QUIET_SECONDS)

    assert len(out.getvalue().splitlines()) == 2


def test_on_a_terminal_the_lines_are_redrawn_in_place() -> None:
    out = io.StringIO()
    display = ProgressDisplay(out, is_terminal=True)

    display.show(line("starting"))
    display.show(line("ready"))
    display.write_line("a line that stays")

    assert out.getvalue().count("\x1b[1A\x1b[J") == 2
    assert out.getvalue().endswith("a line that stays\n")
