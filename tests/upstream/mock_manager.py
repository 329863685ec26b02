"""vLLM's mocked offloading manager, made to answer what Spillway's scheduler half asks a manager.

vLLM's tests of the scheduler half set what a mock's `lookup` of one chunk returns. Spillway asks for whole prefixes;
here such a question becomes those lookups, and no answer is kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace
from typing import Any

from spillway_connector.plan.load_cost import RateMeter
from spillway_connector.plan.prefix_memo import ChangeLog, PrefixAnswer, PrefixMemo, Step
from spillway_connector.plan.waiting import WaitingChunks


def answering_prefixes(manager: Any, hit: Any, miss: Any) -> Any:
    """The same mock. hit, miss: what its `lookup` returns for a chunk that is there, or not; anything else: pending."""
    memo: PrefixMemo[Any, None] = PrefixMemo(ChangeLog(), ChangeLog(), lambda request_id, step: None)

    def look_up(keys: Sequence[Any], context: Any) -> tuple[int | None, int]:
        found, pending = 0, False
        for key in keys:
            answer = manager.lookup(key, context)
            if answer == miss:
                break
            pending |= answer != hit
            found += 1
        return None if pending else found, found

    def find_prefix(keys: Sequence[Any], context: Any, step: Step[None]) -> PrefixAnswer[Any, None]:
        chunks, expected = look_up(keys, context)
        return memo.record(keys, chunks, -math.inf, None, step, ready=chunks or 0, expected=expected)

    manager.memo = memo
    manager.step = memo.begin_step(0.0, None)
    manager.find_prefix = find_prefix
    manager.lookup_prefix = lambda keys, context: look_up(keys, context)[0]
    manager.may_begin_load = lambda prefix: False
    manager.loads_begin_early = False
    manager.serve_half = lambda **facts: None
    manager.report_settings = lambda settings: None
    manager.ahead_rows_max = 0
    manager.prefill_rate = RateMeter(1.0)
    clock = count(0.0, 3600.0)  # an hour passes between two readings, so that chunks are touched each time
    type(manager).step_time = property(lambda self: next(clock))  # each mock has a class of its own
    manager.count_request = lambda keys: None
    manager.use_chunks = lambda keys, prompt, chunk_tokens, context: None
    manager.answers = None
    manager.fail_store = lambda keys: None
    manager.take_stats = lambda: None
    manager.take_announcements = lambda: iter(())
    manager.introduced = True
    manager.settings = dict
    manager.primary_tier = SimpleNamespace(
        ready=frozenset(),
        news=None,
        resident=frozenset(),
        rows_of=lambda keys: [],
        release=lambda rows: None,
        waiting=WaitingChunks(0, frozenset()),
        together=nullcontext,
    )
    manager.now = lambda: 0.0
    return manager
