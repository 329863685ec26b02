"""An index from nothing but the slots: reads every frame header when the index file is lost, damaged or too old.

Headers are only taken at their word here; each frame is verified in full when it is loaded, like any other.
"""

from __future__ import annotations

import os
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from spillway_connector.tiers.frame import FORMAT_VERSION, HEADER_BYTES, KEY_BYTES_MAX, MAGIC, PAGE_BYTES
from spillway_connector.tiers.slab_chunks import chunks_on_disk
from spillway_connector.tiers.slab_fingerprint import fingerprints_of_padded
from spillway_connector.tiers.slab_index import SlabIndex
from spillway_connector.tiers.slab_layout import PoolShape, chunk_name

_THREADS = 16  # scattered reads of a page each: the more wait at once, the better
_START = struct.pack("<8sHH", MAGIC, FORMAT_VERSION, PAGE_BYTES)
_FIELDS = np.dtype(
    {
        "names": ["start", "namespace", "key", "key_bytes", "payload_bytes", "created_ms"],
        "formats": ["S12", "(2,)<u8", "(64,)u1", "<u2", "<u8", "<u8"],
        "offsets": [0, 16, 32, 96, 104, 128],
        "itemsize": HEADER_BYTES,
    }
)


def plan_from_chunks(slot_bytes: int, chunks: dict[int, tuple[int, int]], wanted: PoolShape) -> PoolShape:
    """The shape that fits the files that are there, and at least as many chunks as ``wanted``.

    chunks: epoch and size by number. Chunks of one pool have one size; a truncated one is smaller than the rest.
    """
    largest = max((size // slot_bytes for _, size in chunks.values()), default=0)
    if not largest:
        return wanted
    wanted_chunks = wanted.slots * slot_bytes // (largest * slot_bytes)
    return PoolShape(slot_bytes, largest, max(wanted_chunks, max(chunks) + 1))


def rebuild(folder: Path, shape: PoolShape) -> SlabIndex:
    """A new index in ``folder`` of all frames in its chunks; where two hold one key the younger counts.

    Not yet under its name. Raises OSError.
    """
    index = SlabIndex.create(folder, shape)
    headers, slots = [], []
    for chunk, (epoch, _) in sorted(chunks_on_disk(folder).items()):
        if chunk >= shape.chunks:
            continue
        index.put("chunk_epoch", chunk, epoch)
        found = _headers(folder / chunk_name(chunk, epoch), shape)
        plausible = np.flatnonzero(
            (found["start"] == _START)
            & (found["key_bytes"] > 0)
            & (found["key_bytes"] <= KEY_BYTES_MAX)
            & (found["payload_bytes"] + PAGE_BYTES <= shape.slot_bytes)
        )
        headers.append(found[plausible])
        slots.append(plausible + chunk * shape.slots_per_chunk)
    if not headers:
        return index
    header, slot = np.concatenate(headers), np.concatenate(slots)
    by_age = np.argsort(header["created_ms"], kind="stable")
    header, slot = header[by_age], slot[by_age]
    keys = fingerprints_of_padded(header["key"], header["key_bytes"], header["namespace"])
    seconds = (header["created_ms"] // 1000).clip(0, (1 << 32) - 1).astype(np.uint32)
    index.fill(slot, keys, header["namespace"][:, 0], seconds)
    return index


def _headers(path: Path, shape: PoolShape) -> npt.NDArray[np.void]:
    """The first 192 bytes of every slot of a chunk, zeros where the file has ended."""
    raw = np.zeros((shape.slots_per_chunk, HEADER_BYTES), np.uint8)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(first: int) -> None:
        for slot in range(first, shape.slots_per_chunk, _THREADS):
            os.preadv(descriptor, [raw[slot]], slot * shape.slot_bytes)

    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead into payloads
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(read, range(_THREADS)))
    finally:
        os.close(descriptor)
    return raw.view(_FIELDS).reshape(-1)
