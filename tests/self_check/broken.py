"""Damages of an engine, for the tests and for the table of `python -m self_check`."""

from __future__ import annotations

# (method of Sabotage, its arguments). Refused in every dtype.
BROKEN: dict[str, tuple[str, ...]] = {
    "layers 8 and 9 swapped": ("swap_layers", "8", "9"),
    "layers 3 and 27 swapped": ("swap_layers", "3", "27"),
    "value projection of layer 0 x 1.5": ("scale_projection", "0", "qkv_proj.v", "1.5"),
    "down projection of layer 29 x 1.5": ("scale_projection", "29", "down_proj", "1.5"),
    "output projection of every layer x 1.5": ("scale_projection", "all", "o_proj", "1.5"),
    "RoPE base 10,000 instead of 100,000": ("rope_base", "10000"),
    "KV one slot off, always": ("kv_slot_off", "always"),
    "KV one slot off, in decode steps": ("kv_slot_off", "decode"),
    "embeddings of the next token": ("foreign_embeddings", "shifted"),
    "random embeddings of the same scale": ("foreign_embeddings", "random"),
}
# Near or below what bfloat16 rounds: shown in the table, refused or not.
SUBTLE: dict[str, tuple[str, ...]] = {
    "layers 5 and 6 swapped": ("swap_layers", "5", "6"),
    "layers 16 and 17 swapped": ("swap_layers", "16", "17"),
    "query projection of layer 12 x 1.5": ("scale_projection", "12", "qkv_proj.q", "1.5"),
    "query projection of every layer x 1.5": ("scale_projection", "all", "qkv_proj.q", "1.5"),
}
