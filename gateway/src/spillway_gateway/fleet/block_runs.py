"""Holders of the blocks of a prompt, a run of blocks at a time.

A prompt of 50,000 tokens has 3,125 blocks of 16, and a turn of a conversation repeats nearly all blocks of the turn
before it. So the holders of RUN_BLOCKS consecutive blocks are read once and kept until one of these blocks changes. The
rest of a prompt, which is most of a short one, has runs of SHORT_RUN_BLOCKS, and no more than one of them is not full.
A run is found by its last block: keys are chained, so that block's key names the whole run. A block that lies in
several runs of one length, because prompts part within a run, counts for the one that was read last. On the event loop
only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf

from spillway_gateway.fleet.block_table import BlockRun, BlockTable, Entry, Shard, Span
from spillway_gateway.fleet.expected_blocks import Expected
from spillway_gateway.routing.prefix import RUN_BLOCKS

SHORT_RUN_BLOCKS = RUN_BLOCKS // 4
# A run moves to the end of the order of use once a quarter of the table is newer than its last use.
USED_AGAIN_SHARE = 4
EXTENDED_SHARE = 8  # what counts until some time counts for longer once an eighth of its time has passed


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
    for run_keys in _runs_of(keys):
        last = _last_of_run(shards, shard_mask, run_keys)
        run = _known_run(last, run_keys)
        routed = expected if expected and not expected.keys().isdisjoint(run_keys) else {}
        if run is not None and run.until > now and not routed:
            yield from run.spans
            continue
        blocks, spans = _read(shards, shard_mask, run_keys, routed, now)
        if last is not None and not routed and blocks == len(run_keys):
            entries = [shards[key & shard_mask][key] for key in run_keys]
            _keep(run or BlockRun(), entries, tuple(spans), now)
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
        if entry is not None:
            its = its_mask = entry.mask
            if entry.speculative_until > now:
                its |= entry.speculative_mask
        elif key in expected:
            its = its_mask = 0
        else:
            break
        if expected:
            routed = expected.get(key)
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


def _runs_of(keys: Sequence[int]) -> list[Sequence[int]]:
    """Cut a prompt's keys into runs; the last one may be shorter than any run."""
    count = len(keys)
    if count < SHORT_RUN_BLOCKS:
        return [keys] if count else []
    long = count - count % RUN_BLOCKS
    runs = [keys[start : start + RUN_BLOCKS] for start in range(0, long, RUN_BLOCKS)]
    runs += [keys[start : start + SHORT_RUN_BLOCKS] for start in range(long, count, SHORT_RUN_BLOCKS)]
    return runs


def _last_of_run(shards: Sequence[Shard], shard_mask: int, run_keys: Sequence[int]) -> Entry | None:
    whole = len(run_keys) in (RUN_BLOCKS, SHORT_RUN_BLOCKS)
    return shards[run_keys[-1] & shard_mask].get(run_keys[-1]) if whole else None


def _known_run(last: Entry | None, run_keys: Sequence[int]) -> BlockRun | None:
    if last is None:
        return None
    return last.run if len(run_keys) == RUN_BLOCKS else last.short_run


def _keep(run: BlockRun, entries: Sequence[Entry], spans: tuple[Span, ...], now: float) -> None:
    """Remember what was read. A run in which one of the blocks counted until now has to be read again."""
    if len(entries) == RUN_BLOCKS:
        for entry in entries:
            if entry.run is not run:
                if entry.run is not None:
                    entry.run.until = 0.0
                entry.run = run
    else:
        for entry in entries:
            if entry.short_run is not run:
                if entry.short_run is not None:
                    entry.short_run.until = 0.0
                entry.short_run = run
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
    for run_keys in _runs_of(keys):
        run = _known_run(_last_of_run(shards, shard_mask, run_keys), run_keys)
        if run is not None:
            recent = run.used_at is not None and table.added - run.used_at < table.entries // USED_AGAIN_SHARE
            if recent and (least is None or _counts_until(run, device, least)):
                continue
            run.used_at = table.added
        if until is None or least is None:
            for key in run_keys:
                shard = shards[key & shard_mask]
                if key in shard:
                    shard.move_to_end(key)
            continue
        added = table.added
        for key in run_keys:
            shard = shards[key & shard_mask]
            entry = shard.get(key)
            if entry is None:
                shard[key] = Entry(0, device, until)
                added += 1
                continue
            shard.move_to_end(key)
            if entry.speculative_until < least or not entry.speculative_mask & device:
                entry.speculate(device, until, now)
        table.entries += added - table.added
        table.added = added


def _counts_until(run: BlockRun, device: int, until: float) -> bool:
    return run.until >= until and all([span.device & device for span in run.spans])
