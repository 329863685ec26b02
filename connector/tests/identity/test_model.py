from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from spillway_connector.identity.model import adapter_digest, cache_folders_of, folder_identity, sampled_identity

IDENTITIES = pytest.mark.parametrize("identity", [folder_identity, sampled_identity])
Identity = Callable[[Path], str]


def write_safetensors(path: Path, tensors: dict[str, bytes]) -> None:
    header, offset = {}, 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + b"".join(tensors.values()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"layers": 2}')
    (tmp_path / "tokenizer.json").write_text("{}")
    write_safetensors(tmp_path / "model.safetensors", {"a": b"\1" * 100_000, "b": b"\2" * 10})
    return tmp_path


@IDENTITIES
def test_the_same_folder_twice(folder: Path, identity: Identity):
    assert identity(folder) == identity(folder)


@IDENTITIES
@pytest.mark.parametrize(
    "tensors",
    [
        {"a": b"\1" * 100_000, "b": b"\3" * 10},  # one small tensor trained
        {"a": b"\4" * 100_000, "b": b"\2" * 10},  # one large tensor trained
        {"a": b"\1" * 100_000, "c": b"\2" * 10},  # a name changed
        {"a": b"\1" * 100_001, "b": b"\2" * 10},  # a shape changed
    ],
)
def test_other_weights_are_another_model(folder: Path, identity: Identity, tensors: dict[str, bytes]):
    before = identity(folder)
    write_safetensors(folder / "model.safetensors", tensors)
    assert identity(folder) != before


def test_thirty_of_512_embeddings_changed(folder: Path):
    """As after training on a few tokens: far from the middle of the tensor, which a sample would look at."""
    rows = [bytes([row % 251]) * 2048 for row in range(512)]
    write_safetensors(folder / "model.safetensors", {"embeddings": b"".join(rows)})
    before, sampled = folder_identity(folder), sampled_identity(folder)
    rows[:30] = [b"\xff" * 2048] * 30
    write_safetensors(folder / "model.safetensors", {"embeddings": b"".join(rows)})
    assert folder_identity(folder) != before
    assert sampled_identity(folder) == sampled  # what an operator who names a version vouches for


@IDENTITIES
def test_configuration_counts_and_the_tokenizer_does_not(folder: Path, identity: Identity):
    before = identity(folder)
    (folder / "tokenizer.json").write_text('{"changed": true}')
    (folder / "chat_template.json").write_text("{}")
    assert identity(folder) == before
    (folder / "config.json").write_text('{"layers": 2, "rope": 1}')
    assert identity(folder) != before


@IDENTITIES
def test_a_long_description_of_the_quantisation_counts(folder: Path, identity: Identity):
    (folder / "quant_model_description.json").write_text(json.dumps({f"layer.{n}": "W8A8" for n in range(100_000)}))
    before = identity(folder)
    (folder / "quant_model_description.json").write_text(json.dumps({f"layer.{n}": "FLOAT" for n in range(100_000)}))
    assert identity(folder) != before


@IDENTITIES
def test_code_that_comes_with_the_model_counts(folder: Path, identity: Identity):
    before = identity(folder)
    (folder / "modeling_own.py").write_text("SCALE = 2")
    assert identity(folder) != before


def test_what_vllm_does_not_load_beside_safetensors_is_not_read(folder: Path):
    before = folder_identity(folder)
    (folder / "pytorch_model.bin").write_bytes(b"x" * 100)
    assert folder_identity(folder) == before
    (folder / "model.safetensors").unlink()
    assert folder_identity(folder) != before


def test_a_single_file_is_a_model_too(tmp_path: Path):
    (tmp_path / "a.gguf").write_bytes(b"one")
    before = folder_identity(tmp_path / "a.gguf")
    (tmp_path / "a.gguf").write_bytes(b"two")
    assert folder_identity(tmp_path / "a.gguf") != before


def test_remembering_changes_nothing(folder: Path):
    assert folder_identity(folder, [folder]) == folder_identity(folder, [folder]) == folder_identity(folder)


def test_digests_are_remembered_beside_the_weights_or_in_the_cache(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    beside, cache = cache_folders_of(folder)
    assert beside == folder
    assert cache.is_relative_to("/cache/spillway/weights")
    assert cache != cache_folders_of(folder.parent)[1]
    assert cache_folders_of(folder / "model.safetensors")[0] == folder
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "")  # a container's user without an entry in passwd
    assert cache_folders_of(folder)[0] == folder


def test_a_damaged_header_still_gives_an_identity(folder: Path):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"x" * 5000)
    assert sampled_identity(folder).startswith("sampled:")
    assert folder_identity(folder).startswith("weights:")


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "new_embeddings.safetensors"])
def test_every_file_of_an_adapter_counts(tmp_path: Path, name: str):
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    (tmp_path / "optimizer.pt").write_bytes(b"of no effect")
    before = adapter_digest(tmp_path)
    (tmp_path / "optimizer.pt").unlink()
    assert adapter_digest(tmp_path) == before
    (tmp_path / name).write_bytes(b"other")
    assert adapter_digest(tmp_path) != before
