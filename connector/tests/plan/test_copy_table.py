from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_connector.plan.copy_table import BATCH, H200_TABLE, PATHS, CopyTable
from spillway_settings.typed import WrongSetting, read_settings

sides = st.dictionaries(st.integers(1, 100), st.sampled_from(PATHS), max_size=5).map(lambda rows: sorted(rows.items()))


@given(sides, sides, st.floats(0.5, 120.0))
def test_the_first_row_that_is_large_enough_names_the_path(store, load, piece_bytes):
    table = read_settings(CopyTable, {"store": store, "load": load})
    for rows, path in ((store, table.store_path(piece_bytes)), (load, table.load_path(piece_bytes))):
        fitting = [limit for limit, _ in rows if limit >= piece_bytes]
        assert path == (dict(rows)[min(fitting)] if fitting else BATCH)


def test_what_bench_copy_prints_is_what_the_setting_takes():
    rows = [[524_288, "staged"]]
    assert read_settings(CopyTable, {"store": rows, "load": rows}) == H200_TABLE


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"up": []}, "up: unknown setting; did you mean "),
        ({"store": [[1]]}, r"store\[0\]: \[1\] given, a list of 2 items needed"),
        ({"store": [["1x", "loop"]]}, r"store\[0\]\[0\]: '1x' is no size; write for example 512MiB"),
        ({"store": [[1, "fast"]]}, r"store\[0\]\[1\]: 'fast' given, batch, loop or staged needed"),
        ({"load": [[2, "loop"], [2, "batch"]]}, r"load has the sizes \[2, 2\]; each needs to be larger"),
    ],
)
def test_a_wrong_table_is_named(wrong, message):
    with pytest.raises(WrongSetting, match=message):
        read_settings(CopyTable, wrong)
