from __future__ import annotations

import gc

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


def test_a_page_of_tens_of_thousands_of_cards_is_few_objects_for_the_garbage_collector() -> None:
    page = b'{"data":[%s]}' % b",".join(b'{"id":"adapter-%d","parent":"fake"}' % number for number in range(20_000))
    gc.collect()
    before = len(gc.get_objects())
    listed = read_listed_models(page)
    assert listed is not None and len(listed.adapters) == 20_000
    assert len(gc.get_objects()) - before < 100
