from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.fleet.listed_models import BRACES_MAX, read_listed_models, read_version
from spillway_settings.vllm_salts import OLDEST


def test_the_page_names_the_version() -> None:
    assert read_version(b'{"version": "0.32.0rc1"}') == (0, 32)


@given(st.binary(max_size=40))
def test_any_page_is_read(page: bytes) -> None:
    assert read_version(page) >= OLDEST
    assert read_version(None) == OLDEST


def test_a_page_of_more_cards_than_are_decoded_at_once_has_no_list() -> None:
    page = b'{"data":[' + b",".join(b'{"id":"%d"}' % number for number in range(BRACES_MAX)) + b"]}"

    assert read_listed_models(page) is None
