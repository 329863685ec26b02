"""A model is identified by what it was loaded from, wherever that is; if that is unknown, nothing is shared."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import vllm
from transformers import PretrainedConfig
from vllm.config import LoadConfig, ModelConfig, MultiModalConfig, SpeculativeConfig, VllmConfig
from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER as FORMATS
from vllm.model_executor.model_loader.tensorizer import TensorizerConfig

from spillway_connector.engine.namespace.weights_identity import (
    LOCAL_FORMATS,
    SECONDARY_FIELDS,
    drafter_identity,
    weights_facts,
)
from spillway_connector.errors import WeightsUnknown
from spillway_connector.identity.model import SAFETENSORS_FIRST
from spillway_connector.testing.vllm_parts import part_of

COMMIT = "c" * 40
MODELS = [*(Path(vllm.__file__).parent / "model_executor/models").rglob("*.py")]
MODELS += (Path(vllm.__file__).parent / "models").rglob("*.py")


def write_model(folder: Path, weights: bytes = b"\1" * 64, name: str = "model.safetensors") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / name).write_bytes(weights)
    return str(folder)


def write_to_the_hubs_cache(cache: Path, name: str, commit: str = COMMIT, weights: bool = True) -> Path:
    repository = cache / ("models--" + name.replace("/", "--"))
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir(exist_ok=True)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    for file in ("config.json", "modeling_own.py", *(["model.safetensors"] if weights else [])):
        (repository / "blobs" / file.partition(".")[0].ljust(64, "0")).write_bytes(b"content")
        (snapshot / file).symlink_to(repository / "blobs" / file.partition(".")[0].ljust(64, "0"))
    return snapshot


def engine(
    model: str, load: dict[str, Any] | None = None, config: dict[str, Any] | None = None, **fields: Any
) -> VllmConfig:
    """The part of vLLM's configuration that says where the weights come from."""
    of_model = {
        "model": model,
        "model_weights": "",
        "revision": None,
        "code_revision": None,
        "seed": 0,
        "trust_remote_code": False,
        "hf_config": part_of(PretrainedConfig, to_dict=lambda: config or {}),
        "hf_overrides": {},
        "multimodal_config": None,
    }
    of_load = {"load_format": "auto", "model_loader_extra_config": {}, "download_dir": None}
    return part_of(
        VllmConfig,
        model_config=part_of(ModelConfig, **{**of_model, **fields}),
        load_config=part_of(LoadConfig, **{**of_load, **(load or {})}),
        speculative_config=None,
    )


def facts(config: Any, *, pinned: bool = False) -> dict[str, Any]:
    return weights_facts(config, pinned=pinned)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


# --- formats ---------------------------------------------------------------------------------------------------------


def test_every_format_of_this_vllm_is_local_or_not_known_to_be():
    elsewhere = {"dummy", "tensorizer", "modelexpress", "ipc_cache"}
    assert set(FORMATS) <= LOCAL_FORMATS | elsewhere, "a new format: may its loader read from anywhere else?"
    assert SAFETENSORS_FIRST <= LOCAL_FORMATS


@pytest.mark.parametrize(
    ("load", "says"),
    [
        ({"load_format": "tensorizer", "model_loader_extra_config": {"tensorizer_uri": "s3://b/m"}}, "tensorizer"),
        ({"load_format": "modelexpress"}, "modelexpress"),
        ({"load_format": "netloader"}, "netloader"),
        ({"load_format": "sharded_state", "model_loader_extra_config": {"pattern": "../other/{rank}"}}, "pattern"),
        (
            {"model_loader_extra_config": part_of(TensorizerConfig, tensorizer_uri="s3://b/m")},
            "model_loader_extra_config",
        ),
    ],
)
def test_weights_from_elsewhere_are_not_shared_unless_their_version_is_named(
    tmp_path: Path, load: dict[str, Any], says: str
):
    config = engine(write_model(tmp_path / "m"), load)
    with pytest.raises(WeightsUnknown, match=rf"{says}.*weights_version.*turn the shared tier off"):
        facts(config)
    assert facts(config, pinned=True)["weights"].startswith("sampled:")


def test_settings_of_a_loader_that_name_no_place_are_fine(tmp_path: Path):
    load = {"load_format": "sharded_state", "model_loader_extra_config": {"pattern": "own-{rank}-{part}.safetensors"}}
    assert facts(engine(write_model(tmp_path / "m"), load))["weights"].startswith("weights:")


@pytest.mark.parametrize("load_format", sorted(LOCAL_FORMATS))
def test_nothing_found_is_nothing_shared_whatever_the_format(tmp_path: Path, load_format: str):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    config = engine(str(tmp_path / "m"), {"load_format": load_format})
    with pytest.raises(WeightsUnknown, match="holds no file of weights"):
        facts(config)
    assert facts(config, pinned=True)["weights"] == f"named:{tmp_path / 'm'}"


@pytest.mark.parametrize("name", ["s3://bucket/m", "gs://bucket/m", "org/m:Q4_K_M", "org/m/file.gguf", "org/m"])
def test_what_is_neither_a_folder_nor_in_the_hubs_cache_is_not_shared(hub: Path, name: str):
    with pytest.raises(WeightsUnknown, match="weights_version"):
        facts(engine(name))


def test_weights_that_cannot_be_read_are_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = engine(write_model(tmp_path / "m"))

    def unreadable(*_: object) -> str:
        raise PermissionError("model.safetensors")

    monkeypatch.setattr("spillway_connector.engine.namespace.weights_identity.folder_identity", unreadable)
    with pytest.raises(WeightsUnknown, match="cannot be read"):
        facts(config)


# --- other places ----------------------------------------------------------------------------------------------------


def test_the_models_folder_and_the_override_both_count(tmp_path: Path):
    """Some loaders read `model_weights`, others `model`."""
    ours, theirs = write_model(tmp_path / "a"), write_model(tmp_path / "b", b"\2" * 64)
    seen = [facts(engine(model, model_weights=other)) for model in (ours, theirs) for other in (ours, theirs)]
    assert len({str(one) for one in seen}) == 4


@pytest.mark.parametrize("field", sorted(SECONDARY_FIELDS))
def test_a_model_whose_class_loads_another_one(tmp_path: Path, hub: Path, field: str):
    adaptor = write_model(tmp_path / "adaptor")
    seen = {str(facts(engine(adaptor)))}
    for number in (1, 2):
        language = write_model(tmp_path / str(number), bytes([number]) * 64)
        seen.add(str(facts(engine(adaptor, config={field: language}))))
    write_to_the_hubs_cache(hub, "org/language")
    of_hub = facts(engine(adaptor, config={field: "org/language"}))
    assert of_hub["secondary_weights"] == {field: f"hub:org/language@{COMMIT}"}
    assert len(seen) == 3
    with pytest.raises(WeightsUnknown, match="org/unknown"):
        facts(engine(adaptor, config={field: "org/unknown"}))


def test_a_name_of_a_model_that_nothing_opens_splits_nothing(tmp_path: Path, hub: Path):
    folder = write_model(tmp_path / "m")
    assert facts(engine(folder, config={"base_model_name_or_path": "org/m"})) == facts(engine(folder))
    write_to_the_hubs_cache(hub, "org/m")
    named = facts(engine(folder, config={"vision": {"vit_model_name": "org/m"}}))
    assert named["secondary_weights"] == {"vision.vit_model_name": f"hub:org/m@{COMMIT}"}


def test_every_second_model_that_vllms_classes_load_is_known():
    """A new class that loads from another place fails here until its field is in SECONDARY_FIELDS."""
    sources = {
        source
        for path in MODELS
        for source in re.findall(r"model_or_path=([\w.]+)", path.read_text())
        if not source.endswith("model_config.model")
    }
    assert sources <= {f"config.{field}" for field in SECONDARY_FIELDS}
    assert sources


def test_no_class_of_vllm_loads_pytorch_files_that_lie_beside_safetensors():
    patterns = [
        pattern
        for path in MODELS
        for listed in re.findall(r"allow_patterns_overrides\s*=\s*\[(.{0,300})", path.read_text(), re.DOTALL)
        for pattern in re.findall(r'"([^"\n]+)"', listed)
    ]
    assert patterns
    assert not [pattern for pattern in patterns if pattern.startswith(("pytorch_model", "*.bin"))]


# --- a hub's cache ---------------------------------------------------------------------------------------------------


def test_a_model_of_a_hub_is_the_commit_that_its_weights_were_fetched_at(tmp_path: Path, hub: Path):
    """`download_dir` may hold an older commit than the cache that the configuration was read from."""
    write_to_the_hubs_cache(hub, "org/m")
    write_to_the_hubs_cache(tmp_path / "downloads", "org/m", "d" * 40)
    assert facts(engine("org/m"))["weights"] == f"hub:org/m@{COMMIT}"
    elsewhere = engine("org/m", {"download_dir": str(tmp_path / "downloads")})
    assert facts(elsewhere)["weights"] == f"hub:org/m@{'d' * 40}"
    assert facts(engine("org/m", revision=COMMIT))["weights"] == f"hub:org/m@{COMMIT}"
    with pytest.raises(WeightsUnknown):
        facts(engine("org/m", revision="v2"))


def test_a_snapshot_without_weights_is_not_what_was_loaded(hub: Path):
    write_to_the_hubs_cache(hub, "org/m", weights=False)
    with pytest.raises(WeightsUnknown, match="holds no file of weights"):
        facts(engine("org/m"))


@pytest.mark.parametrize("revision", ["..", ".", "../../x", "refs/pr/1", "\0"])
def test_a_revision_is_not_a_way_out_of_the_cache(hub: Path, revision: str):
    write_to_the_hubs_cache(hub, "org/m")
    with pytest.raises(WeightsUnknown):
        facts(engine("org/m", revision=revision))


def test_a_model_of_modelscope_has_no_commit(hub: Path, monkeypatch: pytest.MonkeyPatch):
    """The hub's cache may hold another model of the same name."""
    write_to_the_hubs_cache(hub, "org/m")
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    with pytest.raises(WeightsUnknown, match="ModelScope"):
        facts(engine("org/m"))
    assert facts(engine("org/m"), pinned=True)["weights"] == "named:org/m"


# --- code, drafters, files of settings -------------------------------------------------------------------------------


def test_code_from_another_repository_counts_by_its_commit(tmp_path: Path, hub: Path):
    config = {"auto_map": {"AutoConfig": "org/code--configuration.C", "AutoModel": ["org/code--modeling.M", None]}}
    folder = write_model(tmp_path / "m")
    assert "code" not in facts(engine(folder, config=config, trust_remote_code=True))  # never fetched
    write_to_the_hubs_cache(hub, "org/code", weights=False)
    assert "code" not in facts(engine(folder, config=config))
    assert facts(engine(folder, config=config, trust_remote_code=True))["code"] == {
        "org/code": f"hub:org/code@{COMMIT}"
    }


def test_code_from_another_folder_counts_by_its_bytes(tmp_path: Path):
    folder, other = write_model(tmp_path / "m"), tmp_path / "code"
    other.mkdir()
    seen = set()
    for scale in (1, 2):
        (other / "modeling.py").write_text(f"SCALE = {scale}")
        config = {"text_config": {"auto_map": {"AutoModel": f"{other}--modeling.M"}}}
        seen.add(facts(engine(folder, config=config, trust_remote_code=True))["code"][str(other)])
    assert len(seen) == 2


def test_a_drafter_counts_by_its_weights_and_its_revision(tmp_path: Path, hub: Path):
    identities = []
    for number in (1, 2):
        config = engine(write_model(tmp_path / "target"))
        drafter = engine(write_model(tmp_path / str(number), bytes([number]) * 64)).model_config
        config.speculative_config = part_of(SpeculativeConfig, draft_model_config=drafter, draft_load_config=None)
        identities.append(drafter_identity(config, pinned=False))
        assert facts(config)["drafter"] == identities[-1]
    assert len(set(identities)) == 2
    write_to_the_hubs_cache(hub, "org/m")
    config = engine("org/m", revision=COMMIT)
    drafter = engine("org/m").model_config
    config.speculative_config = part_of(SpeculativeConfig, draft_model_config=drafter, draft_load_config=None)
    assert drafter_identity(config, pinned=False) == f"hub:org/m@{COMMIT}"
    drafter.revision = COMMIT
    assert drafter_identity(config, pinned=False) is None  # the target's own layers


@pytest.mark.parametrize("which", ["encoder_scales", "quantization_file"])
def test_the_content_of_files_that_settings_name_counts(tmp_path: Path, which: str):
    named = tmp_path / "named.json"
    multimodal = part_of(MultiModalConfig, mm_encoder_fp8_scale_path=str(named))
    fields = {
        "encoder_scales": {"multimodal_config": multimodal},
        "quantization_file": {"hf_overrides": {"quantization_config_file": str(named)}},
    }[which]
    config = engine(write_model(tmp_path / "m"), **fields)
    with pytest.raises(WeightsUnknown, match="cannot be read"):
        facts(config)
    seen = set()
    for content in ("1", "2"):
        named.write_text(content)
        seen.add(facts(config)[which])
    assert len(seen) == 2


def test_random_weights_are_their_seed():
    dummy = {"load_format": "dummy"}
    seen = {facts(engine("org/m", dummy, seed=seed))["weights"] for seed in (1, 2)}
    assert seen == {"dummy:org/m:seed1", "dummy:org/m:seed2"}
