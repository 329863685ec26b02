"""About how many tokens a part of a request stands for, where no tokenizer says. Pure.

A tenant's limits are charged by it until the engine's own count settles them, so it may not be far too low: text that
is not ASCII counts a token for each character, since that is what Chinese, Japanese and Korean take.
"""

from __future__ import annotations

from spillway_gateway.tokens.text_blocks import BYTES_PER_TOKEN

SAMPLE_CHARS = 65_536
# Parts of a message whose tokens only the engine knows: images, sound, video, files.
_MEDIA = frozenset(
    {"image_url", "image", "image_embeds", "input_image", "audio_url", "input_audio", "audio", "video_url", "video"}
    | {"file", "input_file", "source", "prompt_embeds"}
)


def text_tokens(text: str) -> int:
    """0 for an empty text. Of a long one, every so many characters are looked at."""
    if text.isascii():
        return -(-len(text) // BYTES_PER_TOKEN)
    sample = text[:: len(text) // SAMPLE_CHARS + 1]
    ascii_chars = len(sample.encode("ascii", "ignore"))
    tokens = ascii_chars / BYTES_PER_TOKEN + (len(sample) - ascii_chars)
    return max(1, round(tokens * len(text) / len(sample)))


def value_tokens(value: object) -> int:
    """Of all texts and numbers in parsed JSON but media."""
    total = 0
    rest = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, str):
            total += text_tokens(item)
        elif isinstance(item, list):
            if item and isinstance(item[0], (int, float)):
                total += len(item)
            else:
                rest += item
        elif isinstance(item, dict):
            rest += [inner for key, inner in item.items() if key not in _MEDIA]
        elif isinstance(item, (int, float)):
            total += 1
    return total


def holds_media(value: object) -> bool:
    """Whether any part is one whose tokens are not in value_tokens()."""
    rest = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, dict):
            if any(key in _MEDIA and inner is not None for key, inner in item.items()):
                return True
            rest += item.values()
        elif isinstance(item, list):
            rest += item
    return False
