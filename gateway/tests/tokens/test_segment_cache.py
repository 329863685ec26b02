from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.tokens.segment_cache import ENTRY_BYTES, SegmentCache, segment_key, segment_keys


def test_the_least_recently_used_segment_is_evicted_first() -> None:
    ids = bytes(40)
    each = ENTRY_BYTES + len(ids)
    cache = SegmentCache(3 * each)
    keys = [segment_key("", str(number)) for number in range(4)]
    for key in keys[:3]:
        cache.put(key, ids)
    assert cache.get_all([keys[0], keys[3]]) == [ids, None]
    cache.put(keys[3], ids)
    cache.put(keys[3], ids)  # as a second thread does

    assert cache.get_all(keys) == [ids, None, ids, ids]
    assert (len(cache), cache.estimated_bytes) == (3, 3 * each)


names = st.text(st.characters(codec="utf-8"), max_size=5)


@given(names, names, names, names)
def test_a_text_is_its_owners_alone(owner: str, text: str, other: str, other_text: str) -> None:
    same = segment_key(owner, text) == segment_key(other, other_text)
    assert same == ((owner, text) == (other, other_text))


@given(st.text(st.characters(codec="utf-8")) | st.text("ab"), st.lists(st.integers(0, 30)))
def test_the_parts_of_a_text_have_the_keys_that_they_have_alone(text: str, cuts: list[int]) -> None:
    cuts = sorted(min(cut, len(text)) for cut in cuts)
    alone = [segment_key("o", text[start:end]) for start, end in pairwise(cuts)]
    assert segment_keys("o", text, cuts) == alone
