from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spillway_connector.tiers.disk.slab.layout import copies_bytes, plan_shape, slot_bytes_of


@given(payload_bytes=st.integers(1, 1 << 32), limit_bytes=st.integers(0, 1 << 50))
def test_the_copies_of_an_index_take_no_more_than_is_reckoned(payload_bytes: int, limit_bytes: int) -> None:
    shape = plan_shape(slot_bytes_of(payload_bytes), limit_bytes)
    if shape is not None:
        held, reckoned = shape.index_bytes + shape.sessions_bytes, copies_bytes(payload_bytes, limit_bytes)
        assert held <= reckoned


def test_not_much_more_is_reckoned_than_is_held() -> None:
    shape = plan_shape(slot_bytes_of(2 << 20), 8 << 40)
    assert shape is not None
    assert copies_bytes(2 << 20, 8 << 40) < 1.06 * (shape.index_bytes + shape.sessions_bytes)
