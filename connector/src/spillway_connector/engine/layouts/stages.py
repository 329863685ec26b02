"""Facts on which the processes of a replica must agree before a row has a shape.

Each process knows the layers of one stage of a pipeline only: a worker knows its own stage's, the scheduler's process
the first stage's. Stages differ (61 layers are 31 and 30, a drafter lies on the last one), and a row is cut the same
way in all of them. So the workers compare notes when their specs are built, which they do together, and rank 0 writes
the result into the rows for the scheduler's process, beside the description of its KV caches (kv_layout.py). It does so
without a pipeline too, as only workers may know how large a block is (packed_blocks.py), and whether all ranks hold the
same KV.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed import parallel_state

from spillway_connector.device.host_region import REGION_DEPTH
from spillway_connector.engine.layouts.kv_layout import LAYOUT_AT_MOST_BYTES, read_layouts
from spillway_connector.engine.layouts.packed_blocks import NOT_KNOWN_HERE
from spillway_connector.errors import ConfigError
from spillway_connector.own_files import open_own

_FACTS = ("rank_block_bytes", "ranks_hold_the_same")


@dataclass(frozen=True, slots=True)
class StageFacts:
    """ranks_hold_the_same: Whether all ranks of a stage hold the same KV, byte for byte."""

    rank_block_bytes: int  # of a device block of one rank; NOT_KNOWN_HERE
    ranks_hold_the_same: bool

    def as_layout(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _FACTS}


def agree(own: StageFacts, num_stages: int, rows: Path) -> StageFacts:
    """The same answer in every process of a replica. rows: the CPU tier's file, which the workers have made.

    Collective among the workers: each must call it. Raises ConfigError in the scheduler's process if the workers
    have left nothing.
    """
    is_known = own.rank_block_bytes != NOT_KNOWN_HERE
    # A worker may be in the scheduler's process.
    is_worker = is_known and parallel_state.model_parallel_is_initialized()  # type: ignore[no-untyped-call]
    # The scheduler's process has the spec of one layer of a group. Others, as a drafter's beside MLA, may have heads of
    # their own on each rank.
    if num_stages == 1 and is_known and (is_worker or not own.ranks_hold_the_same):
        return own
    if is_worker:
        return joined(_of_all_stages(own, num_stages))
    return _written_by_workers(rows)


def without_agreed(layout: Mapping[str, Any]) -> dict[str, Any]:
    """A rank's description of its KV caches alone."""
    return {name: value for name, value in layout.items() if name not in _FACTS}


def joined(stages: list[StageFacts]) -> StageFacts:
    return StageFacts(
        max(stage.rank_block_bytes for stage in stages), all(stage.ranks_hold_the_same for stage in stages)
    )


def _of_all_stages(own: StageFacts, num_stages: int) -> list[StageFacts]:
    """Numbers alone: what a process of another stage sends is not unpickled."""
    found = [torch.zeros(2, dtype=torch.int64) for _ in range(num_stages)]
    given = torch.tensor([own.rank_block_bytes, own.ranks_hold_the_same], dtype=torch.int64)
    torch.distributed.all_gather(found, given, group=parallel_state.get_pp_group().cpu_group)
    return [StageFacts(int(one[0]), bool(one[1])) for one in found]


def _written_by_workers(rows: Path) -> StageFacts:
    try:
        descriptor = open_own(rows, os.O_RDONLY, REGION_DEPTH)
    except OSError as error:
        raise ConfigError(
            f"{rows} cannot be read ({error.strerror}), where the workers leave how large their KV blocks are; "
            "a replica must run on one machine"
        ) from error
    try:
        head = os.pread(descriptor, LAYOUT_AT_MOST_BYTES, 0)
    finally:
        os.close(descriptor)
    (layout,) = read_layouts(memoryview(head), len(head), 1)
    return StageFacts(*(layout[name] for name in _FACTS))
