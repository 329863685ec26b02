"""Threads of one process share its copy of an index: none answers from one that another is bringing up to date."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from spillway_connector.tiers.disk.slab.index import SlabIndex
from spillway_connector.tiers.disk.slab.layout import SizeClassShape

KEY, SLOT = (11, 12), 0
PATIENCE_SECONDS = 30.0


@pytest.fixture
def indexes(tmp_path: Path) -> tuple[SlabIndex, SlabIndex]:
    """Indexes of two processes; the first has claimed a slot that the second has not heard of."""
    writer = SlabIndex.create(tmp_path, SizeClassShape(8192, 16, 1))
    writer.set_chunk(0, 1)
    SlabIndex.publish_file(tmp_path)
    writer.announce()
    reader = SlabIndex.open(tmp_path, writable=True)
    assert reader is not None and reader.follow()
    with writer.changing():
        writer.claim(SLOT, KEY, namespace=1, tenant=0, owner=1, now_s=5)
        writer.publish(SLOT)
    return writer, reader


def test_a_thread_waits_for_another_that_brings_the_copy_up_to_date(
    indexes: tuple[SlabIndex, SlabIndex], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, reader = indexes
    log = reader._columns._log
    assert log is not None
    begun, go_on, apply = threading.Event(), threading.Event(), log.news_apply

    def held_up(memory: Any) -> bool:
        begun.set()
        assert go_on.wait(PATIENCE_SECONDS)
        return apply(memory)

    monkeypatch.setattr(log, "news_apply", held_up)
    seen: list[tuple[bool, int]] = []
    first = threading.Thread(target=reader.follow)
    second = threading.Thread(target=lambda: seen.append((reader.follow(), reader.find_one(KEY))))
    first.start()
    assert begun.wait(PATIENCE_SECONDS)
    assert reader.follow(reload=False) is False, "the scheduler's thread does not wait, and asks again"
    second.start()
    second.join(0.05)
    go_on.set()
    first.join(PATIENCE_SECONDS)
    second.join(PATIENCE_SECONDS)
    assert seen == [(True, SLOT)]


def test_nobody_waits_for_a_change_of_this_process(indexes: tuple[SlabIndex, SlabIndex]) -> None:
    _, reader = indexes
    seen: list[tuple[bool, bool, int]] = []
    with reader.changing():
        thread = threading.Thread(
            target=lambda: seen.append((reader.follow(), reader.follow(reload=False), reader.find_one(KEY)))
        )
        thread.start()
        thread.join(PATIENCE_SECONDS)
        assert seen == [(True, True, SLOT)]
        assert reader.follow(), "nor does the thread that makes it"
