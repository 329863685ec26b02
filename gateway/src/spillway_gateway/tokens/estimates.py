"""Estimates of token counts if no tokenizer is available. Pure.

Tenants' limits are charged by the estimate until the engine's count settles them, so it must not be far too low: each
character that is not ASCII counts as one token, as in Chinese, Japanese and Korean.
"""

from __future__ import annotations

from spillway_gateway.tokens.text_blocks import BYTES_PER_TOKEN

SAMPLE_CHARS = 65_536
# Parts of a message whose tokens only the engine can count: images, sound, video, files.
_MEDIA = frozenset(
    {"image_url", "image", "image_embeds", "input_image", "audio_url", "input_audio", "audio", "video_url", "video"}
    | {"file", "input_file", "source", "prompt_embeds"}
)


def text_tokens(text: str) -> int:
    """Return the estimated tokens; 0 for an empty text. Long texts are sampled at SAMPLE_CHARS characters."""
    if text.isascii():
        return -(-len(text) // BYTES_PER_TOKEN)
    sample = text[:: len(text) // SAMPLE_CHARS + 1]
    ascii_chars = len(sample.encode("ascii", "ignore"))
    tokens = ascii_chars / BYTES_PER_TOKEN + (len(sample) - ascii_chars)
    return max(1, round(tokens * len(text) / len(sample)))


def value_tokens(value: object) -> int:
    """Estimated tokens of all texts and numbers in parsed JSON, without media."""
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
    """Whether any part is media, whose tokens value_tokens() leaves out."""
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
