from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.tokens.known_beginnings import CHARS_MIN, MARKS, Beginning, KnownBeginnings

TEXT = "".join(f"{at:07x} " for at in range(CHARS_MIN))
IDS = b"0123"
AMPLE = 64 * 1024 * 1024


def keep(known: KnownBeginnings, text: str, owner: str = "a", before: Beginning | None = None) -> None:
    known.keep(owner, text, len(text), IDS, end=len(text) - 1, before=before)


def chars_found(known: KnownBeginnings, text: str, owner: str = "a") -> int:
    found = known.find(owner, text)
    return 0 if found is None else found.end + 1


def test_the_longest_known_beginning_of_the_owners_texts_is_found() -> None:
    known = KnownBeginnings(AMPLE)
    short, long = TEXT[:CHARS_MIN], TEXT[: 2 * CHARS_MIN]
    keep(known, short)
    keep(known, long)

    assert chars_found(known, TEXT) == chars_found(known, long) == 2 * CHARS_MIN
    assert chars_found(known, long[:-1]) == CHARS_MIN and chars_found(known, TEXT[: CHARS_MIN - 1]) == 0
    assert chars_found(known, TEXT, "b") == 0
    assert chars_found(known, "x" + TEXT[1:]) == 0, "only the last characters before the marks are equal"


@given(st.lists(st.integers(1, 3 * CHARS_MIN), min_size=1, max_size=40))
def test_a_turn_takes_the_place_of_the_one_that_it_extends_and_adds_little(lengths: list[int]) -> None:
    known, chars, ids = KnownBeginnings(AMPLE), CHARS_MIN, b""
    before: Beginning | None = None
    text = TEXT * 20
    for turn, length in enumerate(lengths):
        chars += length
        new = b"%04d" % turn * (length // 4 + 1)
        known.keep("a", text, chars, new, end=chars - 1, before=before)
        ids += new
        before = known.find("a", text)
        assert before is not None and before.begins(text[:chars]) and not before.begins(text[: chars - 1])
        assert "".join(before.texts) == text[:chars] and b"".join(before.ids) == ids and before.end == chars - 1
        assert len(before.texts) <= 20 and len(before.ids) <= 20
        assert (len(known), known.estimated_bytes) == (1, before.estimated_bytes)


def test_conversations_that_part_before_a_mark_are_known_both() -> None:
    known = KnownBeginnings(AMPLE)
    turns = [TEXT[: MARKS[2]] + name * MARKS[4] for name in ("one", "two", "three")]
    for turn in turns:
        keep(known, turn)
    for turn in turns:
        assert chars_found(known, turn + " and so on") == len(turn)


def test_the_least_recently_used_leave_first_and_what_is_too_large_or_too_short_is_not_kept() -> None:
    texts = [TEXT[:CHARS_MIN].replace(" ", name) for name in "ghij"]
    known = KnownBeginnings(AMPLE)
    keep(known, texts[0])
    each = known.estimated_bytes
    known = KnownBeginnings(3 * each)
    for text in texts[:3]:
        keep(known, text)
    assert chars_found(known, texts[0])
    keep(known, texts[3])
    keep(known, texts[3])  # as a second thread does

    assert [chars_found(known, text) > 0 for text in texts] == [True, False, True, True]
    keep(known, TEXT[: 4 * CHARS_MIN])
    keep(known, TEXT[: CHARS_MIN - 1])
    assert (len(known), known.estimated_bytes) == (3, 3 * each)
