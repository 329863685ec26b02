from __future__ import annotations

from spillway_gateway.tokens.segment_cache import ENTRY_BYTES, SegmentCache, segment_key


def test_the_least_recently_used_segment_is_evicted_first() -> None:
    ids = bytes(40)
    each = ENTRY_BYTES + len(ids)
    cache = SegmentCache(3 * each)
    keys = [segment_key(str(number)) for number in range(4)]
    for key in keys[:3]:
        cache.put(key, ids)
    assert cache.get_all([keys[0], keys[3]]) == [ids, None]
    cache.put(keys[3], ids)
    cache.put(keys[3], ids)  # as a second thread does

    assert cache.get_all(keys) == [ids, None, ids, ids]
    assert (len(cache), cache.estimated_bytes) == (3, 3 * each)
