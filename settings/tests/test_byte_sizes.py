import pytest
from hypothesis import given
from hypothesis import strategies as st
from size_cases import SIZE_CASES

from spillway_settings.byte_sizes import format_byte_count, parse_byte_count


@pytest.mark.parametrize(("text", "size_bytes"), SIZE_CASES.items(), ids=repr)
def test_sizes_as_people_write_them(text: str | int, size_bytes: int | None) -> None:
    if size_bytes is None:
        with pytest.raises(ValueError, match="is not a size; write for example"):
            parse_byte_count(text)
    else:
        assert parse_byte_count(text) == size_bytes


@pytest.mark.parametrize("text", [-4, True])
def test_numbers_that_are_no_size_are_refused(text: int) -> None:
    with pytest.raises(ValueError, match=r"size|negative"):
        parse_byte_count(text)


@given(st.integers(min_value=0, max_value=1 << 50))
def test_formatting_keeps_the_magnitude(size_bytes: int) -> None:
    shown = parse_byte_count(format_byte_count(size_bytes).replace(",", ""))

    assert abs(shown - size_bytes) <= max(1, size_bytes * 0.06)
