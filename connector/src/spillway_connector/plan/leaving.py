"""Decides how early the CPU tier stores the blocks that the device is about to give up.

vLLM takes blocks from the head of the free queue. What lies there and nowhere else has to be copied before its block is
taken: one step before, at least, because a step's stores are copied behind it. How many blocks a step takes is
measured: a request that is admitted takes the blocks of its whole prefix at once, and a step that decodes takes few.
A step without an admission says nothing about the next one, so neither time nor decoding narrows the window. Blocks
that were taken before their copies had ended widen it: copies took more steps than one, or several requests were
admitted at once.

Pure: no clock, no lock, no block.
"""

from __future__ import annotations

import math

_DECAY = 0.98  # a step with an admission, of the most that one has taken: half of it after 34 such steps
_ADMISSION_SHARE = 0.25  # of the blocks that one step computes at most; steps that take fewer only decode
# How many steps to look ahead, each as large as the largest one lately.
_STEPS_LEAST, _STEPS_MOST = 1.5, 3.0
_STEPS_MAX = 6.0  # after losses
_LOOK_STEPS_MAX = 16  # between two looks at the head, for blocks that have left it because they were used again


class LeavingWindow:
    """The blocks from the head of the free queue that are about to be given up: how many they are, and when to look at
    them again."""

    def __init__(self, blocks_per_step: int, blocks_max: float = math.inf) -> None:
        """blocks_per_step: the most blocks that one step computes, and the least that are kept ready for one.
        blocks_max: how many to look at, unless the next step and losses need more. Blocks that have been copied ahead
        are in both tiers."""
        self._least = blocks_per_step
        self._blocks_max = blocks_max
        self._most_taken = 0.0
        self._margin = 0.0
        self._taken_this_step = 0
        self._taken_since_look = 0
        self._steps_since_look = _LOOK_STEPS_MAX

    @property
    def next_step_blocks(self) -> int:
        """The number of blocks that the next step may take."""
        return max(self._least, int(self._most_taken))

    @property
    def blocks(self) -> int:
        """Number of blocks to look at: those of a step and a half, so that not every step has to look; as many again,
        because copies take time while requests are admitted; and as many as were lost."""
        next_step = self.next_step_blocks
        steps = max(_STEPS_LEAST * next_step, min(_STEPS_MOST * next_step, self._blocks_max))
        return int(min(steps + self._margin, _STEPS_MAX * next_step))

    def took(self, blocks: int) -> None:
        """vLLM has taken them from the head, within the present step."""
        self._taken_this_step += blocks
        self._taken_since_look += blocks

    def lost(self, blocks: int) -> None:
        """vLLM has taken this number of blocks before they had been copied."""
        self._margin = min(self._margin + blocks, _STEPS_MAX * max(self.next_step_blocks, self._taken_this_step))

    def end_step(self) -> None:
        if self._taken_this_step >= _ADMISSION_SHARE * self._least:
            self._most_taken = max(float(self._taken_this_step), self._most_taken * _DECAY)
            self._margin *= _DECAY
        self._taken_this_step = 0
        self._steps_since_look += 1

    def look_is_due(self, free_blocks: int, *, freed: bool) -> bool:
        """Whether the next step may take other blocks than the last look said.

        Args:
            free_blocks: The length of the queue; while it is short, what was freed last is near the head as well.
            freed: Whether blocks may have been freed since the last look.
        """
        return (
            (freed and free_blocks < self.blocks)
            or self._taken_since_look > self.next_step_blocks // 2
            or self._steps_since_look >= _LOOK_STEPS_MAX
        )

    def looked(self) -> None:
        self._taken_since_look = self._steps_since_look = 0

    @property
    def taken_since_look(self) -> int:
        return self._taken_since_look
