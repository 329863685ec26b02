import math
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.utils.quantity import parse_quantity
from size_cases import BYTES, REFUSED

from spillway_settings.byte_sizes import ByteCount, format_byte_count, parse_byte_count

LARGEST = 2**63 - 1
digits = st.text("0123456789", max_size=22)
numbers = st.builds(lambda whole, parts: f"{whole or 0}.{parts}" if parts else whole or "0", digits, digits)
quantity_suffixes = st.sampled_from(["", "k", *(letter for letter in "MGTPE"), *(f"{letter}i" for letter in "KMGTPE")])


@pytest.mark.parametrize(("value", "size_bytes"), BYTES.items(), ids=repr)
def test_sizes_as_people_write_them(value: str | int | float, size_bytes: int) -> None:
    assert parse_byte_count(value) == size_bytes


@pytest.mark.parametrize(("value", "reason"), REFUSED.items(), ids=repr)
def test_what_is_no_size_is_refused_with_the_reason_and_an_example(value: str | int | float, reason: str) -> None:
    with pytest.raises(ValueError, match=r"64Gi, 1TB") as refused:
        parse_byte_count(value)

    assert str(refused.value).startswith(f"{value!r} {reason}; write for example ")


@pytest.mark.parametrize("value", [True, None, [], math.inf, math.nan, "1" * 65])
def test_what_is_neither_text_nor_a_number_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="is no size"):
        parse_byte_count(value)


def test_a_number_that_no_float_holds_is_refused_like_any_other() -> None:
    with pytest.raises(ValueError, match="is 8 EiB or more"):
        parse_byte_count(10**400)


def test_settings_need_a_byte() -> None:
    assert ByteCount.read("1k") == 1000
    with pytest.raises(ValueError, match="'0' given, at least 1 byte needed"):
        ByteCount.read("0")


@given(numbers, quantity_suffixes)
def test_quantities_mean_what_the_kubernetes_client_reads(number: str, suffix: str) -> None:
    exact = Fraction(Decimal(number)) * Fraction(parse_quantity(f"1{suffix}"))
    if 1 <= exact <= LARGEST or exact == 0:
        assert parse_byte_count(number + suffix) == math.ceil(exact)
    else:
        with pytest.raises(ValueError, match=r"is less than one byte|is 8 EiB or more"):
            parse_byte_count(number + suffix)


@given(numbers, st.integers(-20, 20), st.sampled_from("eE"))
def test_exponents_shift_the_point(number: str, exponent: int, letter: str) -> None:
    exact = Fraction(number) * Fraction(10) ** exponent
    if 1 <= exact <= LARGEST or exact == 0:
        assert parse_byte_count(f"{number}{letter}{exponent:+d}") == math.ceil(exact)


@given(st.text(max_size=12) | st.text("0123456789.+-eEkKmMGTPiIbB ", max_size=12))
def test_any_text_is_a_size_or_refused_in_one_sentence(text: str) -> None:
    try:
        assert 0 <= parse_byte_count(text) <= LARGEST
    except ValueError as refused:
        assert "; write for example 512MiB" in str(refused)


@given(st.integers(min_value=0, max_value=1 << 50))
def test_formatting_keeps_the_magnitude(size_bytes: int) -> None:
    shown = parse_byte_count(format_byte_count(size_bytes).replace(",", ""))

    assert abs(shown - size_bytes) <= max(1, size_bytes * 0.06)
