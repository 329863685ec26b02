from __future__ import annotations

import pytest

from spillway_connector.device.copier import Direction
from spillway_connector.device.cuda.paths import choose_cuda_paths
from spillway_connector.errors import ConfigError
from spillway_connector.plan.copy_table import BATCH, H200_TABLE, LOOP, STAGED, CopyTable

TABLE = CopyTable(store=((4096, "loop"), (65_536, "staged")))


@pytest.mark.parametrize(
    ("direction", "pieces", "total", "path"),
    [
        (Direction.STORE, 2, 8192, LOOP),
        (Direction.STORE, 2, 8194, STAGED),
        (Direction.STORE, 1, 65_536, STAGED),
        (Direction.STORE, 1, 65_537, BATCH),
        (Direction.LOAD, 2, 8192, BATCH),
    ],
)
def test_the_table_is_read_by_mean_piece(direction, pieces, total, path):
    assert choose_cuda_paths(TABLE, "auto", 13000).choose(direction, pieces, total) == path


def test_off_means_a_call_for_each_piece():
    paths = choose_cuda_paths(H200_TABLE, "off", 13000)
    assert {paths.choose(direction, 1, size) for direction in Direction for size in (1, 1 << 30)} == {LOOP}
    assert paths.name == "loop"


def test_on_refuses_to_start_without_the_call():
    with pytest.raises(ConfigError, match=r"batch_memcpy: 'on' cannot work here.*12\.8"):
        choose_cuda_paths(H200_TABLE, "on", None)


def test_auto_on_an_older_driver_still_stages_small_pieces():
    paths = choose_cuda_paths(H200_TABLE, "auto", None)
    assert (paths.choose(Direction.STORE, 1, 4096), paths.choose(Direction.STORE, 1, 1 << 30)) == (STAGED, LOOP)


def test_what_cannot_be_had_is_dropped_for_good():
    paths = choose_cuda_paths(H200_TABLE, "auto", 13000)
    paths.drop_staged("no kernel")
    assert paths.choose(Direction.STORE, 1, 4096) == BATCH
    paths.drop_batch("refused")
    assert paths.choose(Direction.STORE, 1, 4096) == LOOP
