"""Whose KV is it: an identity of a model's weights that changes whenever any tensor does.

Reading all weights would take minutes on large models, so a folder is identified by its configuration in full and,
per safetensors file, the header (names, shapes, places) and a sample of every tensor's bytes. Training moves every
value of a tensor it touches, so a sample of each tensor tells two sets of weights apart.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import blake3

_SAMPLE_BYTES = 4096
_SMALL_FILE_BYTES = 1 << 20
_HEADER_MAX_BYTES = 1 << 28  # the format's own bound is 100 MB
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def folder_identity(folder: Path) -> str:
    """`weights:<64 hex digits>` of a local model folder. Raises OSError when a file cannot be read."""
    digest = blake3.blake3()
    for path in sorted(folder.iterdir()):
        if not path.is_file():
            continue
        if path.suffix == ".json" and path.stat().st_size <= _SMALL_FILE_BYTES and _shapes_the_computation(path):
            digest.update(_framed(path.name, path.read_bytes()))
        elif path.suffix == ".safetensors":
            digest.update(_framed(path.name, _safetensors_sample(path)))
        elif path.suffix in _WEIGHT_SUFFIXES:
            digest.update(_framed(path.name, _spread_sample(path)))
    return f"weights:{digest.hexdigest()}"


def _shapes_the_computation(path: Path) -> bool:
    """The tokenizer and the generation defaults do not change what a token's KV is; keys are token ids."""
    return not path.name.startswith(("tokenizer", "generation_config", "special_tokens", "vocab", "added_tokens"))


def _framed(name: str, content: bytes) -> bytes:
    encoded = name.encode()
    return struct.pack("<II", len(encoded), len(content)) + encoded + content


def _safetensors_sample(path: Path) -> bytes:
    """Size, header and the middle bytes of every tensor (format: huggingface/safetensors, README)."""
    size = path.stat().st_size
    with path.open("rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        if header_bytes > min(size, _HEADER_MAX_BYTES):
            return _spread_sample(path)
        header = file.read(header_bytes)
        parts = [struct.pack("<Q", size), header]
        data_start = 8 + header_bytes
        for name, tensor in sorted(json.loads(header).items()):
            if name == "__metadata__":
                continue
            first, end = tensor["data_offsets"]
            length = min(_SAMPLE_BYTES, end - first)
            file.seek(data_start + first + (end - first - length) // 2)
            parts.append(file.read(length))
    return b"".join(parts)


def _spread_sample(path: Path) -> bytes:
    """Size and 256 samples spread over a file whose inner layout we do not read."""
    size = path.stat().st_size
    step = max(1, size // 256)
    with path.open("rb") as file:
        parts = [struct.pack("<Q", size)]
        for offset in range(0, size, step):
            file.seek(offset)
            parts.append(file.read(min(_SAMPLE_BYTES, step)))
    return b"".join(parts)
