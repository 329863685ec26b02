"""The models that an engine lists, as it reports them. Pure.

Its /v1/models lists the model, its limit, and the LoRA adapters that are loaded now; its /version names its vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from spillway_settings.vllm_salts import OLDEST, Version, version_of

MODELS_BYTES_MAX = 4 * 1024 * 1024  # of the page; a longer one is not read
VERSION_BYTES_MAX = 4096  # of the page
CARDS_MAX = 65_536  # beyond them the page is not read: its cards are decoded in one event loop iteration
BRACES_MAX = 2 * CARDS_MAX  # vLLM's card has one of its own and one of its permission
LENGTH_MAX = 1 << 30  # tokens; what says more is no limit


class _Card(msgspec.Struct, gc=False):  # else tens of thousands start the garbage collector a hundred times
    id: str = ""
    parent: str | None = None
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


class _Documents(msgspec.Struct):
    data: list[msgspec.Raw]


_cards = msgspec.json.Decoder(_Cards)
_documents = msgspec.json.Decoder(_Documents)
_document = msgspec.json.Decoder(dict[str, Any])


class ListedModels:
    """One reading of the page, whose bytes are body. names: all that it lists. adapters: those that another one of
    them is the parent of."""

    __slots__ = ("_cards", "adapters", "body", "names")

    def __init__(self, body: bytes, cards: list[_Card]) -> None:
        self.body = body
        self._cards = cards
        self.names = frozenset(card.id for card in cards if card.id)
        self.adapters = frozenset(card.id for card in cards if card.id and card.parent is not None)

    def prompt_tokens_max(self, model: str) -> int | None:
        """max_model_len of the model's card, as vLLM reports it; None if the page has none that is possible."""
        given = (card.max_model_len for card in self._cards if card.id == model and card.max_model_len is not None)
        return next((length for length in given if 0 < length <= LENGTH_MAX), None)

    def documents(self) -> Iterator[dict[str, Any]]:
        """The cards as the engine sent them, each decoded when it is asked for: a page may hold tens of thousands."""
        return map(_document.decode, _documents.decode(self.body).data)


def read_listed_models(body: bytes) -> ListedModels | None:
    """Read the models of the page; None if it has no list, or one that is too long."""
    if body.count(b"{") > BRACES_MAX:
        return None
    try:
        return ListedModels(body, _cards.decode(body).data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None


class _Page(msgspec.Struct):
    version: str


def read_version(page: bytes | None) -> Version:
    """Return the version that the page names, or OLDEST if it names none."""
    try:
        return version_of(msgspec.json.decode(page or b"", type=_Page).version)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return OLDEST
