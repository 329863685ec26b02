"""The Triton kernel of staged copies. A module of its own because it imports Triton: kernel.py imports it late."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["table"])  # type: ignore[untyped-decorator]
def move_spans(table, PART_WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program (p, q) moves part q of piece p. table: address of rows (source, target, bytes), int64 each."""
    row = table.to(tl.pointer_type(tl.int64)) + tl.program_id(0).to(tl.int64) * 3
    source = tl.load(row).to(tl.pointer_type(tl.int64))
    target = tl.load(row + 1).to(tl.pointer_type(tl.int64))
    words = tl.load(row + 2) // 8
    at = tl.program_id(1).to(tl.int64) * PART_WORDS + tl.arange(0, PART_WORDS)
    inside = at < words
    tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)
