from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_settings.vllm_salts import OLDEST, Version, version_of, why_salts_are_dropped


def _config(**pooler: Any) -> SimpleNamespace:
    return SimpleNamespace(model_config=SimpleNamespace(pooler_config=SimpleNamespace(**pooler)))


IN_PIECES = _config(enable_chunked_processing=True)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.23.0", (0, 23)),
        ("0.32.0rc1", (0, 32)),
        ("0.30.0+cpu", (0, 30)),
        ("0.32.0.post1", (0, 32)),
        ("1.0", (1, 0)),
        ("dev", OLDEST),
        ("0", OLDEST),
        ("", OLDEST),
    ],
)
def test_the_first_two_numbers_count(text: str, version: Version) -> None:
    assert version_of(text) == version


@given(st.text(max_size=40))
def test_any_text_has_a_version(text: str) -> None:
    assert version_of(text) >= OLDEST


@pytest.mark.parametrize("version", ["0.23.0", "0.23.0.post1", "0.30.0", "0.31.9+cpu", "dev"])
def test_pieces_are_refused_where_vllm_drops_their_salts(version: str) -> None:
    why = why_salts_are_dropped(IN_PIECES, version)
    assert why is not None
    assert version in why
    assert "enable_chunked_processing" in why


@pytest.mark.parametrize(
    ("config", "version"),
    [
        (IN_PIECES, "0.32.0"),
        (IN_PIECES, "1.0.0"),
        (_config(enable_chunked_processing=False), "0.23.0"),
        (_config(), "0.23.0"),  # of a version that has no such setting
        (SimpleNamespace(model_config=SimpleNamespace(pooler_config=None)), "0.23.0"),  # of a model that generates
        (None, "0.23.0"),
    ],
)
def test_all_else_keeps_its_salts(config: Any, version: str) -> None:
    assert why_salts_are_dropped(config, version) is None
