"""The files of a node's rows are cut or overwritten under its engines, between any two looks at them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from spillway_connector.engine.node_tier.row_checks import NodeRowsSpec, RowChecks
from spillway_connector.engine.node_tier.rows import NodeRows
from spillway_connector.errors import DeviceCopyError
from spillway_connector.node.region import NodeRegion
from spillway_connector.plan.node_index import NodeIndex
from spillway_connector.testing.generation import HIT, PENDING, make_node_tier
from spillway_connector.tiers.disk.slab.writers import new_number

ROWS, ROW_BYTES = 6, 4096
CONTEXT = ReqContext(req_id="r")
LOOKS = (
    *("changed_rows", "entry", "reserve", "claim", "publish", "free", "pin", "unpin", "take_free"),
    *("sweep", "is_pinned", "all_may_leave", "used_since", "ready_words", "holds", "end", "begin"),
)


def to_nothing(path: Path) -> None:
    os.truncate(path, 0)


def to_a_page(path: Path) -> None:
    os.truncate(path, 4096)


def to_a_hole(path: Path) -> None:
    size = path.stat().st_size
    os.truncate(path, 0)
    os.truncate(path, size)


def another(path: Path) -> None:
    path.write_bytes(b"\1" * 9000)


CUTS = {cut.__name__: cut for cut in (to_nothing, to_a_page, to_a_hole, another)}
Cut = Callable[[Path], None]


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[tuple[NodeRows, NodeRows]]:
    clock = [100.0]

    def now() -> float:
        clock[0] += 1.0
        return clock[0]

    both = []
    for _ in range(2):
        tier = make_node_tier(NodeRegion(tmp_path, ROWS, ROW_BYTES, new_number()), b"o" * 16, False, clock=now)
        assert isinstance(tier, NodeRows)
        tier._spare_rows = (1).__index__  # type: ignore[method-assign]
        both.append(tier)
    yield both[0], both[1]
    for tier in both:
        tier.shutdown()


def key(number: int) -> OffloadKey:
    return OffloadKey(bytes([number]) * 36)


def store(tier: NodeRows, *numbers: int) -> None:
    output = tier.prepare_store([key(number) for number in numbers], CONTEXT)
    if output is not None:
        tier.touch(list(output.keys_to_store), CONTEXT)
        tier.complete_store(list(output.keys_to_store), CONTEXT, numbers[0] != 2)


def use(tier: NodeRows, *numbers: int) -> bool:
    """Whether a rank would take what it copied for the chunks."""
    keys = [key(number) for number in numbers]
    tier.sync()
    if not all(tier.lookup(each, CONTEXT) is HIT for each in keys):
        return False
    checks, spec = RowChecks(tier._node), tier.prepare_load(keys, CONTEXT)
    assert isinstance(spec, NodeRowsSpec)
    try:
        checks.require(spec)
        checks.submitted(1, spec)
        return checks.still_held(1)
    except DeviceCopyError:
        return False
    finally:
        tier.complete_load(keys, CONTEXT)


def a_life(one: NodeRows, two: NodeRows) -> None:
    for first in range(0, 12, 2):
        store(one, first, first + 1)
        use(two, first, first + 1)
        reading = one.prepare_read([key(first + 1)], CONTEXT) if key(first + 1) in one.ready else None
        store(two, 20 + first)
        use(one, 20 + first)
        if reading is not None:
            one.complete_read([key(first + 1)], CONTEXT)
    one.reset_cache()


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("name", ["index", "rows"])
def test_engines_serve_on_and_load_nothing_whenever_a_file_is_cut(
    engines: tuple[NodeRows, NodeRows], monkeypatch: pytest.MonkeyPatch, name: str, cut: Cut
):
    one, two = engines
    a_life(one, two)
    store(one, 90)
    assert use(two, 90)
    cut(one._node.path / name)
    assert not use(one, 90) and not use(two, 90)
    a_life(one, two)
    for tier in engines:
        assert not tier.is_joined
        assert tier.lookup(key(90), CONTEXT) not in (HIT, PENDING)
        assert tier.prepare_store([key(91)], CONTEXT) is None


@pytest.mark.parametrize("name", ["index", "rows"])
def test_no_look_at_the_index_raises_when_it_was_cut_just_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    looks = 0
    wanted: int | None = None
    path: Path | None = None

    def counted(method: Callable[..., object]) -> Callable[..., object]:
        def look(*args: object, **more: object) -> object:
            nonlocal looks
            looks += 1
            if looks == wanted:
                assert path is not None
                os.truncate(path, 0)
            return method(*args, **more)

        return look

    for method in LOOKS:
        monkeypatch.setattr(NodeIndex, method, counted(getattr(NodeIndex, method)))

    def live(number: int) -> None:
        nonlocal looks, path
        tiers = []
        for _ in range(2):
            tier = make_node_tier(NodeRegion(tmp_path / str(number), ROWS, ROW_BYTES, new_number()), b"o" * 16, False)
            assert isinstance(tier, NodeRows)
            tier._spare_rows = (1).__index__  # type: ignore[method-assign]
            tiers.append(tier)
        looks, path = 0, tiers[0]._node.path / name
        a_life(*tiers)
        if wanted is not None:
            for tier in tiers:
                tier._sweep_at = 0.0
                tier.sync()
                assert not tier.is_joined
                assert [tier.lookup(key(each), CONTEXT) for each in range(32) if each in tier._mine] == []
        for tier in tiers:
            tier.shutdown()

    live(0)
    total = looks
    for wanted in range(1, total, 3):
        live(wanted)
