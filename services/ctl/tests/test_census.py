from __future__ import annotations

import sys
from collections.abc import Iterator

from spillway_connector.tiers.inspection import Damage, StoredFrame
from spillway_ctl.census import Census, largest_first

NAMESPACE = bytes(16)


def frame(number: int, tenants: int) -> StoredFrame:
    return StoredFrame(
        NAMESPACE,
        4096,
        f"place-{number}",
        number,
        tenant=(number % tenants).to_bytes(8, "big"),
        used_s=float(number),
    )


def test_frames_are_counted_by_namespace_and_tenant() -> None:
    census = Census()
    for number in range(10):
        census.add(frame(number, 3))
    found = census.namespaces[NAMESPACE]
    assert (census.total.frames, census.total.stored_bytes) == (10, 40_960)
    assert (found.oldest_s, found.newest_s) == (0.0, 9.0)
    assert [(tenant[-1], held.frames) for tenant, held in largest_first(found.tenants)] == [(0, 4), (1, 3), (2, 3)]


def test_damaged_frames_belong_to_nobody() -> None:
    census = Census()
    census.add(StoredFrame(NAMESPACE, 10, "there", None, tenant=bytes(8), damage=Damage("magic", "spoiled")))
    found = census.namespaces[NAMESPACE]
    assert census.damage == {"magic": 1} and found.unknown_tenant.frames == 1 and not found.tenants


def test_a_million_frames_of_a_million_tenants_stay_within_bounds() -> None:
    """The memory of a walk grows with the tenants counted one by one, not with the frames."""
    tenants_max = 1000
    census = Census(tenants_max)
    blocks: list[int] = []

    def walk() -> Iterator[StoredFrame]:
        for number in range(1_000_000):
            if number % 100_000 == 50_000:
                blocks.append(sys.getallocatedblocks())
            yield frame(number, 1_000_000)

    for one in walk():
        census.add(one)
    found = census.namespaces[NAMESPACE]
    assert census.total.frames == 1_000_000
    assert (len(found.tenants), found.other_tenants.frames) == (tenants_max, 1_000_000 - tenants_max)
    assert max(blocks) - blocks[0] < 1000
