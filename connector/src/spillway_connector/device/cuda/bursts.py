"""Plans of staged copies: pieces are gathered into one buffer on the device, which crosses the link in a few long runs.

Pure arithmetic. The bytes of a plan, in the order of their host addresses, are laid end to end and cut at every
`slot_bytes`: one slot is one burst. On the host side a burst is as many runs as the rows make it; on the device side
it is a list of pieces that a kernel gathers into the slot, or scatters from it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from spillway_connector.plan.copies import Addresses, CopyPlan

WORD_BYTES = 8  # what the kernel moves at a time: every address and size is a multiple


@dataclass(frozen=True, slots=True)
class Burst:
    """The contents of one slot. Arrays are int64; offsets are from the start of the slot."""

    device_addresses: Addresses  # of the pieces, shape (pieces,)
    piece_offsets: Addresses
    piece_bytes: Addresses
    host_addresses: Addresses  # of the runs, shape (runs,)
    run_offsets: Addresses
    run_bytes: Addresses


def fits_words(plan: CopyPlan) -> bool:
    """Whether the kernel can move the plan."""
    anything = np.bitwise_or.reduce(plan.device_addresses | plan.host_addresses | plan.sizes_bytes)
    return int(anything) % WORD_BYTES == 0


class BurstPlan:
    """The bursts of one job, computed one at a time, so that the first crosses the link during the next computation."""

    def __init__(self, plan: CopyPlan, slot_bytes: int) -> None:
        """slot_bytes: a multiple of WORD_BYTES, as everything in the plan is, which is not empty."""
        order = np.argsort(plan.host_addresses)
        device, host, sizes = plan.device_addresses[order], plan.host_addresses[order], plan.sizes_bytes[order]
        self._slot_bytes = slot_bytes
        self._device, self._host, self._sizes, self._places = _cut_at_slots(device, host, sizes, slot_bytes)

    def __len__(self) -> int:
        """Number of pieces after cutting."""
        return len(self._sizes)

    def __iter__(self) -> Iterator[Burst]:
        slots = self._places // self._slot_bytes
        edges = np.searchsorted(slots, np.arange(int(slots[-1]) + 2)).tolist()
        for begin, end in itertools.pairwise(edges):
            host, sizes = self._host[begin:end], self._sizes[begin:end]
            offsets = self._places[begin:end] % self._slot_bytes
            runs = np.flatnonzero(np.concatenate(([True], host[1:] != host[:-1] + sizes[:-1])))
            yield Burst(
                device_addresses=self._device[begin:end],
                piece_offsets=offsets,
                piece_bytes=sizes,
                host_addresses=host[runs],
                run_offsets=offsets[runs],
                run_bytes=np.add.reduceat(sizes, runs),
            )


def _cut_at_slots(
    device: Addresses, host: Addresses, sizes: Addresses, slot_bytes: int
) -> tuple[Addresses, Addresses, Addresses, Addresses]:
    """Pieces that cross the end of a slot become two or more; also their places in the line of all bytes."""
    ends = np.cumsum(sizes)
    places = ends - sizes
    parts = (ends - 1) // slot_bytes - places // slot_bytes + 1
    if int(parts.max()) == 1:
        return device, host, sizes, places
    index = np.repeat(np.arange(len(sizes)), parts)
    nth = np.arange(len(index)) - np.repeat(np.cumsum(parts) - parts, parts)
    begin = np.maximum(places[index], (places[index] // slot_bytes + nth) * slot_bytes)
    end = np.minimum(ends[index], (places[index] // slot_bytes + nth + 1) * slot_bytes)
    within = begin - places[index]
    return device[index] + within, host[index] + within, end - begin, begin


class DescriptorRing:
    """Rows of a fixed table, taken by jobs in order and given back in the same order."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._taken: list[tuple[int, int]] = []  # (first row, rows), oldest first

    def take(self, rows: int) -> int | None:
        """The first of `rows` consecutive rows; None while there is no room for them."""
        if rows > self.capacity:
            return None
        if not self._taken:
            first = 0
        else:
            oldest = self._taken[0][0]
            first = self._taken[-1][0] + self._taken[-1][1]
            wrapped = self._taken[-1][0] < oldest
            if wrapped:
                if first + rows > oldest:
                    return None
            elif first + rows > self.capacity:
                if rows > oldest:
                    return None
                first = 0
        self._taken.append((first, rows))
        return first

    def give_back(self, first: int) -> None:
        self._taken = [taken for taken in self._taken if taken[0] != first]
