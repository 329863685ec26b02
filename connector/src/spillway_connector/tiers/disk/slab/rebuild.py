"""Rebuilding an index from the frames' headers, when the index file is lost, damaged or of an older version.

The header table has them side by side (headers.py); if it is lost as well, they are read from the slots.

Headers are not verified here; each frame is verified in full when it is loaded, like any other.
"""

from __future__ import annotations

import os
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spillway_connector.namespace import FORMAT_VERSION
from spillway_connector.own_files import open_own
from spillway_connector.tiers.disk.frame_places import last_header_at
from spillway_connector.tiers.disk.slab.chunks import chunks_on_disk
from spillway_connector.tiers.disk.slab.fingerprint import U64, fingerprints_of_padded
from spillway_connector.tiers.disk.slab.headers import HeaderTable
from spillway_connector.tiers.disk.slab.index import SlabIndex
from spillway_connector.tiers.disk.slab.layout import SIZE_CLASS_DEPTH, SizeClassShape, chunk_name
from spillway_connector.tiers.frame import HEADER_BYTES, KEY_BYTES_MAX, MAGIC, PAGE_BYTES

_THREADS = 2
_AHEAD = 512  # pages read ahead per thread
_START = struct.pack("<8sH", MAGIC, FORMAT_VERSION)
_FIELDS = np.dtype(
    {
        "names": ["start", "header_bytes", "namespace", "key", "key_bytes", "payload_bytes", "created_ms", "tenant"],
        "formats": ["S10", "<u2", "(2,)<u8", "(64,)u1", "<u2", "<u8", "<u8", "<u8"],
        "offsets": [0, 10, 16, 32, 96, 104, 128, 152],
        "itemsize": HEADER_BYTES,
    }
)


def plan_from_chunks(slot_bytes: int, chunks: dict[int, tuple[int, int]], wanted: SizeClassShape) -> SizeClassShape:
    """The shape that fits the files that are there, and at least as many chunks as ``wanted``.

    chunks: epoch and size by number. Chunks of one size class have one size; a truncated one is smaller than the rest.
    """
    largest = max((size // slot_bytes for _, size in chunks.values()), default=0)
    if not largest:
        return wanted
    wanted_chunks = wanted.slots * slot_bytes // (largest * slot_bytes)
    return SizeClassShape(slot_bytes, largest, max(wanted_chunks, max(chunks) + 1))


def rebuild(folder: Path, shape: SizeClassShape, now_s: int) -> SlabIndex:
    """A new index in ``folder`` of all frames in its chunks; if two hold one key, the younger counts.

    now_s: of the clock of ages; no entry becomes younger. The index does not have its name yet, its header table does.
    Raises OSError.
    """
    index = SlabIndex.create(folder, shape)
    table = HeaderTable(folder, shape)
    listed = table.exists()
    if listed:
        table.grow(shape)
    else:
        table.create()
    found = [_Found.none()]
    for chunk, (epoch, _) in sorted(chunks_on_disk(folder).items()):
        if chunk >= shape.chunks:
            continue
        index.put("chunk_epoch", chunk, epoch)
        headers = table.read_chunk(chunk) if listed else _headers(folder / chunk_name(chunk, epoch), shape)
        if not listed:
            table.write_chunk(chunk, headers)
        found.append(_found(headers, chunk * shape.slots_per_chunk, shape.slot_bytes))
    if not listed:
        table.publish_file()
    everything = _Found(*(np.concatenate(column) for column in zip(*found, strict=True)))
    by_age = np.argsort(everything.created_ms, kind="stable")
    if len(by_age):
        seconds = (everything.created_ms[by_age] // 1000).clip(0, now_s).astype(np.uint32)
        index.fill(
            everything.slots[by_age],
            everything.keys[by_age],
            everything.namespaces[by_age],
            everything.tenants[by_age],
            seconds,
        )
    return index


class _Found(NamedTuple):
    """One element per frame; ``keys`` (n, 2) are fingerprints."""

    slots: npt.NDArray[np.int64]
    keys: U64
    namespaces: U64
    tenants: U64
    created_ms: U64

    @classmethod
    def none(cls) -> _Found:
        empty = np.empty(0, np.uint64)
        return cls(np.empty(0, np.int64), np.empty((0, 2), np.uint64), empty, empty, empty)


def _found(headers: npt.NDArray[np.uint8], first_slot: int, slot_bytes: int) -> _Found:
    """The plausible frames among the headers of consecutive slots, (slots, 192)."""
    fields = np.ascontiguousarray(headers).view(_FIELDS).reshape(-1)
    plausible = np.flatnonzero(
        (fields["start"] == _START)
        & (fields["key_bytes"] > 0)
        & (fields["key_bytes"] <= KEY_BYTES_MAX)
        & np.isin(fields["header_bytes"], (HEADER_BYTES, PAGE_BYTES))
        & (fields["payload_bytes"] + fields["header_bytes"] <= slot_bytes)
    )
    namespaces = fields["namespace"][plausible]
    keys = fingerprints_of_padded(fields["key"][plausible], fields["key_bytes"][plausible], namespaces)
    return _Found(
        plausible + first_slot, keys, namespaces[:, 0], fields["tenant"][plausible], fields["created_ms"][plausible]
    )


def _headers(path: Path, shape: SizeClassShape) -> npt.NDArray[np.uint8]:
    """The first 192 bytes of every slot of a chunk, or the last if no header begins the slot, (slots, 192), zeros after
    the end of the file.

    The kernel is advised well ahead which pages will be read, so the disk serves many at once while two threads collect
    them; more threads would only contend for the GIL.
    """
    raw = np.zeros((shape.slots_per_chunk, HEADER_BYTES), np.uint8)
    descriptor = open_own(path, os.O_RDONLY, SIZE_CLASS_DEPTH)
    step = shape.slot_bytes

    last_at = last_header_at(step)

    def read(first: int, last: int) -> None:
        preadv, magic = os.preadv, bytes(MAGIC)
        rows = list(raw[first:last])
        for slot in range(first, min(first + _AHEAD, last)):
            read_ahead(slot)
        for slot, row in enumerate(rows, first):
            if slot + _AHEAD < last:
                read_ahead(slot + _AHEAD)
            preadv(descriptor, [row], slot * step)
            if row[: len(magic)].tobytes() != magic:
                row[:] = 0
                preadv(descriptor, [row], slot * step + last_at)

    def read_ahead(slot: int) -> None:
        for at in (slot * step, slot * step + last_at):
            os.posix_fadvise(descriptor, at, HEADER_BYTES, os.POSIX_FADV_WILLNEED)

    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead into payloads
        bounds = np.linspace(0, shape.slots_per_chunk, _THREADS + 1).astype(int).tolist()
        with ThreadPoolExecutor(_THREADS) as threads:
            list(threads.map(read, bounds[:-1], bounds[1:]))
    finally:
        os.close(descriptor)
    return raw
