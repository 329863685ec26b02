from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_settings.wire import names_a_store, store_medium


@given(st.sampled_from(["redis", "nvme"]), st.binary(min_size=8, max_size=8))
def test_what_names_a_store_is_read_as_one(tier_type: str, store_id: bytes) -> None:
    assert names_a_store(store_medium(tier_type, store_id))


@pytest.mark.parametrize(
    "medium", ["GPU", "CPU", "redis", "redis/", "redis/0123456789abcde", "redis/0123456789ABCDEF", "/0123456789abcdef"]
)
def test_other_media_name_none(medium: str) -> None:
    assert not names_a_store(medium)
    assert not names_a_store(f"{medium}\n")
