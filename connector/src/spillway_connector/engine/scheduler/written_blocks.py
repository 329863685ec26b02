"""Device blocks that a step writes to, and the number that the next one may take.

A store that still reads a block must end before a step writes to that block, and only then.
vLLM takes all blocks of a request that is new in a step for newly allocated ones, those of a hit in the device's
prefix cache included. A request whose prefix was computed just before would wait until all of it has been copied to the
CPU tier, before its own forward pass, which only reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from vllm.v1.core.sched.output import SchedulerOutput

from spillway_connector.engine.requests.state import RequestFields


def written_blocks(output: SchedulerOutput, group: int, block_tokens: int) -> set[int]:
    """Ids of the blocks of one KV group of full attention that this step's forward pass fills, or copies to.

    block_tokens: of a device block of that group. `output` names all blocks of a new or resumed request. The step does
    not write the blocks before its computed tokens: they were found in the device's cache, or a load of an earlier step
    filled them.
    """
    written: set[int] = set()
    for new in output.scheduled_new_reqs:
        written.update(_behind(new.block_ids[group], new.num_computed_tokens, block_tokens))
    cached = output.scheduled_cached_reqs
    for position, request_id in enumerate(cached.req_ids):
        blocks = cached.new_block_ids[position]
        if blocks is None:
            continue
        computed = cached.num_computed_tokens[position] if request_id in cached.resumed_req_ids else 0
        written.update(_behind(blocks[group], computed, block_tokens))
    for copy in getattr(output, "kv_cache_block_copies", None) or ():
        written.add(copy.dst_block_id)
    return written


def next_step_blocks(
    output: SchedulerOutput, state_of: Callable[[str], RequestFields | None], step_tokens: int, block_tokens: int
) -> int:
    """Count the device blocks that the requests of this step may take in the next one: one each, and what their prompts
    still lack, up to a step's tokens. Called before vLLM counts the tokens of this step as computed."""
    lacking = 0
    for request_id, tokens in output.num_scheduled_tokens.items():
        if tokens > 1 and (state := state_of(request_id)) is not None:
            lacking += max(0, state.req.num_tokens - state.req.num_computed_tokens - tokens)
    return len(output.num_scheduled_tokens) + min(lacking, step_tokens) // block_tokens


def _behind(blocks: Sequence[int], computed_tokens: int, block_tokens: int) -> Iterable[int]:
    return blocks[computed_tokens // block_tokens :]
