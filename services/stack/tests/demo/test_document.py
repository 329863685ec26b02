import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_stack.demo.document import ENTRIES_MAX, LogBook, conversation, longest_book, write_log_book


def words(book: LogBook) -> int:
    return len(conversation(book)[0]["content"].split())


def test_the_same_seed_and_edition_give_the_same_book() -> None:
    assert write_log_book(3, "a", 40) == write_log_book(3, "a", 40)


def test_an_edition_changes_the_first_line_and_nothing_else() -> None:
    one, other = write_log_book(3, "a", 40), write_log_book(3, "b", 40)
    assert one.text.splitlines()[0] != other.text.splitlines()[0]
    assert one.text.splitlines()[1:] == other.text.splitlines()[1:]


def test_books_of_other_seeds_share_no_beginning() -> None:
    texts = [write_log_book(seed, "a", 5).text for seed in (0, 1, 3, 100, 101)]
    assert len({text.splitlines()[0] for text in texts}) == len(texts)
    assert len({text.splitlines()[2] for text in texts}) == len(texts)


@given(seed=st.integers(0, 10_000), entries=st.integers(1, ENTRIES_MAX))
def test_every_ship_arrives_once_so_that_one_answer_fits(seed: int, entries: int) -> None:
    book = write_log_book(seed, "a", entries)
    ships = [arrival.ship for arrival in book.arrivals]
    assert len(set(ships)) == len(ships) == entries
    assert book.text.count(ships[0]) == 1


def test_the_answer_stands_in_the_book_beside_the_ship_that_is_asked_about() -> None:
    book = write_log_book(0, "a", 30)
    ship = re.fullmatch(r"From which port did the (.+) arrive\?", book.question)
    assert ship is not None
    assert f"{ship[1]} arrived from {book.expected_answer} with" in book.text


def test_a_shortened_book_is_a_beginning_with_the_same_question() -> None:
    book = write_log_book(1, "a", 100)
    assert book.text.startswith(book.shortened(7).text)
    assert book.shortened(7).question == book.question


def test_the_question_comes_after_the_whole_document() -> None:
    book = write_log_book(1, "a", 10)
    (message,) = conversation(book)
    assert message["content"].startswith(book.text)
    assert message["content"].endswith(book.question)


@given(limit=st.integers(80, 20_000))
def test_the_longest_book_stays_below_its_limit_and_one_entry_more_would_not(limit: int) -> None:
    book = write_log_book(2, "a", ENTRIES_MAX)
    fitted = longest_book(book, limit, words)
    assert words(fitted) < limit
    if len(fitted.arrivals) < ENTRIES_MAX:
        assert words(book.shortened(len(fitted.arrivals) + 1)) >= limit


def test_a_limit_below_one_entry_is_refused() -> None:
    with pytest.raises(ValueError, match="one entry and its question"):
        longest_book(write_log_book(2, "a", 10), 5, words)


@pytest.mark.parametrize("entries", [0, ENTRIES_MAX + 1])
def test_entries_out_of_range_are_refused(entries: int) -> None:
    with pytest.raises(ValueError, match=f"1 to {ENTRIES_MAX}"):
        write_log_book(0, "a", entries)
