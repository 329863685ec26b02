from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spillway_connector.plan.change_log import ChangeLog

one_byte = st.binary(min_size=1, max_size=1)
keys = st.lists(one_byte, max_size=6)


@given(st.lists(keys, max_size=30), st.integers(0, 29), st.frozensets(one_byte), st.integers(2, 9))
def test_a_change_is_never_overlooked(batches, at, wanted, keys_max):
    log = ChangeLog(keys_max)
    since = log.position
    after: set[bytes] = set()
    for number, batch in enumerate(batches):
        if number == at:
            since, after = log.position, set()
        log.add(batch)
        after.update(batch)
    assert log.touches(since, wanted) or after.isdisjoint(wanted)
    assert len(log._keys) <= keys_max


@given(keys, st.frozensets(one_byte))
def test_other_keys_are_no_reason_to_ask_again(batch, wanted):
    log = ChangeLog()
    since = log.position
    log.add(batch)
    assert log.touches(since, wanted) == (not wanted.isdisjoint(batch))
    assert not log.touches(log.position, wanted)


def test_everything_may_have_changed():
    log = ChangeLog()
    log.add([b"a"])
    since = log.position
    log.add_all()
    assert log.touches(since, frozenset([b"z"]))
    assert not log.touches(log.position, frozenset([b"z"]))


def test_what_has_changed_since_is_told_while_it_is_remembered():
    log = ChangeLog(keys_max=4)
    since = log.position
    log.add([b"a", b"b"])
    middle = log.position
    log.add([b"c"])
    assert log.since(since) == [b"a", b"b", b"c"]
    assert log.since(middle) == [b"c"]
    log.add([b"d", b"e", b"f"])
    assert log.since(since) is None
    assert log.since(log.position) == []
