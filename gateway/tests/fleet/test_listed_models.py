from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.fleet.listed_models import OLDEST, read_version


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.23.0", (0, 23)),
        ("0.32.0rc1", (0, 32)),
        ("0.30.0+cpu", (0, 30)),
        ("0.32.0.post1", (0, 32)),
        ("1.0", (1, 0)),
        ("dev", OLDEST),
        ("0", OLDEST),
        ("", OLDEST),
    ],
)
def test_the_first_two_numbers_count(text: str, version: tuple[int, int]) -> None:
    assert read_version(json.dumps({"version": text}).encode()) == version


@given(st.binary(max_size=40))
def test_any_page_is_read(page: bytes) -> None:
    assert read_version(page) >= OLDEST
    assert read_version(None) == OLDEST
