"""Tells the tiers which chunks a request uses: once when the request begins, and once when it ends."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from spillway_connector.engine.manager.tiering import TieringManager
from spillway_connector.engine.requests.state import RequestFields
from spillway_connector.engine.requests.tenancy import is_awaited, session_of_context

logger = logging.getLogger(__name__)


class ChunkUses:
    """The requests of one engine. chunk_tokens: by KV group. Scheduler thread."""

    def __init__(self, manager: TieringManager, chunk_tokens: Sequence[int]) -> None:
        self._manager = manager
        self._chunk_tokens = chunk_tokens

    def begin(self, status: RequestFields) -> None:
        """The request is looked up for the first time."""
        status.counted_keys = [len(state.offload_keys) for state in status.group_states]
        for state in status.group_states:
            self._manager.count_request(state.offload_keys)
        self._use(status)
        if (answers := self._manager.answers) is not None:
            answers.requested(status.group_states[0].offload_keys, _session_name(status))

    def end(self, status: RequestFields, *, prompt_only: bool) -> None:
        """The request has ended. prompt_only: nothing of its answer is stored."""
        has_grown = False
        for state, counted in zip(status.group_states, status.counted_keys or (), strict=False):
            if len(state.offload_keys) > counted:
                has_grown = True
                # A full shared tier admits what was asked for twice; that an answer's chunks were computed counts once.
                if not prompt_only:
                    self._manager.count_request(state.offload_keys[counted:])
        if has_grown or is_awaited(status.req_context):
            self._use(status)
        keys, prompt = status.group_states[0].offload_keys, status.req.num_prompt_tokens // self._chunk_tokens[0]
        if (answers := self._manager.answers) is not None and len(keys) > prompt:
            answers.answered(keys[prompt], _session_name(status))

    def prompt_only(self, now: bool) -> bool:
        """Whether only the KV of prompts is stored from now on. now: whether it is so until now, as without `auto`."""
        answers = self._manager.answers
        if answers is None or answers.keeps is not now:
            return now
        logger.info(
            "generated_tokens: auto: %.0f %% of %d answers are sent back as they were, so the KV of answers is %s",
            100 * (answers.sent_back_share or 0.0),
            answers.counted,
            "kept" if answers.keeps else "not kept",
        )
        return not now

    def _use(self, status: RequestFields) -> None:
        """Apply the request's session and retention hints to its chunks, from now on."""
        for chunk_tokens, state in zip(self._chunk_tokens, status.group_states, strict=True):
            self._manager.use_chunks(state.offload_keys, status.req.num_prompt_tokens, chunk_tokens, status.req_context)


def _session_name(status: RequestFields) -> tuple[bytes, bytes] | None:
    named = session_of_context(status.req_context)
    return None if named is None else (named[0], named[1].session)
