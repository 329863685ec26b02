"""The patches of vLLM 0.30 and later.

What 0.23's own patches do to its failed loads, pauses and KV groups, these versions do themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

from spillway_connector.engine.patches.common import COMMON, SCHEDULER, compute_while_loading, fair_steps
from spillway_connector.engine.patches.patching import Needed, Patch

PATCHES: Sequence[Patch] = (
    *COMMON,
    compute_while_loading("self", "throttle_prefills"),
    fair_steps("self", "throttle_prefills"),
    Patch(
        name="step-bounds",
        module=SCHEDULER,
        cls="Scheduler",
        function="_reserve_prefill_lookahead",
        parameters=("self", "request", "num_computed_tokens", "num_new_tokens"),
        replacement=None,
        needed_by=Needed.COMPUTE_WHILE_LOADING,
        reason="vLLM's bound for long prompts does not hold for a request that is alone in a step",
        until="the part of one request in a step can be bounded",
    ),
)
