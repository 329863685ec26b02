import io

import pytest

from spillway_stack.demo.narrator import Narrator


def test_away_from_a_terminal_each_step_is_one_line() -> None:
    out = io.StringIO()
    narrator = Narrator(out)
    narrator.say("start")
    with narrator.doing("measuring"):
        pass
    assert out.getvalue() == "start\n  ... measuring\n"


def test_on_a_terminal_the_passing_line_is_gone_afterwards() -> None:
    out = io.StringIO()
    with pytest.raises(KeyboardInterrupt), Narrator(out, is_terminal=True).doing("measuring"):
        raise KeyboardInterrupt
    assert out.getvalue().startswith("\r\x1b[K  measuring (0 s)")
    assert out.getvalue().endswith("\r\x1b[K")
