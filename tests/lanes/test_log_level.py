"""A library that sets the root logger's level while one test runs changes nothing for the next one."""

from __future__ import annotations

import logging

import pytest


@pytest.mark.parametrize("turn", range(4))
def test_a_level_that_a_test_leaves_behind_does_not_reach_the_next_one(turn: int, caplog: pytest.LogCaptureFixture):
    logging.getLogger("spillway.levels").warning("turn %d is heard", turn)
    logging.root.setLevel(logging.ERROR)  # as an import of vLLM's API server does
    assert f"turn {turn} is heard" in caplog.text
