"""The source of a vLLM configuration's model weights, in the terms of the namespace.

A loader opens more than the model's folder: the places that `model_weights` and the model's configuration name, the
drafter, code from other repositories, files named in settings. If it is unknown what was opened, KV must not be
shared: WeightsUnknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.config import VllmConfig

from spillway_connector.errors import WeightsUnknown
from spillway_connector.identity.content_digests import digests_of
from spillway_connector.identity.model import (
    SAFETENSORS_FIRST,
    cache_folders_of,
    code_identity,
    folder_identity,
    sampled_identity,
    snapshot_identity,
)

# Formats whose loaders read local files or a hub's cache, and nothing else. Others get tensors from elsewhere: another
# engine's memory, a store, a serialised file that a setting names.
LOCAL_FORMATS = SAFETENSORS_FIRST | {"pt", "npcache", "sharded_state", "runai_streamer_sharded", "gguf"}
# Fields of a model's configuration that name another model whose weights its class loads (vLLM: models/ultravox.py).
SECONDARY_FIELDS = frozenset({"text_model_id", "audio_model_id"})
# Fields of that form in models that vLLM does not bring: they count if what they name is there.
_NAMES_A_MODEL = re.compile(r"model_(id|name|path|name_or_path)$")
_REMEDY = (
    "load the model from a folder or a hub's cache, name the weights' version (weights_version: a text that changes "
    "whenever they do), or turn the shared tier off"
)


def weights_facts(vllm_config: VllmConfig, *, pinned: bool) -> dict[str, Any]:
    """JSON values by their name in the namespace's document.

    pinned: an operator has named the weights' version, so samples and names will do. Raises WeightsUnknown.
    """
    model = vllm_config.model_config
    places = _Places(vllm_config.load_config, model.revision, pinned)
    if vllm_config.load_config.load_format == "dummy":
        facts: dict[str, Any] = {"weights": f"dummy:{model.model}:seed{model.seed}"}
    else:
        facts = {"weights": places.identity_of(model.model)}
        override = getattr(model, "model_weights", "")
        others = {"model_weights": override} if override and override != model.model else {}
        if secondary := places.identities_of(others) | _secondary(places, model):
            facts["secondary_weights"] = secondary
    if (drafter := drafter_identity(vllm_config, pinned)) is not None:
        facts["drafter"] = drafter
    if code := _code(model):
        facts["code"] = code
    named = {
        "encoder_scales": getattr(model.multimodal_config, "mm_encoder_fp8_scale_path", None),
        "quantization_file": _overrides(model).get("quantization_config_file"),
    }
    return facts | {name: _content_of(str(path)) for name, path in named.items() if path is not None}


def drafter_identity(vllm_config: VllmConfig, pinned: bool) -> str | None:
    """Identity of a speculative model that is not part of the target's own weights. Raises WeightsUnknown."""
    target, speculative = vllm_config.model_config, vllm_config.speculative_config
    drafter = getattr(speculative, "draft_model_config", None)
    if drafter is None or (drafter.model, drafter.revision) == (target.model, target.revision):
        return None
    load_config = getattr(speculative, "draft_load_config", None) or vllm_config.load_config
    if load_config.load_format == "dummy":
        return f"dummy:{drafter.model}"
    return _Places(load_config, drafter.revision, pinned).identity_of(drafter.model_weights or drafter.model)


class _Places:
    """Folders and repositories that one load configuration reads."""

    def __init__(self, load_config: Any, revision: str | None, pinned: bool) -> None:
        self._format = str(load_config.load_format)
        self._elsewhere = None if pinned else _place_elsewhere(load_config)
        self._hub_cache = load_config.download_dir
        self._revision = revision
        self._pinned = pinned

    def identity_of(self, name: str) -> str:
        """Identity of the weights in a folder, in a file or under a hub's name. Raises WeightsUnknown."""
        if self._elsewhere is not None:
            raise WeightsUnknown(
                f"model {name!r}: {self._elsewhere}, so its weights cannot be distinguished from others' and its KV "
                f"must not be shared; {_REMEDY}"
            )
        place = Path(name)
        try:
            if place.exists():
                if self._pinned:
                    return sampled_identity(place, self._format)
                return folder_identity(place, cache_folders_of(place), self._format)
            snapshot = None if envs.VLLM_USE_MODELSCOPE else _snapshot_of(name, self._revision, self._hub_cache)
            if snapshot is not None:
                return snapshot_identity(name, snapshot, self._format)
        except WeightsUnknown as reason:
            if not self._pinned:
                raise WeightsUnknown(
                    f"model {name!r}: {reason}, so its weights cannot be distinguished from others' and its KV must "
                    f"not be shared; {_REMEDY}"
                ) from reason
        except OSError as error:
            raise WeightsUnknown(
                f"model {name!r}: its weights cannot be read for their identity: {error}; its KV is not shared"
            ) from error
        if self._pinned:
            return f"named:{name}"
        where = "ModelScope has no commits" if envs.VLLM_USE_MODELSCOPE else "it is not in the hub's cache"
        raise WeightsUnknown(
            f"model {name!r} is no folder, and {where}, so its weights cannot be distinguished from others' and its "
            f"KV must not be shared; {_REMEDY}"
        )

    def identities_of(self, names: Mapping[str, str]) -> dict[str, str]:
        """Return the identity of each named model, by the field that names it. Raises WeightsUnknown."""
        return {field: self.identity_of(name) for field, name in names.items()}


def _place_elsewhere(load_config: Any) -> str | None:
    """Return why the weights come from a place that is not looked at; None if they do not."""
    if load_config.load_format not in LOCAL_FORMATS:
        return f"load_format {load_config.load_format!r} does not read them from its folder"
    extra = load_config.model_loader_extra_config or {}
    if not isinstance(extra, Mapping):
        return "model_loader_extra_config is not a mapping"
    for name, value in extra.items():
        if isinstance(value, str) and ("/" in value or ".." in value):
            return f"model_loader_extra_config.{name} names another place"
    return None


def _secondary(places: _Places, model: Any) -> dict[str, str]:
    """Identities of what the model's configuration names, by the field. Raises WeightsUnknown."""
    found: dict[str, str] = {}
    for field, name in _named_models(_as_dict(model.hf_config)):
        if field in SECONDARY_FIELDS:
            found[field] = places.identity_of(name)
            continue
        try:
            found[field] = places.identity_of(name)
        except WeightsUnknown:  # most likely the name of a repository on a model hub: there is no file to open
            continue
    return found


def _named_models(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if not isinstance(value, Mapping):
        return
    for name, inner in value.items():
        field = f"{path}{name}"
        if isinstance(inner, Mapping):
            yield from _named_models(inner, f"{field}.")
        elif isinstance(inner, str) and inner and (field in SECONDARY_FIELDS or _NAMES_A_MODEL.search(str(name))):
            yield field, inner


def _code(model: Any) -> dict[str, str]:
    """Identities of the repositories that code is taken from, by their names; that of the model's folder counts there.

    A repository that is in no cache cannot have been opened.
    """
    if not model.trust_remote_code:
        return {}
    found = {}
    for repository in sorted(set(_repositories(_as_dict(model.hf_config)))):
        if (folder := Path(repository)).is_dir():
            try:
                found[repository] = code_identity(folder)
            except OSError as error:
                raise WeightsUnknown(f"the model's code in {repository} cannot be read: {error}") from error
        else:
            revision = model.code_revision or (model.revision if repository == model.model else None)
            if (snapshot := _snapshot_of(repository, revision, None)) is not None:
                found[repository] = f"hub:{repository}@{snapshot.name}"
    return found


def _repositories(config: Mapping[str, Any]) -> Iterator[str]:
    """Repositories that `auto_map` names at any depth: `owner/name--module.Class` is taken from another one."""
    for name, value in config.items():
        if name == "auto_map" and isinstance(value, Mapping):
            for entry in value.values():
                for reference in entry if isinstance(entry, list | tuple) else [entry]:
                    if isinstance(reference, str) and "--" in reference:
                        yield reference.split("--", 1)[0]
        elif isinstance(value, Mapping):
            yield from _repositories(value)


def _as_dict(hf_config: Any) -> Mapping[str, Any]:
    found = hf_config.to_dict() if hasattr(hf_config, "to_dict") else {}
    return found if isinstance(found, Mapping) else {}


def _overrides(model: Any) -> Mapping[str, Any]:
    overrides = getattr(model, "hf_overrides", None)
    return overrides if isinstance(overrides, Mapping) else {}


def _content_of(path: str) -> str:
    try:
        return digests_of([Path(path)])[Path(path)]
    except OSError as error:
        raise WeightsUnknown(f"{path}, which a setting names, cannot be read for its identity: {error}") from error


def _snapshot_of(name: str, revision: str | None, hub_cache: str | None) -> Path | None:
    """The folder in a hub's cache (by default the user's) that a revision stands for. Asks no network.

    Not huggingface_hub's snapshot_download: it refuses a snapshot that lacks files of the repository, and vLLM fetches
    only those that it reads.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    repository = Path(hub_cache or constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model")
    wanted = revision or constants.DEFAULT_REVISION
    try:
        commit = (repository / "refs" / wanted).read_text().strip()
    except (OSError, ValueError):
        commit = wanted
    snapshot = repository / "snapshots" / commit
    return snapshot if commit not in ("", ".", "..") and snapshot.is_dir() else None
