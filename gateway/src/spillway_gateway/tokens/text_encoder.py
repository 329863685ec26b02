"""Text to token ids: by the library fastokens if it gives the ids of Hugging Face's tokenizers, else by the latter.

fastokens takes about a thirtieth of the time, which is what new text costs the gateway, but it is another
implementation of the same file. So it is used only if it reads the file and agrees on the probes below, one text in
CHECK_INTERVAL_TEXTS is encoded by both, and the first difference ends its use. A wrong id would cost a match, never an
answer: the engine tokenises for itself.

Neither library keeps a tenant's words for another's texts, because timing would then reveal a word that another tenant
has sent: fast_tokenizer.py handles fastokens, and tokenizers gets a cache of no words.
"""

from __future__ import annotations

import itertools
import logging

import tokenizers

from spillway_gateway.routing.prefix import token_bytes
from spillway_gateway.tokens.fast_tokenizer import FastTokenizer

logger = logging.getLogger(__name__)

CHECK_INTERVAL_TEXTS = 4_096  # each takes tens of times as long as without the check
CHECK_CHARS_MAX = 4_096  # of a text that both encode, perhaps on the event loop: some 3 ms
_PROBES = (
    "",
    " ",
    "The quick brown fox, who had read README.md twice, didn't jump; it's 9 p.m. and 12,345 foxes sleep.",
    "  Indented code:\n\tfor item in items: print(item)  # no comment\n\n\nEnd. A b C d\r\n\r\n \t\n x",
    "Gr\u00fc\u00dfe aus K\u00f6ln! Na\u00efve caf\u00e9 owners say: "
    "\u6771\u4eac\u306f\u9060\u3044\uff0c\u5bf9\u5417\uff1f \U0001f642 yes... no?! ok",
    "I'll WE'VE they'd o'clock CamelCase snake_case kebab-case UPPER 3rd x2 a1 \ufb01\u0130\u017f \u00bd\u00b2",
    "Order 66 of 2024-05-04: 3 x 19.99, no. 7;8 (12%) v1.2.3 user42 42nd\n1. one\n\n22 two\t3  4   5 \u0663\u0664",
    "e\u0301 \u0301 \u00a0\u3000\u2003\u200d\ufe0f \U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea "
    "\x00\x01\x7f\x85\u2028\ufeff\ufffd\U0001f9ff",
    "\u05e2\u05d1\u05e8\u05d9\u05ea \u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u0e44\u0e17\u0e22 "
    "\u0939\u093f\u0928\u094d\u0926\u0940 \ud55c\uad6d\uc5b4 \u1100\u1161 {}[]()<>!@#$%^&*~`\"'|\\/_-+=",
    "https://example.org/a?b=c&d=%20#e <p class='x'>&amp;</p> SELECT * FROM t WHERE a >= 10 -- \u4e2d\u6587\u3002",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" + " " * 70 + "\n" * 20 + "=" * 70,
)


class TextEncoder:
    """Encodes any text by one tokenizer.json. encode() releases the interpreter lock while it works."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        _keep_no_words(tokenizer)
        self._texts = itertools.count(1)  # atomic: the event loop and the tokenizer threads share it
        self._fast = self._load_fast()

    @property
    def fast(self) -> bool:
        """Whether new text costs about 30 us, and not 1 ms, per 2,000 characters."""
        return self._fast is not None

    def is_fast_for(self, text: str) -> bool:
        """Whether this text, if new, is encoded as `fast` says."""
        return self._fast is not None and (not self._fast.left_out or self._fast.left_out not in text)

    def encode(self, text: str, *, add_special_tokens: bool, owner: str = "") -> bytes:
        """Return ids as little-endian uint32. owner: the tenant. Raises UnicodeEncodeError for lone surrogates."""
        fast = self._fast
        if fast is None:
            return self._encode_exactly(text, add_special_tokens)
        try:
            ids = fast.encode(text, add_special_tokens, owner)
        except UnicodeEncodeError:
            raise
        except ValueError:  # a byte that the vocabulary lacks, or what the other library would refuse as well
            return self._encode_exactly(text, add_special_tokens)
        if len(text) <= CHECK_CHARS_MAX and not next(self._texts) % CHECK_INTERVAL_TEXTS:
            exact = self._encode_exactly(text, add_special_tokens)
            if exact not in (ids, fast.encode(text, add_special_tokens, owner)):  # twice: a merge may have been dropped
                logger.error("fastokens gave other ids than tokenizers for one text; it is not used any more")
                self._fast = None
            return exact
        return ids

    def _encode_exactly(self, text: str, add_special_tokens: bool) -> bytes:
        # The batch form is the one that releases the lock; "fast" leaves out character offsets.
        try:
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError:
            text.encode()  # raises for lone surrogates
            raise
        return token_bytes(encoding.ids)

    def _words_of(self, text: str) -> list[str]:
        """Return the words into which the pre-tokenizer splits the text."""
        normalizer, pre_tokenizer = self._tokenizer.normalizer, self._tokenizer.pre_tokenizer
        if normalizer is not None:
            text = normalizer.normalize_str(text)
        return [text] if pre_tokenizer is None else [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]

    def _load_fast(self) -> FastTokenizer | None:
        if len(self._words_of(_PROBES[2])) < len(_PROBES[2].split()):
            logger.info("fastokens is not used: the tokenizer does not split text into words")
            return None
        try:
            fast = FastTokenizer(self._tokenizer.to_str())
        except Exception as error:  # of a model or a rule that it does not have
            logger.info("fastokens does not read this tokenizer, tokenizers does: %s", error)
            return None
        if fast.left_out and not _refuses(fast, 2 * fast.left_out):
            logger.warning("fastokens would keep words of this tokenizer from text to text; it is not used")
            return None
        specials = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()][:3]
        probes = [*_PROBES, *(f"{probe}{special} {probe}\n{special}" for special in specials for probe in _PROBES)]
        for probe, add_special_tokens in itertools.product(probes, (False, True)):
            try:
                ids = fast.encode(probe, add_special_tokens)
            except ValueError:  # then encode() falls back, too
                continue
            if ids != self._encode_exactly(probe, add_special_tokens):
                logger.warning("fastokens gives other ids than tokenizers for %r; it is not used", probe)
                return None
        return fast


def _refuses(fast: FastTokenizer, text: str) -> bool:
    try:
        fast.encode(text, add_special_tokens=False)
    except ValueError:
        return True
    return False


def _keep_no_words(tokenizer: tokenizers.Tokenizer) -> None:
    """Keep tokenizers from caching 10,000 words of a model, of all senders. Models without a cache lack the method."""
    resize = getattr(tokenizer.model, "_resize_cache", None)
    if resize is not None:
        resize(0)
