"""Which device blocks a step writes to: only for these must a store that still reads them end first.

Upstream takes all blocks of a request that is new in a step for newly allocated ones, those of a hit in the device's
prefix cache included. A request whose prefix was computed just before would wait until all of it has been copied to the
CPU tier, before its own forward pass, which only reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm.v1.core.sched.output import SchedulerOutput


def written_blocks(output: SchedulerOutput, group: int, block_tokens: int) -> set[int]:
    """Ids of the blocks of one KV group of full attention that this step's forward pass fills, or copies to.

    block_tokens: of a device block of that group. For a new or resumed request `output` names all blocks. The step does
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


def _behind(blocks: Sequence[int], computed_tokens: int, block_tokens: int) -> Iterable[int]:
    return blocks[computed_tokens // block_tokens :]
