"""Requests as people send them: chats that grow, questions about shared documents, and prompts that share nothing.

Of 20 requests 10 are turns of chats, 5 ask about one of a few long documents, and 5 share nothing with any other. A
chat has a system prompt of 100 to 600 tokens that others have too, and up to 8 turns, each with a new question (20 to
400 tokens) behind the whole conversation. Documents have 1,500 to 6,000 tokens, prompts that share nothing 200 to
7,800. 9 texts of 20 are English, 7 code and 4 Chinese. All texts are made once; each time one is sent, its questions
and answers hold another number, so no router sees a question, an answer or a prompt of its own twice.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gateway_load.texts import Language, Texts

MODEL = "m"
NUMBER = "00000000"  # where the sender writes one that was never used
SYSTEMS = 32
DOCUMENTS = 32
CHATS = 192
OWN_PROMPTS = 192
QUESTIONS = 512  # about documents
TURNS_MAX = 8
SYSTEM_TOKENS = (100, 600)
QUESTION_TOKENS = (20, 400)
ANSWER_TOKENS = (40, 400)
DOCUMENT_TOKENS = (1_500, 6_000)
SHORT_QUESTION_TOKENS = (12, 80)
OWN_TOKENS = (180, 7_800)
DISTINCT_CHARS = {Language.ENGLISH: 1_300, Language.CODE: 1_000, Language.CHINESE: 220}
_LANGUAGES = [Language.ENGLISH] * 9 + [Language.CODE] * 7 + [Language.CHINESE] * 4
_CHAT, _DOCUMENT, _OWN = range(3)
_KINDS = [_CHAT, _OWN, _CHAT, _DOCUMENT] * 5
# So that the next turn of a chat leaves long after its last one was answered.
CHATS_PER_REQUEST_AT_ONCE = 2
CHATS_AT_ONCE_MIN = 16

Parts = list[bytes]  # of a body, around the places of NUMBER
Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Prompts:
    """Bodies without numbers, of requests that do not stream. chats: the turns of each."""

    chats: list[list[Parts]]
    documents: list[Parts]
    own: list[Parts]

    def streamed(self) -> Prompts:
        """The same of requests that stream."""
        return Prompts(
            [[_streamed(parts) for parts in turns] for turns in self.chats],
            list(map(_streamed, self.documents)),
            list(map(_streamed, self.own)),
        )


def make_prompts(texts: Texts) -> Prompts:
    """The same for the same texts. Takes some seconds."""
    draw = random.Random(1)

    def text(tokens: tuple[int, int], language: Language | None = None) -> str:
        """Lengths are spread evenly on a logarithmic scale: most are short."""
        count = round(math.exp(draw.uniform(math.log(tokens[0]), math.log(tokens[1]))))
        return texts.passage(language or draw.choice(_LANGUAGES), count, draw)

    systems = [text(SYSTEM_TOKENS) for _ in range(SYSTEMS)]
    documents = [text(DOCUMENT_TOKENS) for _ in range(DOCUMENTS)]
    chats = []
    for at in range(CHATS):
        language = draw.choice(_LANGUAGES)
        messages = [_message("system", systems[at % SYSTEMS])]
        turns = []
        for _ in range(draw.randint(1, TURNS_MAX)):
            messages.append(_message("user", f"[{NUMBER}] {text(QUESTION_TOKENS, language)}"))
            turns.append(_parts(chat_body(messages, stream=False)))
            messages.append(_message("assistant", f"[{NUMBER}] {text(ANSWER_TOKENS, language)}"))
        chats.append(turns)
    about = []
    for at in range(QUESTIONS):
        question = f"[{NUMBER}] {text(SHORT_QUESTION_TOKENS)}"
        messages = [_message("system", documents[at % DOCUMENTS]), _message("user", question)]
        about.append(_parts(chat_body(messages, stream=False)))
    own = [_parts(own_body(f"[{NUMBER}] {text(OWN_TOKENS)}")) for _ in range(OWN_PROMPTS)]
    return Prompts(chats, about, own)


def traffic(prompts: Prompts, numbers: Iterator[int], *, concurrent: int) -> Iterator[bytes]:
    """Bodies, endlessly. numbers: none was given before. concurrent: requests at once; more of them need more chats at
    once. Chats that have begun before are met in the middle, at first."""
    chats = itertools.cycle(prompts.chats)
    kinds = itertools.cycle(_KINDS)
    documents, own = itertools.cycle(prompts.documents), itertools.cycle(prompts.own)
    at_once = max(CHATS_AT_ONCE_MIN, CHATS_PER_REQUEST_AT_ONCE * concurrent)
    open_chats: list[Iterator[bytes]] = []
    for at in range(at_once):
        turns = next(chats)
        open_chats.append(_numbered(turns[at % len(turns) :], next(numbers)))
    for slot in itertools.cycle(range(at_once)):
        while (kind := next(kinds)) != _CHAT:
            parts = next(documents) if kind == _DOCUMENT else next(own)
            yield (b"%08d" % next(numbers)).join(parts)
        turn = next(open_chats[slot], None)
        if turn is None:
            open_chats[slot] = _numbered(next(chats), next(numbers))
            turn = next(open_chats[slot])
        yield turn


def _numbered(turns: Sequence[Parts], number: int) -> Iterator[bytes]:
    for parts in turns:
        yield (b"%08d" % number).join(parts)


def chat_body(messages: Sequence[Message], *, stream: bool) -> bytes:
    """Return a chat request's body as clients write it: Chinese is not escaped."""
    body = {"model": MODEL, "messages": messages, "max_tokens": 32, "stream": stream}
    return json.dumps(body, ensure_ascii=False).encode()


def own_body(text: str) -> bytes:
    """A chat of one message."""
    return chat_body([_message("user", text)], stream=False)


def distinct_bodies(texts: Texts) -> Iterator[bytes]:
    """Prompts of about 300 tokens that share no block, endlessly."""
    draw = random.Random(2)
    for number in itertools.count():
        language = draw.choice(_LANGUAGES)
        yield own_body(f"[{number:08d}] {texts.draw(language, DISTINCT_CHARS[language], draw)}")


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _parts(body: bytes) -> Parts:
    return body.split(NUMBER.encode())


def _streamed(parts: Parts) -> Parts:
    plain = b'"stream": false}'
    assert parts[-1].endswith(plain)
    return [*parts[:-1], parts[-1].removesuffix(plain) + b'"stream": true}']
