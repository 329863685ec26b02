from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from spillway_connector.testing.corruption import (
    MISSED,
    SERVED,
    STALE_INDEX,
    VANDALS,
    WRONG,
    MemoryShelf,
    Outcomes,
    PartsShelf,
    SlabShelf,
    damage_once,
    outcome_of,
    run,
    shelves,
)


def test_thousands_of_corruptions_serve_no_wrong_byte(tmp_path: Path) -> None:
    with shelves(tmp_path) as on:
        outcomes = run(on, 4000, seed=7)
        for shelf in on:  # every trial was mended: the shelf is as it was
            assert {outcome_of(shelf, block) for block in range(len(shelf.payloads))} == {SERVED}
    assert not any(outcome == WRONG for _, _, outcome in outcomes)
    tried = {(shelf, kind) for shelf, kind, _ in outcomes}
    assert tried == {(shelf.name, kind) for shelf in on for kind in VANDALS} | {
        ("slab", STALE_INDEX),
        ("page cache", STALE_INDEX),
        ("parts", "parts of two writers"),
    }
    for shelf, kind in tried:
        found = {outcome for name, what, outcome in outcomes if (name, what) == (shelf, kind)}
        assert found - {SERVED}, f"{shelf}: {kind} was never noticed"


def test_the_same_seed_does_the_same_damage(tmp_path: Path) -> None:
    runs: list[Outcomes] = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        with shelves(tmp_path / name) as on:
            runs.append(run(on, 300, seed=3))
    assert runs[0] == runs[1]
    assert set(outcome for _, _, outcome in runs[0]) >= {"key", "payload", "header", "namespace", MISSED}


def test_wrong_bytes_would_be_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The judge judges: with the checks switched off there is plenty to find."""

    def believe(header: memoryview, *_: object, **__: object) -> None:
        return None

    for module in ("memory", "disk.directory_tier"):
        monkeypatch.setattr(f"spillway_connector.tiers.{module}.verify", believe)
    outcomes: Outcomes = Counter()
    memory, slab = MemoryShelf(), SlabShelf(tmp_path)
    for kind in ("two swapped", "one misplaced", "foreign namespace"):
        for shelf in (memory, slab):
            damage_once(shelf, kind, random.Random(1), outcomes)
            assert outcomes[shelf.name, kind, WRONG] > 0
    slab.tier.close()


def test_parts_of_two_writers_are_no_block() -> None:
    shelf = PartsShelf()
    assert outcome_of(shelf, 0) == SERVED
    for frame in range(3):
        shelf.put(frame, shelf.rivals[frame])
    assert shelf.load(0) == bytes(reversed(shelf.payloads[0]))  # all of one writer: whole
    shelf.put(1, shelf.frames[1])
    assert outcome_of(shelf, 0) == "payload"


@pytest.mark.parametrize("kind", list(VANDALS))
def test_each_kind_of_damage_changes_what_it_touches(kind: str) -> None:
    shelf, lots, changed = MemoryShelf(), random.Random(5), Counter[bool]()
    for _ in range(50):
        for frame, raw in VANDALS[kind](shelf.frames, lots).items():
            changed[raw != shelf.frames[frame]] += 1
    assert changed[True] > changed[False]
