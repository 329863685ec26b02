from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from spillway_connector.model_identity import folder_identity


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


def test_the_same_folder_twice(folder: Path):
    assert folder_identity(folder) == folder_identity(folder)


@pytest.mark.parametrize(
    "tensors",
    [
        {"a": b"\1" * 100_000, "b": b"\3" * 10},  # one small tensor trained
        {"a": b"\4" * 100_000, "b": b"\2" * 10},  # one large tensor trained
        {"a": b"\1" * 100_000, "c": b"\2" * 10},  # a name changed
        {"a": b"\1" * 100_001, "b": b"\2" * 10},  # a shape changed
    ],
)
def test_other_weights_are_another_model(folder: Path, tensors: dict[str, bytes]):
    before = folder_identity(folder)
    write_safetensors(folder / "model.safetensors", tensors)
    assert folder_identity(folder) != before


def test_configuration_counts_and_the_tokenizer_does_not(folder: Path):
    before = folder_identity(folder)
    (folder / "tokenizer.json").write_text('{"changed": true}')
    assert folder_identity(folder) == before
    (folder / "config.json").write_text('{"layers": 2, "rope": 1}')
    assert folder_identity(folder) != before


def test_a_damaged_header_still_gives_an_identity(folder: Path):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"x" * 5000)
    assert folder_identity(folder).startswith("weights:")
