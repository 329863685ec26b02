"""Text that people wrote, read where it is installed: nothing of it is stored in the repository.

English: the documentation in Python's standard library. Code: its functions and classes. Chinese: the words of
jieba's dictionary, by their frequency, with punctuation, since no installed package has much Chinese prose. All drawn
deterministically for one version of Python.
"""

from __future__ import annotations

import ast
import functools
import itertools
import random
import sysconfig
from enum import StrEnum
from pathlib import Path

import tokenizers

_NO_PROSE = frozenset({"test", "tests", "site-packages", "lib2to3", "idlelib", "turtledemo", "pydoc_data", "encodings"})
DOCSTRING_CHARS_MIN = 200  # shorter ones are rather labels than prose
CHINESE_WORDS = 20_000  # the most frequent
CLAUSE_WORDS = (3, 12)
# Above what any language needs, so that one passage is enough for the tokens asked for.
CHARS_PER_TOKEN = {"english": 6, "code": 6, "chinese": 2}
PASSAGE_CHARS_MIN = 200
_MARKS = "\uff0c\uff0c\uff0c\u3002\u3002\uff1b\uff1a\n"  # Chinese commas, full stops, semicolon, colon


class Language(StrEnum):
    ENGLISH = "english"
    CODE = "code"
    CHINESE = "chinese"


class Texts:
    """Passages of each language. words: jieba's dictionary. tokenizer: counts the tokens of a passage."""

    def __init__(self, words: Path, tokenizer: Path) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
        english, code = _standard_library()
        self._long = {Language.ENGLISH: english, Language.CODE: code}
        self._chinese, self._frequencies = _frequent_words(words)

    def passage(self, language: Language, tokens: int, draw: random.Random) -> str:
        """A text of so many tokens, or of one or two fewer: it ends before a character of several tokens."""
        chars = tokens * CHARS_PER_TOKEN[language] + PASSAGE_CHARS_MIN
        text = self.draw(language, chars, draw)
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return text[: encoding.offsets[tokens - 1][1]] if len(encoding.ids) > tokens else text

    def draw(self, language: Language, chars: int, draw: random.Random) -> str:
        """A passage of about so many characters."""
        return self._of_words(chars, draw) if language is Language.CHINESE else self._of_library(language, chars, draw)

    def _of_library(self, language: Language, chars: int, draw: random.Random) -> str:
        text = self._long[language]
        begin = draw.randrange(len(text) - chars)
        begin = text.find("\n", begin, len(text) - chars) + 1 or begin  # at the start of a line
        return text[begin : begin + chars]

    def _of_words(self, chars: int, draw: random.Random) -> str:
        parts: list[str] = []
        while chars > 0:
            clause = draw.choices(self._chinese, cum_weights=self._frequencies, k=draw.randint(*CLAUSE_WORDS))
            parts += [*clause, draw.choice(_MARKS)]
            chars -= sum(map(len, clause)) + 1
        return "".join(parts)


@functools.cache
def _standard_library() -> tuple[str, str]:
    """English of its documentation, and code."""
    english, code = [], []
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if not _NO_PROSE.isdisjoint(path.relative_to(root).parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (ValueError, SyntaxError):  # files that test parsers
            continue
        lines = source.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                documentation = ast.get_docstring(node)
                if documentation and len(documentation) >= DOCSTRING_CHARS_MIN:
                    english.append(documentation)
        for node in tree.body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                code.append("\n".join(lines[node.lineno - 1 : node.end_lineno]))
    return "\n\n".join(english), "\n\n\n".join(code)


def _frequent_words(path: Path) -> tuple[list[str], list[int]]:
    """Words and their frequencies, summed up."""
    counted = []
    for line in path.read_text(encoding="utf-8").splitlines():
        word, count, *_ = line.split(" ")
        if not word.isascii():
            counted.append((int(count), word))
    counted.sort(reverse=True)
    frequent = counted[:CHINESE_WORDS]
    return [word for _, word in frequent], list(itertools.accumulate(count for count, _ in frequent))
