"""A model's own tokens instead of the built-in ones. Needs the extra `tokenizer`."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from spillway_gateway.tokens.chat_template import CannotRender
from spillway_gateway.tokens.tokenizer import PromptTokenizer
from spillway_simulator.wire.tokens import follow

_BLANK = "\u0120"  # how byte-level vocabularies write a blank
_WORDS_MAX = 4096


class ModelTokens:
    """A model's own tokenizer and chat template, through the gateway's reading of them (extra `tokenizer`).

    Answers are made of whole words that are one token each, so that they come back as the same tokens.
    """

    def __init__(self, folder: Path) -> None:
        self._prompts = PromptTokenizer.load(folder)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        words = sorted(word for word in vocabulary if word.isalpha() and word.startswith(_BLANK))
        plain = [vocabulary[word] for word in words if word[1:].isascii() and word[1:].islower()]
        self._words = array("I", plain[:_WORDS_MAX])
        if not self._words:
            raise ValueError(
                f"{folder}: the vocabulary has no whole words to answer with; use a byte-level BPE tokenizer"
            )

    def chat(self, body: Mapping[str, Any]) -> array[int]:
        template = self._prompts.template
        if template is None:
            raise ValueError("the model folder has no chat template")
        variables = body.get("chat_template_kwargs") or {}
        generate = body.get("add_generation_prompt", True)
        try:
            text = template.render(
                body["messages"], tools=body.get("tools"), add_generation_prompt=generate, variables=variables
            )
        except CannotRender as error:
            raise ValueError(str(error)) from error
        ids: array[int] = self._prompts.encode(text, add_special_tokens=bool(body.get("add_special_tokens", False)))
        return ids

    def text(self, text: str) -> array[int]:
        ids: array[int] = self._prompts.encode(text, add_special_tokens=True)
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def answer(self, prompt: array[int], count: int) -> array[int]:
        words = self._words
        return follow(prompt, count, lambda number: words[number % len(words)])
