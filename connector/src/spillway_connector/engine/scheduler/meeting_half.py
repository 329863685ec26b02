"""The scheduler half of an engine whose prompts may be computed and loaded at the same time."""

from __future__ import annotations

from typing import Any

from typing_extensions import override
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.request import Request

from spillway_connector.engine.features.meetings import Meetings, SchedulerControl
from spillway_connector.engine.scheduler.half import SchedulerHalf


class MeetingSchedulerHalf(SchedulerHalf):
    """SchedulerHalf that tells the meetings what becomes of each request. Without them, SchedulerHalf."""

    meetings: Meetings | None = None

    def begin_meetings(self, control: SchedulerControl) -> None:
        """From now on prompts may be computed and loaded at the same time, if vLLM asks `meetings` before each step."""
        if self._one_prefix and self._being_loaded is not None:  # else there is no hit behind a preemption
            self.meetings = Meetings(self.manager, control, self._prefill_timer, self._chunk_tokens)

    @override
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int, max_num_new_tokens: int | None = None
    ) -> tuple[int | None, bool]:
        meetings = self.meetings
        if meetings is None or request.skip_reading_prefix_cache or request.request_id in self._recompute_only:
            return super().get_num_new_matched_tokens(request, num_computed_tokens, max_num_new_tokens)
        meetings.consider(request)
        tokens, later = super().get_num_new_matched_tokens(request, num_computed_tokens, max_num_new_tokens)
        if tokens is not None:
            status = self._req_status[request.request_id]
            (state,) = status.group_states
            keys = state.offload_keys[: request.num_tokens // self._chunk_tokens]
            if meetings.keeps_waiting(request, status.req_context, keys, num_computed_tokens + tokens):
                return None, False
        return tokens, later

    @override
    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if self.meetings is not None:
            self.meetings.admitted(request.request_id, num_external_tokens)

    @override
    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        if self.meetings is not None:
            self.meetings.finished(request.request_id)
        return super().request_finished(request)

    @override
    def reset_cache(self) -> None:
        super().reset_cache()
        if self.meetings is not None:
            self.meetings.end_all()
