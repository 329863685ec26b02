"""Resets of the CPU tier: what is still under way then, and when the device's own cache refuses one.

A reset drops every chunk at once, while ranks still copy to and from rows: those rows stay out of use until all ranks
have reported their jobs.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.v1.core.block_pool import BlockPool


@dataclass(slots=True)
class ResetJob:
    """A job that was under way at a reset, until every rank has reported it."""

    ranks_pending: int
    rows: list[int]  # of the CPU tier, which it may still read or write


def blocks_in_use(device_blocks: BlockPool) -> int:
    """By requests: the count that vLLM's own reset of the device's prefix cache refuses on.

    The null block is always in use, and counts for nobody.
    """
    return device_blocks.num_gpu_blocks - device_blocks.get_num_free_blocks() - 1
