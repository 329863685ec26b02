from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.tokens.bounded_entries import BoundedEntries

BYTES_MAX = 20
keys = st.integers(0, 5)
puts = st.tuples(keys, st.binary(max_size=30), st.none() | keys)


@given(st.lists(puts | st.lists(keys, max_size=3), max_size=60))
def test_the_entries_are_those_used_last_that_fit(steps: list[tuple[int, bytes, int | None] | list[int]]) -> None:
    entries: BoundedEntries[int, bytes] = BoundedEntries(BYTES_MAX, len)
    model: dict[int, bytes] = {}  # the least recently used one first
    for step in steps:
        if isinstance(step, list):
            assert entries.get_all(step) == [model.get(key) for key in step]
            for key in step:
                if key in model:
                    model[key] = model.pop(key)
            continue
        key, value, in_place_of = step
        entries.put(key, value, in_place_of=in_place_of)
        model.pop(key, None)
        if in_place_of is not None:
            model.pop(in_place_of, None)
        model[key] = value
        while sum(map(len, model.values())) > BYTES_MAX:
            del model[next(iter(model))]
        assert [entries.peek(key) for key in range(6)] == [model.get(key) for key in range(6)]
        assert (len(entries), entries.estimated_bytes) == (len(model), sum(map(len, model.values())))
