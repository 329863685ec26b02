from __future__ import annotations

from typing import Any

import pytest

from spillway_gateway.tokens.estimates import SAMPLE_CHARS, holds_media, text_tokens, value_tokens


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("", 0), ("a", 1), ("a" * 40, 10), ("東京" * 50, 100), ("東" * 50 + "a" * 40, 60), ("é", 1)],
)
def test_characters_that_are_not_ascii_count_whole(text: str, tokens: int) -> None:
    assert text_tokens(text) == tokens


def test_a_long_text_is_sampled_over_its_whole_length() -> None:
    text = "a" * (20 * SAMPLE_CHARS) + "東" * (20 * SAMPLE_CHARS)

    assert text_tokens(text) == pytest.approx(25 * SAMPLE_CHARS, rel=0.01)


@pytest.mark.parametrize(
    ("value", "tokens"),
    [
        (None, 0),
        (True, 1),
        ([1, 2, 3.5], 3),
        ([[1, 2], [3]], 3),
        (["a" * 40, {"text": "a" * 40, "more": [{"deep": "a" * 40}]}], 30),
        ([{"type": "text", "text": "a" * 36}, {"type": "image_url", "image_url": {"url": "a" * 4000}}], 13),
    ],
)
def test_all_texts_and_numbers_count_but_media(value: Any, tokens: int) -> None:
    assert value_tokens(value) == tokens


def test_media_are_seen_at_any_depth() -> None:
    assert holds_media([{"content": [{"type": "input_audio", "input_audio": {"data": "x"}}]}])
    assert not holds_media([{"content": [{"type": "text", "text": "image_url"}], "image_url": None}])
