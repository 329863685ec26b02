"""Whether a load may go layer by layer under the step that uses it. Pure.

An asynchronous load delays no other request, and costs its own request the time of the whole copy and one step. A load
within the step hides behind the computation of the layers before, but every request of the batch waits for it.
"""

from __future__ import annotations

OTHERS_WAIT_MS_MAX = 20.0  # about one step of decoding; an engineering choice, not a measurement


def load_within_step(
    blocks: int,
    blocks_before: int,
    *,
    others: bool,
    blocks_per_second: float | None,
    others_wait_ms_max: float = OTHERS_WAIT_MS_MAX,
) -> bool:
    """Whether the load of `blocks` device blocks costs the other requests of the step no more than the bound.

    Args:
        blocks: Those of this load.
        blocks_before: Those of the loads that are already in the step.
        others: Whether any other request runs in the step. If none does, no request waits for the load.
        blocks_per_second: The measured rate of copies to the device; None until a load of its own has measured it.
        others_wait_ms_max: The bound.
    """
    if not others:
        return True
    if blocks_per_second is None:
        return False
    return (blocks_before + blocks) / blocks_per_second * 1e3 <= others_wait_ms_max


def whole_blocks_before_last_token(computed: int, loadable: int, total: int, block_tokens: int) -> int:
    """Count the tokens, of `loadable` ones behind `computed`, that a step can load and go on behind.

    It computes at least the last token, and writes to no block that is being loaded.
    """
    end = min(computed + loadable, total - 1) // block_tokens * block_tokens
    return max(0, end - computed)
