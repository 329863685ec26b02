from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_connector.errors import ConfigError
from spillway_connector.plan.copy_table import BATCH, H200_TABLE, PATHS, CopyTable

sides = st.dictionaries(st.integers(1, 100), st.sampled_from(PATHS), max_size=5).map(lambda rows: sorted(rows.items()))


@given(sides, sides, st.floats(0.5, 120.0))
def test_the_first_row_that_is_large_enough_names_the_path(store, load, piece_bytes):
    table = CopyTable.parse({"store": store, "load": load})
    for rows, path in ((store, table.store_path(piece_bytes)), (load, table.load_path(piece_bytes))):
        fitting = [limit for limit, _ in rows if limit >= piece_bytes]
        assert path == (dict(rows)[min(fitting)] if fitting else BATCH)


def test_what_bench_copy_prints_is_what_the_setting_takes():
    assert CopyTable.parse({"store": [[524_288, "staged"]], "load": [[524_288, "staged"]]}) == H200_TABLE


@pytest.mark.parametrize(
    "wrong",
    [
        {"up": []},
        {"store": [[1]]},
        {"store": [["1", "loop"]]},
        {"store": [[1, "fast"]]},
        {"load": [[2, "loop"], [2, "batch"]]},
    ],
)
def test_a_wrong_table_is_named(wrong):
    with pytest.raises(ConfigError, match="copy_table"):
        CopyTable.parse(wrong)
