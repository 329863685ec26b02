"""The identity of a model's weights: it changes whenever any byte of what a loader may open does.

Which files vLLM opens depends on the load format and on the model's class: subfolders, further shards, projectors
beside a GGUF file, `.pt` beside safetensors. So every file of the model's folder counts, except files that are known to
change no KV. If an operator names the version of the weights, that name and a sample of every tensor replace the digest
of all bytes.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import blake3

from spillway_connector.errors import WeightsUnknown
from spillway_connector.identity.content_digests import digests_of, file_digest, is_a_blob_of_the_hub

_SAMPLE_BYTES = 4096
_HEADER_MAX_BYTES = 1 << 28  # the format's own bound is 100 MB
_FILES_MAX = 100_000  # of one model; more is a folder of something else
_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".npy", ".npz", ".tensors"})
_NP_CACHE = "np"  # where vLLM's npcache keeps one file without a suffix for each tensor
# Keys are token ids, so the tokenizer and the defaults of sampling change no KV. Never files of weights: some models
# have an encoder that is called a tokenizer.
_WITHOUT_EFFECT = (
    *("tokenizer*", "generation_config*", "special_tokens*", "vocab*", "added_tokens*", "chat_template*", "merges.txt"),
    *("license*", "notice*", "*.md", "*.jinja", "*.lock", "*.log"),
    *("*.png", "*.jpg", "*.jpeg", "*.gif", "*.svg", "*.webp", "*.pdf", "*.mp4", "*.mp3", "*.wav"),
    # Other frameworks' weights, which vLLM cannot read.
    *("*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.ot", "*.mlmodel", "*.tflite"),
)
# These formats load safetensors if there are any, and no model of vLLM opens PyTorch's files of this name then
# (test_weights_identity.py reads its sources).
SAFETENSORS_FIRST = frozenset(
    {"auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "runai_streamer", "bitsandbytes"}
)
_BESIDE_SAFETENSORS = "pytorch_model*.bin*"
_SHARD = re.compile(r"-\d+-of-\d+(?=\.gguf$)")
# Files of an adapter that vLLM 0.23 reads (lora/lora_model.py: from_local_checkpoint; lora/peft_helper.py:
# from_local_dir).
ADAPTER_FILES = ("adapter_config.json", "adapter_model.*", "new_embeddings.*")


def folder_identity(place: Path, cache_folders: Sequence[Path] = (), load_format: str = "auto") -> str:
    """`weights:<64 hex digits>` of a local model folder or of a single file.

    Raises OSError when a file cannot be read, and WeightsUnknown if there are no weights.
    """
    return f"weights:{_digest_of(model_files(place, load_format), cache_folders).hex()}"


def sampled_identity(place: Path, load_format: str = "auto") -> str:
    """`sampled:<64 hex digits>`: sizes, headers and 4 KiB of every tensor. Changes elsewhere in a tensor are not seen.

    Raises OSError when a file cannot be read, and WeightsUnknown if there are no weights.
    """
    digest = blake3.blake3()
    for name, path in model_files(place, load_format).items():
        if path.suffix == ".safetensors":
            content = _safetensors_sample(path)
        else:
            content = _spread_sample(path) if _is_weights(name) else path.read_bytes()
        digest.update(_framed(name, content))
    return f"sampled:{digest.hexdigest()}"


def snapshot_identity(name: str, snapshot: Path, load_format: str = "auto") -> str:
    """`hub:NAME@COMMIT` of a snapshot in a hub's cache: the commit is that of every file in it.

    Files that are not links into the hub's blobs were put there by someone else (or by a file system without links):
    their bytes count too. Raises OSError, and WeightsUnknown if there are no weights.
    """
    foreign = {
        name: path for name, path in model_files(snapshot, load_format).items() if not is_a_blob_of_the_hub(path)
    }
    changed = f"+{_digest_of(foreign, cache_folders_of(snapshot)).hex()}" if foreign else ""
    return f"hub:{name}@{snapshot.name}{changed}"


def code_identity(folder: Path) -> str:
    """`code:<64 hex digits>` of the Python files of a folder. Raises OSError."""
    code = {name: path for name, path in _tree(folder) if path.suffix == ".py"}
    return f"code:{_digest_of(code).hex()}"


def model_files(place: Path, load_format: str = "auto") -> dict[str, Path]:
    """Return the files that may decide a model's KV, by their paths below the folder, in order.

    place: a folder, or a single file, with which its further shards and projectors count. Raises OSError when a folder
    cannot be read, and WeightsUnknown if there are no weights or too many files.
    """
    found = _beside(place) if place.is_file() else dict(_tree(place))
    if load_format in SAFETENSORS_FIRST:
        loaded = {path.parent for path in found.values() if path.suffix == ".safetensors"}
        for name, path in list(found.items()):
            if path.parent in loaded and fnmatch.fnmatch(path.name, _BESIDE_SAFETENSORS):
                del found[name]
    if not place.is_file() and not any(map(_is_weights, found)):
        raise WeightsUnknown(f"{place} holds no file of weights")
    return dict(sorted(found.items()))


def _beside(file: Path) -> dict[str, Path]:
    """A file with what vLLM's GGUF loader opens beside it (gguf_loader.py, gguf_utils.py)."""
    found = {file.name: file}
    stem = _SHARD.sub("", file.name)
    for path in file.parent.iterdir():
        if path.suffix == ".gguf" and path.is_file():
            is_shard = _SHARD.search(path.name) is not None and _SHARD.sub("", path.name) == stem
            if is_shard or "mmproj" in path.name:
                found[path.name] = path
    return found


def _tree(folder: Path) -> Iterator[tuple[str, Path]]:
    """(path below the folder, file) of what may count, links followed as a loader's glob follows them."""
    count = 0
    for name, path in _walk(folder, "", ()):
        if not _is_weights(name) and _is_without_effect(path.name):
            continue
        count += 1
        if count > _FILES_MAX:
            raise WeightsUnknown(f"{folder} holds more than {_FILES_MAX} files")
        yield name, path


def _walk(folder: Path, prefix: str, above: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, Path]]:
    state = folder.stat()
    here = (state.st_dev, state.st_ino)
    if here in above:  # a link to a folder that holds it
        return
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):  # caches of downloads, Git's folder: no glob finds them
            continue
        if path.is_dir():
            yield from _walk(path, f"{prefix}{path.name}/", (*above, here))
        elif path.is_file():
            yield f"{prefix}{path.name}", path


def _is_weights(name: str) -> bool:
    path = Path(name)
    return path.suffix in _WEIGHTS or (path.parent.name == _NP_CACHE and path.suffix != ".json")


def _is_without_effect(name: str) -> bool:
    return not name.endswith(".py") and any(fnmatch.fnmatchcase(name.lower(), pattern) for pattern in _WITHOUT_EFFECT)


def adapter_files(folder: Path) -> list[Path]:
    """The files of a LoRA adapter that vLLM loads, by name. Raises OSError."""
    return [path for path in _files(folder) if any(fnmatch.fnmatch(path.name, wanted) for wanted in ADAPTER_FILES)]


def adapter_digest(folder: Path) -> bytes:
    """32 bytes that change with any byte of an adapter. Raises OSError.

    Blobs of a hub's cache are read, too: their names are digests of another kind, and copies of an adapter in other
    folders must have the same digest.
    """
    return _digest_of_named((path.name, file_digest(path)) for path in adapter_files(folder))


def cache_folders_of(folder: Path) -> tuple[Path, ...]:
    """The folders that may cache digests of a folder's files: the folder itself, then the user's cache."""
    beside = folder if folder.is_dir() else folder.parent
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(caches):  # a user without a home
        return (beside,)
    name = blake3.blake3(str(beside.resolve()).encode()).hexdigest(length=16)
    return beside, Path(caches) / "spillway" / "weights" / name


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


def _digest_of(files: Mapping[str, Path], cache_folders: Sequence[Path] = ()) -> bytes:
    digests = digests_of(list(files.values()), cache_folders)
    return _digest_of_named((name, digests[path]) for name, path in files.items())


def _digest_of_named(digests: Iterable[tuple[str, str]]) -> bytes:
    whole = blake3.blake3()
    for name, digest in sorted(digests):
        whole.update(_framed(name, digest.encode()))
    return whole.digest()


def _framed(name: str, content: bytes) -> bytes:
    encoded = name.encode()
    return struct.pack("<II", len(encoded), len(content)) + encoded + content


def _safetensors_sample(path: Path) -> bytes:
    """Size, header and the middle bytes of every tensor; of a file whose header is broken, which no loader reads, as of
    one whose layout is not known. Raises OSError."""
    try:
        return _tensors_sample(path)
    except (struct.error, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return _spread_sample(path)


def _tensors_sample(path: Path) -> bytes:
    """Take a sample of every tensor of a safetensors file, whose format huggingface/safetensors describes in its
    README."""
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
            if not 0 <= first <= end <= size - data_start:
                raise ValueError("a tensor lies outside the file")
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
