"""The planner against a byte-by-byte model of what a job must move."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spillway_connector.errors import PlanError
from spillway_connector.plan.copies import CopyLayout, CopyPlan, Segment, join_plans, plan_copies


@st.composite
def jobs(draw: st.DrawFn):
    """A layout of a few groups with padded pages, and a job on it: everything small enough to check byte by byte."""
    per_chunk = draw(st.integers(1, 4))
    num_blocks, num_rows = 40, 32  # three groups of nine blocks, each block a chunk of its own
    groups, device_cursor, row_cursor = [], 0, draw(st.integers(0, 64))
    for _ in range(draw(st.integers(1, 3))):
        segments = []
        for _ in range(draw(st.integers(1, 3))):
            copy_bytes = draw(st.integers(1, 24))
            stride = copy_bytes + draw(st.sampled_from([0, 0, 3, 8]))
            segments.append(Segment(device_cursor, stride, row_cursor, copy_bytes, copy_bytes))
            device_cursor += stride * num_blocks
            row_cursor += copy_bytes * per_chunk
        groups.append(tuple(segments))
    row_bytes = row_cursor + draw(st.integers(0, 16))
    layout = CopyLayout(tuple(groups), 0, row_bytes, per_chunk)
    sizes = [draw(st.integers(0, 9)) for _ in groups]
    firsts = [draw(st.integers(0, 11)) for _ in groups]
    blocks = [draw(st.permutations(range(num_blocks)))[:size] for size in sizes]
    chunks = [-(-(size + first % per_chunk) // per_chunk) if size else 0 for size, first in zip(sizes, firsts)]
    rows = draw(st.permutations(range(num_rows)))[: sum(chunks)]
    return layout, blocks, sizes, firsts, chunks, rows, device_cursor, num_rows


def expected_moves(layout, blocks, firsts, chunks, rows) -> set[tuple[int, int]]:
    """(device byte, host byte) pairs, one byte at a time."""
    moves, row_start = set(), 0
    for segments, group_blocks, first, group_chunks in zip(layout.groups, blocks, firsts, chunks):
        group_rows = rows[row_start : row_start + group_chunks]
        row_start += group_chunks
        for position, block in enumerate(group_blocks, start=first % layout.blocks_per_chunk):
            chunk, place = divmod(position, layout.blocks_per_chunk)
            for segment in segments:
                for byte in range(segment.copy_bytes):
                    moves.add(
                        (
                            segment.device_base + block * segment.device_stride_bytes + byte,
                            group_rows[chunk] * layout.row_bytes
                            + segment.host_offset_bytes
                            + place * segment.host_stride_bytes
                            + byte,
                        )
                    )
    return moves


def moved_bytes(plan: CopyPlan) -> list[tuple[int, int]]:
    return [
        (device + byte, host + byte)
        for device, host, size in zip(plan.device_addresses, plan.host_addresses, plan.sizes_bytes)
        for byte in range(size)
    ]


def plan_of(layout, blocks, sizes, firsts, rows) -> CopyPlan:
    flat = np.array([block for group in blocks for block in group], dtype=np.int64)
    return plan_copies(layout, flat, sizes, firsts, np.array(rows, dtype=np.int64))


@settings(max_examples=3 * settings.default.max_examples)
@given(jobs())
def test_every_byte_moves_once_and_to_its_place(job):
    layout, blocks, sizes, firsts, chunks, rows, _, _ = job
    moved = moved_bytes(plan_of(layout, blocks, sizes, firsts, rows))
    assert len(moved) == len(set(moved))
    assert set(moved) == expected_moves(layout, blocks, firsts, chunks, rows)


@given(jobs(), st.integers(1, 5))
def test_batches_are_bounded_and_lose_nothing(job, max_descriptors):
    layout, blocks, sizes, firsts, _, rows, _, _ = job
    plan = plan_of(layout, blocks, sizes, firsts, rows)
    batches = list(plan.batches(max_descriptors))
    assert all(0 < len(batch) <= max_descriptors for batch in batches)
    assert [move for batch in batches for move in moved_bytes(batch)] == moved_bytes(plan)


def test_neighbours_become_one_descriptor():
    """One tensor whose page fills the row: ascending blocks into ascending rows are a single copy."""
    layout = CopyLayout(((Segment(1000, 64, 0, 64, 64),),), 5000, 64, 1)
    plan = plan_of(layout, [[3, 4, 5, 9]], [4], [0], [0, 1, 2, 3])
    assert plan.device_addresses.tolist() == [1000 + 3 * 64, 1000 + 9 * 64]
    assert plan.host_addresses.tolist() == [5000, 5000 + 3 * 64]
    assert plan.sizes_bytes.tolist() == [192, 64]
    assert plan.total_bytes == 256


def test_padded_pages_are_not_merged():
    layout = CopyLayout(((Segment(0, 80, 0, 64, 64),),), 0, 64, 1)
    assert plan_of(layout, [[0, 1]], [2], [0], [0, 1]).sizes_bytes.tolist() == [64, 64]


@pytest.mark.parametrize(
    ("sizes", "firsts", "rows", "message"),
    [
        ([2], [0], [0, 1], "cache groups"),
        ([1, 0], [0, 0], [0], "device blocks"),
        ([2, 0], [1, 0], [0], "touch 2 chunks"),
        ([2, 0], [0, 0], [0, 1], "rows are given"),
    ],
)
def test_counts_that_do_not_agree_are_refused(sizes, firsts, rows, message):
    segment = Segment(0, 8, 0, 8, 8)
    layout = CopyLayout(((segment,), (segment,)), 0, 16, 2)
    with pytest.raises(PlanError, match=message):
        plan_of(layout, [[0, 1]], sizes, firsts, rows)


def test_an_empty_job_is_an_empty_plan():
    plan = plan_of(CopyLayout(((Segment(0, 8, 0, 8, 8),),), 0, 8, 1), [[]], [0], [0], [])
    assert len(plan) == 0
    assert list(plan.batches(10)) == []


@given(
    st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.integers(1, 5000)), max_size=12),
    st.integers(1, 9),
)
def test_shares_hold_every_byte_once_and_none_is_much_larger(spans, parts):
    device, host, sizes = (np.array([span[at] for span in spans], np.int64) for at in range(3))
    plan = CopyPlan(device, host, sizes)
    shares = [plan.share(part, parts) for part in range(parts)]

    def moved(one: CopyPlan) -> list[tuple[int, int]]:
        spans = zip(one.device_addresses.tolist(), one.host_addresses.tolist(), one.sizes_bytes.tolist(), strict=True)
        return [(to + byte, origin + byte) for to, origin, size in spans for byte in range(size)]

    assert [pair for share in shares for pair in moved(share)] == moved(plan)
    assert all((share.sizes_bytes > 0).all() for share in shares)
    assert max(share.total_bytes for share in shares) <= plan.total_bytes / parts + 1024


def test_shares_do_not_depend_on_how_each_process_allocated():
    """Neighbours on one device may lie apart on another one: the plans differ, and the bytes of a share do not."""
    sizes = [1024, 2048, 512]
    together = CopyPlan(np.array([0]), np.array([0]), np.array([sum(sizes)]))
    apart = CopyPlan(np.array([0, 9000, 20000]), np.array([0, 1024, 3072]), np.array(sizes))

    for part in range(2):
        ends = [
            (int(plan.host_addresses[0]), int(plan.host_addresses[-1] + plan.sizes_bytes[-1]))
            for plan in (together.share(part, 2), apart.share(part, 2))
        ]
        assert ends[0] == ends[1]


def test_joined_plans_are_their_spans_one_after_another():
    plans = [
        CopyPlan(*(np.array(ends, np.int64) for ends in plan)) for plan in (([1, 9], [5, 7], [2, 3]), ([4], [0], [6]))
    ]
    whole = join_plans(plans)
    assert [whole.device_addresses.tolist(), whole.host_addresses.tolist()] == [[1, 9, 4], [5, 7, 0]]
    assert (whole.sizes_bytes.tolist(), whole.total_bytes) == ([2, 3, 6], 11)
    assert join_plans(plans[:1]) is plans[0]
