from __future__ import annotations

from spillway_gateway.tokens.known_beginnings import CHARS_MIN, MARKS, Beginning, KnownBeginnings

TEXT = "".join(f"{at:07x} " for at in range(CHARS_MIN))
AMPLE = 64 * 1024 * 1024


def beginning(chars: int, ids: bytes = b"0123", text: str = TEXT) -> Beginning:
    return Beginning(text[:chars], chars - 1, ids)


def test_the_longest_known_beginning_of_the_owners_texts_is_found() -> None:
    known = KnownBeginnings(AMPLE)
    short, long = beginning(CHARS_MIN), beginning(2 * CHARS_MIN)
    known.keep("a", short)
    known.keep("a", long)

    assert known.find("a", TEXT) is long and known.find("a", long.text) is long
    assert known.find("a", long.text[:-1]) is short and known.find("a", TEXT[: CHARS_MIN - 1]) is None
    assert known.find("b", TEXT) is None
    assert known.find("a", "x" + TEXT[1:]) is None, "only the last characters before the marks are equal"


def test_a_turn_takes_the_place_of_the_one_that_it_extends() -> None:
    known = KnownBeginnings(AMPLE)
    before: Beginning | None = None
    for chars in (CHARS_MIN, CHARS_MIN + 10, 2 * CHARS_MIN, 4 * CHARS_MIN):
        turn = beginning(chars)
        known.keep("a", turn, before)
        before = known.find("a", TEXT)
        assert before is turn and (len(known), known.estimated_bytes) == (1, turn.estimated_bytes)


def test_conversations_that_part_before_a_mark_are_known_both() -> None:
    known = KnownBeginnings(AMPLE)
    common = TEXT[: MARKS[2]]
    turns = [beginning(MARKS[4], text=common + name * MARKS[4]) for name in ("one", "two", "three")]
    for turn in turns:
        known.keep("a", turn)
    for turn in turns:
        assert known.find("a", turn.text + " and so on") is turn


def test_the_least_recently_used_leave_first_and_what_is_too_large_or_too_short_is_not_kept() -> None:
    texts = [TEXT.replace(" ", name) for name in "ghij"]
    each = beginning(CHARS_MIN, text=texts[0]).estimated_bytes
    known = KnownBeginnings(3 * each)
    for text in texts[:3]:
        known.keep("", beginning(CHARS_MIN, text=text))
    assert known.find("", texts[0]) is not None
    known.keep("", beginning(CHARS_MIN, text=texts[3]))
    known.keep("", beginning(CHARS_MIN, text=texts[3]))  # as a second thread does

    assert [known.find("", text) is not None for text in texts] == [True, False, True, True]
    known.keep("", beginning(4 * CHARS_MIN))
    known.keep("", beginning(CHARS_MIN - 1))
    assert (len(known), known.estimated_bytes) == (3, 3 * each)
