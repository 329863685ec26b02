"""The blocks that the next step may take; the tests of the scheduler half prove which blocks a step writes to."""

from __future__ import annotations

from typing import Any

import pytest

from spillway_connector.engine.scheduler.written_blocks import next_step_blocks
from spillway_connector.testing.generation import RequestState, step_output
from spillway_connector.testing.requests import request_of
from spillway_connector.testing.vllm_parts import part_of


@pytest.mark.parametrize(
    ("scheduled", "prompts", "blocks"),
    [
        pytest.param({}, {}, 0, id="no request runs"),
        pytest.param({"a": 1, "b": 1}, {"a": (65, 64), "b": (33, 32)}, 2, id="each that decodes may take one"),
        pytest.param({"a": 64}, {"a": (112, 0)}, 1 + 3, id="the rest of a prompt"),
        pytest.param({"a": 64}, {"a": (4096, 64)}, 1 + 4, id="but no more than a step computes"),
        pytest.param({"a": 32, "b": 32}, {"a": (4096, 64), "b": (80, 0)}, 2 + 4, id="of all prompts together"),
        pytest.param({"a": 3}, {"a": (66, 64)}, 1, id="drafted tokens are no prompt"),
        pytest.param({"gone": 64}, {}, 1, id="an unknown request"),
    ],
)
def test_what_the_next_step_may_take(
    scheduled: dict[str, int], prompts: dict[str, tuple[int, int]], blocks: int
) -> None:
    states: dict[str, Any] = {}
    for name, (tokens, computed) in prompts.items():
        request = request_of(name, [], tokens=tokens, block_tokens=16)
        request.num_computed_tokens = computed
        states[name] = part_of(RequestState, req=request)
    assert next_step_blocks(step_output(scheduled), states.get, 64, 16) == blocks
