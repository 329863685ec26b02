"""The identity of a model's weights: it changes whenever any byte of them does.

Every byte of the files that a model is loaded from counts (content_digests.py reads each file once). Where an operator
names the version of the weights, that name and a sample of every tensor replace the digest of all bytes.
"""

from __future__ import annotations

import fnmatch
import json
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

import blake3

from spillway_connector.identity.content_digests import digests_of

_SAMPLE_BYTES = 4096
_HEADER_MAX_BYTES = 1 << 28  # the format's own bound is 100 MB
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf")  # what a folder without safetensors is loaded from
# The tokenizer and the generation defaults do not change what a token's KV is; keys are token ids.
_WITHOUT_EFFECT = ("tokenizer*", "generation_config*", "special_tokens*", "vocab*", "added_tokens*", "chat_template*")
# What vLLM 0.23 reads of an adapter (lora/lora_model.py: from_local_checkpoint; lora/peft_helper.py: from_local_dir).
ADAPTER_FILES = ("adapter_config.json", "adapter_model.*", "new_embeddings.*")


def folder_identity(folder: Path, cache_folders: Sequence[Path] = ()) -> str:
    """`weights:<64 hex digits>` of a local model folder or of a single file. Raises OSError."""
    paths = _weight_files(folder) + _code_and_configuration(folder)
    return f"weights:{_digest_of_named(digests_of(paths, cache_folders).items()).hex()}"


def sampled_identity(folder: Path) -> str:
    """`sampled:<64 hex digits>`: sizes, headers and 4 KiB of every tensor. Changes elsewhere in a tensor are not seen.

    Raises OSError when a file cannot be read.
    """
    digest = blake3.blake3()
    for path in _code_and_configuration(folder):
        digest.update(_framed(path.name, path.read_bytes()))
    for path in _weight_files(folder):
        sample = _safetensors_sample(path) if path.suffix == ".safetensors" else _spread_sample(path)
        digest.update(_framed(path.name, sample))
    return f"sampled:{digest.hexdigest()}"


def adapter_files(folder: Path) -> list[Path]:
    """The files of a LoRA adapter that vLLM loads, by name. Raises OSError."""
    return [path for path in _files(folder) if any(fnmatch.fnmatch(path.name, wanted) for wanted in ADAPTER_FILES)]


def adapter_digest(folder: Path) -> bytes:
    """32 bytes that change with any byte of an adapter. Raises OSError."""
    return _digest_of_named(digests_of(adapter_files(folder)).items())


def cache_folders_of(folder: Path) -> tuple[Path, ...]:
    """Where digests of a folder's files are cached: beside them or, where that is read-only, in the user's cache."""
    beside = folder if folder.is_dir() else folder.parent
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(caches):  # a user without a home
        return (beside,)
    name = blake3.blake3(str(beside.resolve()).encode()).hexdigest(length=16)
    return beside, Path(caches) / "spillway" / "weights" / name


def _weight_files(folder: Path) -> list[Path]:
    """Where there are safetensors, vLLM loads nothing else."""
    if folder.is_file():
        return [folder]
    files = _files(folder)
    safetensors = [path for path in files if path.suffix == ".safetensors"]
    return safetensors or [path for path in files if path.suffix in _OTHER_WEIGHTS]


def _code_and_configuration(folder: Path) -> list[Path]:
    if folder.is_file():
        return []
    return [
        path
        for path in _files(folder)
        if path.suffix in (".json", ".py")
        and not any(fnmatch.fnmatch(path.name, pattern) for pattern in _WITHOUT_EFFECT)
    ]


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


def _digest_of_named(digests: Iterable[tuple[Path, str]]) -> bytes:
    whole = blake3.blake3()
    for path, digest in sorted(digests):
        whole.update(_framed(path.name, digest.encode()))
    return whole.digest()


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
