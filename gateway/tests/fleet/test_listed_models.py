from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.fleet.listed_models import read_version
from spillway_settings.vllm_salts import OLDEST


def test_the_page_names_the_version() -> None:
    assert read_version(b'{"version": "0.32.0rc1"}') == (0, 32)


@given(st.binary(max_size=40))
def test_any_page_is_read(page: bytes) -> None:
    assert read_version(page) >= OLDEST
    assert read_version(None) == OLDEST
