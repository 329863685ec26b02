import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_engine.byte_sizes import format_byte_count, parse_byte_count


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("512MiB", 512 << 20),
        ("2GiB", 2 << 30),
        ("4Gi", 4 << 30),
        ("1.5 GiB", 3 << 29),
        ("1GB", 10**9),
        ("4096", 4096),
        (7, 7),
    ],
)
def test_sizes_as_people_write_them(text: str | int, size_bytes: int) -> None:
    assert parse_byte_count(text) == size_bytes


@pytest.mark.parametrize("text", ["", "MiB", "-1", "12 parsecs", "1e9", "0x10", -4, True])
def test_what_is_no_size_is_refused(text: str | int) -> None:
    with pytest.raises(ValueError, match=r"size|negative"):
        parse_byte_count(text)


@given(st.integers(min_value=0, max_value=1 << 50))
def test_formatting_keeps_the_magnitude(size_bytes: int) -> None:
    shown = parse_byte_count(format_byte_count(size_bytes).replace(",", ""))

    assert abs(shown - size_bytes) <= max(1, size_bytes * 0.06)
