"""Who holds the blocks of a prompt, a run of blocks at a time.

A prompt of 50,000 tokens has 3,125 blocks of 16, and a turn of a conversation repeats nearly all blocks of the turn
before it. So the holders of RUN_BLOCKS consecutive blocks are read once and kept until one of these blocks changes. A
run is found by its last block: keys are chained, so that block's key names the whole run. A block that lies in several
runs, because prompts part within a run, counts for the one that was read last. On the event loop only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf

from spillway_gateway.fleet.block_table import BlockRun, BlockTable, Entry, Shard, Span
from spillway_gateway.fleet.expected_blocks import Expected
from spillway_gateway.routing.prefix import RUN_BLOCKS

# A run moves to the end of the order of use once a quarter of the table is newer than its last use.
USED_AGAIN_SHARE = 4
EXTENDED_SHARE = 8  # what counts until some time counts for longer once an eighth of its time has passed
_NOT_HELD = Entry()


def read_spans(
    shards: Sequence[Shard], shard_mask: int, keys: Sequence[int], expected: Mapping[int, Expected], now: float
) -> Iterator[Span]:
    """Read the holders of a prompt's blocks, in order, up to the first block that is neither held nor expected.

    Args:
        shards: The table's shards.
        shard_mask: The bits of a key that choose its shard.
        keys: Request keys of the prompt's blocks.
        expected: Blocks of prompts that were routed.
        now: Monotonic seconds.
    """
    for start in range(0, len(keys), RUN_BLOCKS):
        run_keys = keys[start : start + RUN_BLOCKS]
        last = _last_of_run(shards, shard_mask, run_keys)
        routed = expected if expected and not expected.keys().isdisjoint(run_keys) else {}
        if last is not None and last.run is not None and last.run.until > now and not routed:
            yield from last.run.spans
            continue
        blocks, spans = _read(shards, shard_mask, run_keys, routed, now)
        if last is not None and not routed and blocks == RUN_BLOCKS:
            _keep(last, [shards[key & shard_mask][key] for key in run_keys], tuple(spans), now)
        yield from spans
        if blocks < len(run_keys):
            return


def _read(
    shards: Sequence[Shard], shard_mask: int, keys: Sequence[int], expected: Mapping[int, Expected], now: float
) -> tuple[int, list[Span]]:
    """Return the number of blocks up to the first one that has no entry and is not expected, and their holders: those
    that announced the blocks, and engines that are expected to have them on their device."""
    spans: list[Span] = []
    device = mask = begin = blocks = 0
    for key in keys:
        entry = shards[key & shard_mask].get(key)
        routed = expected.get(key) if expected else None
        if entry is None:
            if routed is None:
                break
            entry = _NOT_HELD
        its = its_mask = entry.mask
        if entry.speculative_mask and entry.speculative_until > now:
            its |= entry.speculative_mask
        if routed is not None and routed.until > now:
            its |= routed.mask
        if its != device or its_mask != mask:
            if blocks > begin:
                spans.append(Span(device, mask, blocks - begin))
            device, mask, begin = its, its_mask, blocks
        blocks += 1
    if blocks > begin:
        spans.append(Span(device, mask, blocks - begin))
    return blocks, spans


def _last_of_run(shards: Sequence[Shard], shard_mask: int, run_keys: Sequence[int]) -> Entry | None:
    return shards[run_keys[-1] & shard_mask].get(run_keys[-1]) if len(run_keys) == RUN_BLOCKS else None


def _keep(last: Entry, entries: Sequence[Entry], spans: tuple[Span, ...], now: float) -> None:
    run = last.run or BlockRun()
    for entry in entries:
        if entry.run is not run:
            entry.changed()  # for the run that it counted in until now
            entry.run = run
    run.spans = spans
    run.until = min([entry.speculative_until for entry in entries if entry.speculative_until > now], default=inf)


def use_runs(table: BlockTable, keys: Sequence[int], device: int, until: float | None, now: float) -> None:
    """Record that a prompt uses these blocks; the first of them begins a run. A run that was used not long ago keeps
    its place in the order of use.

    Args:
        table: Has the blocks.
        keys: Their request keys.
        device: The bit of the device that is to have them.
        until: It counts as having them until then, in monotonic seconds, or until shortly before; None: its engine's
            events say what it has.
        now: Monotonic seconds.
    """
    shards, shard_mask = table.shards, table.shard_mask
    least = None if until is None else until - (until - now) / EXTENDED_SHARE
    for start in range(0, len(keys), RUN_BLOCKS):
        run_keys = keys[start : start + RUN_BLOCKS]
        last = _last_of_run(shards, shard_mask, run_keys)
        run = last.run if last is not None else None
        if run is not None:
            recent = run.used_at is not None and table.added - run.used_at < table.entries // USED_AGAIN_SHARE
            if recent and (least is None or _counts_until(run, device, least)):
                continue
            run.used_at = table.added
        for key in run_keys:
            shard = shards[key & shard_mask]
            entry = shard.get(key)
            if entry is None:
                if until is not None:
                    table.add(shard, key, device, until)
                continue
            shard.move_to_end(key)
            if until is None or least is None:
                continue
            if not entry.speculative_mask & device or entry.speculative_until < least:
                entry.speculate(device, until, now)


def _counts_until(run: BlockRun, device: int, until: float) -> bool:
    return run.until >= until and all([span.device & device for span in run.spans])
