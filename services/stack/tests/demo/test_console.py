import io

import pytest

from spillway_stack.demo.console import Console


def test_without_a_terminal_each_step_is_one_line() -> None:
    out = io.StringIO()
    console = Console(out)
    console.write_line("start")
    with console.status("measuring"):
        pass
    assert out.getvalue() == "start\n  ... measuring\n"


def test_on_a_terminal_the_status_line_is_cleared_afterwards() -> None:
    out = io.StringIO()
    with pytest.raises(KeyboardInterrupt), Console(out, is_terminal=True).status("measuring"):
        raise KeyboardInterrupt
    assert out.getvalue().startswith("\r\x1b[K  measuring (0 s)")
    assert out.getvalue().endswith("\r\x1b[K")
