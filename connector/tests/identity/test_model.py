from __future__ import annotations

import hashlib
import json
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_connector.errors import WeightsUnknown
from spillway_connector.identity import model
from spillway_connector.identity.model import (
    adapter_digest,
    cache_folders_of,
    folder_identity,
    sampled_identity,
    snapshot_identity,
)

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
    """Training on a few tokens changes rows like these, far from the middle of the tensor, which a sample looks at."""
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
    (folder / "quant_model_description.json").write_text(json.dumps({f"layer.{n}": "W8A8" for n in range(20_000)}))
    before = identity(folder)
    (folder / "quant_model_description.json").write_text(json.dumps({f"layer.{n}": "FLOAT" for n in range(20_000)}))
    assert identity(folder) != before


@IDENTITIES
def test_code_that_comes_with_the_model_counts(folder: Path, identity: Identity):
    before = identity(folder)
    (folder / "modeling_own.py").write_text("SCALE = 2")
    assert identity(folder) != before


@IDENTITIES
@pytest.mark.parametrize(
    "name",
    [
        "transformer/diffusion_pytorch_model.safetensors",
        "vision_encoder/model.safetensors",
        "whisper-large-v3/config.json",
        "audio_tokenizer/pytorch_model.bin",
        "speech_tokenizer.pth",  # an encoder, whatever it is called
        "tokenizer_v2.safetensors",
        "a/b/c/d/weights.ckpt",
        "sparse_linear.pt",  # beside safetensors, which some models load too
        "consolidated.safetensors",
        "model-00002-of-00002.gguf",
        "np/model.layers.0.weight",  # what npcache reads again instead of the files
        "np/weight_names.json",
        "code/modeling_own.py",
        "tokenizer_of_media.py",
        "scales.npz",
        "unheard.of",
    ],
)
def test_whatever_a_loader_may_open_below_the_folder_counts(folder: Path, identity: Identity, name: str):
    without = identity(folder)
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"\1" * 64)
    ours = identity(folder)
    (folder / name).write_bytes(b"\1" * 63 + b"\2")
    assert len({without, ours, identity(folder)}) == 3


@IDENTITIES
def test_weights_that_lie_in_subfolders_alone(tmp_path: Path, identity: Identity):
    seen = set()
    for number in (1, 2):
        folder = tmp_path / str(number)
        (folder / "transformer").mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        write_safetensors(folder / "transformer" / "model.safetensors", {"a": bytes([number]) * 100})
        seen.add(identity(folder))
    assert len(seen) == 2


@IDENTITIES
def test_files_that_change_places_are_another_model(folder: Path, identity: Identity):
    """Two encoders of one size, in folders that say which is which."""
    for name, content in (("one", b"\1"), ("two", b"\2")):
        (folder / name).mkdir()
        (folder / name / "model.bin").write_bytes(content)
    before = identity(folder)
    (folder / "one").rename(folder / "held")
    (folder / "two").rename(folder / "one")
    (folder / "held").rename(folder / "two")
    assert identity(folder) != before


@IDENTITIES
def test_linked_folders_are_followed_and_rings_end(folder: Path, tmp_path_factory: pytest.TempPathFactory, identity):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "model.safetensors").write_bytes(b"\1" * 64)
    (folder / "encoder").symlink_to(elsewhere)
    (elsewhere / "ring").symlink_to(folder)
    before = identity(folder)
    (elsewhere / "model.safetensors").write_bytes(b"\2" * 64)
    assert identity(folder) != before


@IDENTITIES
def test_a_folder_that_cannot_be_read_is_an_error(folder: Path, identity: Identity, monkeypatch: pytest.MonkeyPatch):
    (folder / "encoder").mkdir()
    listed = Path.iterdir

    def iterdir(path: Path) -> Iterator[Path]:
        if path.name == "encoder":
            raise PermissionError(path)
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    with pytest.raises(PermissionError):
        identity(folder)


@IDENTITIES
@pytest.mark.parametrize(
    "name", ["README.md", ".cache/huggingface/x.metadata", "model.onnx", "assets/a.png", "LICENSE"]
)
def test_what_no_loader_opens_splits_nothing(folder: Path, identity: Identity, name: str):
    before = identity(folder)
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"text")
    assert identity(folder) == before


@IDENTITIES
def test_a_folder_without_weights_has_no_identity(folder: Path, identity: Identity):
    (folder / "model.safetensors").unlink()
    (folder / "np").mkdir()
    (folder / "np" / "weight_names.json").write_text("[]")
    with pytest.raises(WeightsUnknown, match="holds no file of weights"):
        identity(folder)


def test_a_folder_of_something_else_has_no_identity(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(model, "_FILES_MAX", 3)
    for number in range(3):
        (folder / f"{number}.bin").write_bytes(b"x")
    with pytest.raises(WeightsUnknown, match="more than 3 files"):
        folder_identity(folder)


@pytest.mark.parametrize("load_format", ["auto", "safetensors", "runai_streamer"])
def test_pytorch_files_beside_safetensors_are_not_read_where_vllm_prefers_those(folder: Path, load_format: str):
    before = folder_identity(folder, load_format=load_format)
    (folder / "pytorch_model-00001-of-00002.bin").write_bytes(b"x" * 100)
    assert folder_identity(folder, load_format=load_format) == before
    (folder / "model.safetensors").unlink()
    assert folder_identity(folder, load_format=load_format) != before


@pytest.mark.parametrize("load_format", ["pt", "npcache", "a_plugins"])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_another_format_loads_pytorch_files_beside_safetensors(folder: Path, load_format: str, name: str):
    (folder / name).write_bytes(b"x" * 100)
    before = folder_identity(folder, load_format=load_format)
    (folder / name).write_bytes(b"y" * 100)
    assert folder_identity(folder, load_format=load_format) != before


def test_a_single_file_is_a_model_too(tmp_path: Path):
    (tmp_path / "a.gguf").write_bytes(b"one")
    before = folder_identity(tmp_path / "a.gguf")
    (tmp_path / "b.gguf").write_bytes(b"another model beside it")
    assert folder_identity(tmp_path / "a.gguf") == before
    (tmp_path / "a.gguf").write_bytes(b"two")
    assert folder_identity(tmp_path / "a.gguf") != before


@IDENTITIES
@pytest.mark.parametrize(
    "other", ["m-00002-of-00003.gguf", "m-00003-of-00003.gguf", "mmproj.gguf", "m-mmproj-f16.gguf"]
)
def test_the_shards_and_the_projector_of_a_gguf_file_count(tmp_path: Path, identity: Identity, other: str):
    first = tmp_path / "m-00001-of-00003.gguf"
    first.write_bytes(b"one")
    (tmp_path / other).write_bytes(b"two")
    before = identity(first)
    (tmp_path / other).write_bytes(b"six")
    assert identity(first) != before


def test_a_snapshot_of_a_hub_is_its_commit_and_what_was_changed_in_it(tmp_path: Path):
    snapshot, blobs = tmp_path / "snapshots" / ("c" * 40), tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name, blob in (("config.json", "1" * 40), ("model.safetensors", "2" * 64)):
        (blobs / blob).write_bytes(b"content")
        (snapshot / name).symlink_to(blobs / blob)
    assert snapshot_identity("org/m", snapshot) == f"hub:org/m@{'c' * 40}"
    (snapshot / "model.safetensors").unlink()
    seen = set()
    for content in (b"one", b"two"):
        (snapshot / "model.safetensors").write_bytes(content)
        seen.add(snapshot_identity("org/m", snapshot))
    assert len(seen) == 2
    assert all(one.startswith(f"hub:org/m@{'c' * 40}+") for one in seen)
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(WeightsUnknown):
        snapshot_identity("org/m", snapshot)


@given(st.dictionaries(st.sampled_from(["a.bin", "x/a.bin", "y/a.bin", "x/y/a.pt"]), st.binary(max_size=3), min_size=1))
def test_equal_trees_and_no_others_have_one_identity(files: dict[str, bytes]):
    def identity_of(content: dict[str, bytes]) -> str:
        with tempfile.TemporaryDirectory() as place:
            for name, data in content.items():
                (Path(place) / name).parent.mkdir(parents=True, exist_ok=True)
                (Path(place) / name).write_bytes(data)
            return folder_identity(Path(place))

    ours = identity_of(files)
    assert identity_of(dict(reversed(files.items()))) == ours
    for name, content in files.items():
        assert identity_of({**files, name: content + b"\0"}) != ours


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


@pytest.mark.parametrize(
    "damaged",
    [
        *(b"", b"abc", struct.pack("<Q", 1 << 60) + b"x" * 100, struct.pack("<Q", 5) + b"{abc}"),
        *(struct.pack("<Q", len(header)) + header + b"x" * 100 for header in (b"[]", b'{"a":{}}', b"[" * 20_000)),
        *(
            struct.pack("<Q", len(header)) + header + b"x" * 100
            for header in (b'{"a":{"data_offsets":[%s]}}' % places for places in (b"-500,-1", b'"a",1', b"0", b"0,999"))
        ),
    ],
)
def test_a_damaged_header_still_gives_an_identity(folder: Path, damaged: bytes):
    (folder / "damaged.safetensors").write_bytes(damaged)
    found = sampled_identity(folder)
    (folder / "damaged.safetensors").write_bytes(damaged + b"more")

    assert found.startswith("sampled:") and sampled_identity(folder) != found


def test_an_adapter_in_a_hub_s_cache_is_that_of_its_copies(tmp_path: Path):
    copy, snapshot, blobs = (tmp_path / name for name in ("copy", "snapshot", "blobs"))
    for place in (copy, snapshot, blobs):
        place.mkdir()
    for name, content in (("adapter_config.json", b"{}"), ("adapter_model.safetensors", b"weights")):
        (copy / name).write_bytes(content)
        blob = blobs / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        (snapshot / name).symlink_to(blob)

    assert adapter_digest(snapshot) == adapter_digest(copy)
    blob.write_bytes(b"others!")  # under the name of what it was
    assert adapter_digest(snapshot) != adapter_digest(copy)


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
