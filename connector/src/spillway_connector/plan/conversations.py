"""Which requests are turns of one conversation, if none of them says so: each begins with the prompt of the one before.

The last blocks of a prompt are remembered. A later prompt that holds one of them goes on with that conversation, unless
the conversation has already gone on in another way: such a block belongs to what many prompts share, as a system prompt
does. A block's hash stands for the whole prefix, the tenant's salt and the adapter, so no conversation crosses tenants.

A prompt that goes on with nothing may be the first turn of a conversation or may never come back. While at least half
of those before it came back, it is taken for a first turn.

Pure. Everything here belongs to one thread, the scheduler's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

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
    """ends: the last blocks of its newest prompt."""

    name: bytes
    ends: Sequence[bytes] = ()
    came_back: bool = False


class Conversations:
    """The conversations of one engine. ends_max: how many ends of prompts are remembered."""

    def __init__(self, ends_max: int = ENDS_MAX) -> None:
        self._ends_max = ends_max
        self._ends: OrderedDict[bytes, _Conversation | None] = OrderedDict()  # None: several prompts went on from it
        self._first_turns = 0
        self._came_back = 0

    def session_of(self, blocks: Sequence[bytes]) -> SessionHint | None:
        """The conversation that a new request belongs to; None if it is not expected to have another turn.

        Args:
            blocks: hashes of the prompt's full blocks, in order, each of which covers all before it.
        """
        if not blocks:
            return None
        conversation = self._continued(blocks)
        if conversation is None:
            conversation = _Conversation(_NAME_MARK + blocks[-1])
            self._count_first_turn()
        elif not conversation.came_back:
            conversation.came_back = True
            self._came_back += 1
        conversation.ends = blocks[-_ENDS_OF_PROMPT:]
        for block in conversation.ends:
            self._remember(block, conversation)
        expected = conversation.came_back or 2 * self._came_back >= self._first_turns
        return SessionHint(conversation.name) if expected else None

    def _continued(self, blocks: Sequence[bytes]) -> _Conversation | None:
        """The conversation that these blocks go on with."""
        near = blocks[-NEW_BLOCKS_MAX:]
        if self._ends.keys().isdisjoint(near):  # most first turns, without a loop
            return None
        block = next(block for block in reversed(near) if block in self._ends)
        conversation = self._ends[block]
        if conversation is not None and block not in conversation.ends:
            conversation = self._ends[block] = None
        return conversation

    def _remember(self, block: bytes, conversation: _Conversation) -> None:
        if self._ends.setdefault(block, conversation) is not None:
            self._ends[block] = conversation
        self._ends.move_to_end(block)
        if len(self._ends) > self._ends_max:
            self._ends.popitem(last=False)

    def _count_first_turn(self) -> None:
        self._first_turns += 1
        if self._first_turns >= _FIRST_TURNS_COUNTED:
            self._first_turns //= 2
            self._came_back //= 2
