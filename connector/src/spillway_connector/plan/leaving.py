"""How far ahead of the device the CPU tier stores what the device is about to give up.

vLLM takes blocks from the head of the free queue. What lies there and nowhere else has to be copied before its block is
taken: one step before, at least, because a step's stores are copied behind it. How many blocks a step takes is
measured: a request that is admitted takes the blocks of its whole prefix at once, and a step that decodes takes few.

Pure: no clock, no lock, no block.
"""

from __future__ import annotations

_DECAY = 0.98  # a step, of the most blocks that one has taken: half of it after 34 steps
_LOOK_STEPS_MAX = 16  # between two looks at the head, for blocks that have left it because they were used again


class LeavingWindow:
    """How many blocks from the head of the free queue are about to be given up, and when to look at them again."""

    def __init__(self, blocks_per_step: int) -> None:
        """blocks_per_step: that one step computes at most; the least that is kept ready for one."""
        self._least = blocks_per_step
        self._most_taken = 0.0
        self._taken_this_step = 0
        self._taken_since_look = 0
        self._steps_since_look = _LOOK_STEPS_MAX

    @property
    def next_step_blocks(self) -> int:
        """Those that the next step may take."""
        return max(self._least, int(self._most_taken))

    @property
    def blocks(self) -> int:
        """How many to look at: half as many again, so that not every step has to look."""
        return self.next_step_blocks + self.next_step_blocks // 2

    def took(self, blocks: int) -> None:
        """vLLM has taken them from the head, within the present step."""
        self._taken_this_step += blocks
        self._taken_since_look += blocks

    def end_step(self) -> None:
        self._most_taken = max(float(self._taken_this_step), self._most_taken * _DECAY)
        self._taken_this_step = 0
        self._steps_since_look += 1

    def look_is_due(self, free_blocks: int) -> bool:
        """Whether other blocks may be the next step's since the last look.

        free_blocks: the length of the queue; while it is short, what was freed last is near the head as well.
        """
        return (
            free_blocks < self.blocks
            or self._taken_since_look > self.next_step_blocks // 2
            or self._steps_since_look >= _LOOK_STEPS_MAX
        )

    def looked(self) -> None:
        self._taken_since_look = self._steps_since_look = 0
