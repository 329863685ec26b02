"""Finds the requests that are turns of one conversation although none of them says so: each begins with the prompt of
the one before.

The last blocks of a prompt are its ends, and remembered. A later prompt that holds one of them goes on with that
conversation, unless the conversation has already gone on in another way: such a block belongs to what many prompts
share, as a system prompt does. A prompt whose last block is an end was asked before: by a client that tries again, for
several answers to one prompt, or by a conversation that is held once more, whose turns all have the name of the first
time. A block's hash stands for the whole prefix, the tenant's salt and the adapter, so no conversation crosses tenants.

A prompt that continues no other may be the first turn of a conversation or may never come back. While at least half of
those before it came back, it is taken for a first turn.

Pure. Everything here belongs to one thread, the scheduler's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from spillway_connector.plan.sessions import SessionHint

ENDS_MAX = 8192  # remembered, two of each prompt; the least recently used leave
# How far from a prompt's end its conversation's last prompt is looked for, in blocks; a turn adds fewer.
NEW_BLOCKS_MAX = 8192
# How many last blocks of a prompt are remembered: chat templates may write the beginning of an answer in another way
# once the answer follows, so the last block alone can be missing from the next turn.
_ENDS_OF_PROMPT = 2
_FIRST_TURNS_COUNTED = 128  # then older ones count half
_NAME_MARK = b"\xff"  # in no session that a client names: those are UTF-8


@dataclass(slots=True, eq=False)
class _Conversation:
    """ends: the ends by which its next turn is recognised."""

    name: bytes
    ends: Sequence[bytes] = ()
    came_back: bool = False


class Conversations:
    """The conversations of one engine. ends_max: how many ends of prompts are remembered."""

    def __init__(self, ends_max: int = ENDS_MAX) -> None:
        self._ends_max = ends_max
        # End -> the conversation that had it first.
        self._ends: OrderedDict[bytes, _Conversation] = OrderedDict()
        # First blocks of the prompts with these ends. They are used when an end is, so they are as many at most.
        self._beginnings: OrderedDict[bytes, None] = OrderedDict()
        self._first_turns = 0
        self._came_back = 0

    def session_of(self, blocks: Sequence[bytes]) -> SessionHint | None:
        """The conversation that a new request belongs to; None if it is not expected to have another turn.

        Args:
            blocks: hashes of the prompt's full blocks, in order, each of which covers all before it.
        """
        if not blocks:
            return None
        conversation = self._known(blocks)
        if conversation is None:
            conversation = _Conversation(_NAME_MARK + blocks[-1])
            self._count_first_turn()
        elif not conversation.came_back:
            conversation.came_back = True
            self._came_back += 1
        self._end(conversation, blocks)
        self._beginnings[blocks[0]] = None
        self._beginnings.move_to_end(blocks[0])
        if len(self._beginnings) > self._ends_max:
            self._beginnings.popitem(last=False)
        expected = conversation.came_back or 2 * self._came_back >= self._first_turns
        return SessionHint(conversation.name) if expected else None

    def _known(self, blocks: Sequence[bytes]) -> _Conversation | None:
        """The conversation that these blocks repeat or go on with."""
        if blocks[0] not in self._beginnings:  # a first turn, and no other block of it is looked at
            return None
        ends = self._ends
        block = next(filter(ends.__contains__, islice(reversed(blocks), NEW_BLOCKS_MAX)), None)
        if block is None:
            return None
        conversation = ends[block]
        return conversation if block == blocks[-1] or block in conversation.ends else None

    def _end(self, conversation: _Conversation, blocks: Sequence[bytes]) -> None:
        """Make this prompt the end of the conversation, as its newest, unless it was asked before."""
        ends = self._ends
        if blocks[-1] in ends:
            ends.move_to_end(blocks[-1])
            return
        # A block that is an end already is one from which several conversations go on.
        conversation.ends = new = []
        for block in blocks[-_ENDS_OF_PROMPT:]:
            if block not in ends:
                ends[block] = conversation
                new.append(block)
        while len(ends) > self._ends_max:
            ends.popitem(last=False)

    def _count_first_turn(self) -> None:
        self._first_turns += 1
        if self._first_turns >= _FIRST_TURNS_COUNTED:
            self._first_turns //= 2
            self._came_back //= 2
