"""LoRA adapters: served under names of their own beside the model, loaded at the engine's start or while it runs."""

from __future__ import annotations

from spillway_connector.setting_names import SettingNames
from spillway_engine.errors import SettingsError
from spillway_settings.typed import CamelSection, Count, Text
from spillway_settings.values.engine import Lora, LoraRank

_CHART = Lora()


class LoraAdapter(CamelSection, frozen=True):
    name: Text  # what clients write into "model"
    path: Text  # an absolute folder with adapter_config.json, or a hub name (owner/adapter)

    @property
    def is_folder(self) -> bool:
        return self.path.startswith("/")


class LoraSettings(CamelSection, frozen=True):
    adapters: tuple[LoraAdapter, ...] = ()  # loaded at the start
    runtime_updating: bool = False  # /v1/load_lora_adapter and /v1/unload_lora_adapter are open
    resolver_folder: Text | None = None  # a request that names a folder in it has that adapter loaded
    max_rank: LoraRank = _CHART.max_rank  # of all adapters
    max_active: Count = _CHART.max_active  # adapters in one batch; requests of further ones wait
    max_in_memory: Count | None = None  # adapters kept in host memory; None: as many as max_active

    @property
    def enabled(self) -> bool:
        return bool(self.adapters) or self.runtime_updating


def check_lora(lora: LoraSettings, served_name: str, names: SettingNames) -> None:
    """Raises SettingsError with the setting, what was given, and what to change."""
    taken = {served_name}
    for index, adapter in enumerate(lora.adapters):
        where = names.name(f"lora.adapters[{index}]")
        if adapter.name in taken:
            raise SettingsError(f"{where}.name: {adapter.name!r} is served already; give the adapter another name")
        taken.add(adapter.name)
        if not adapter.is_folder and adapter.path.count("/") != 1:
            raise SettingsError(
                f"{where}.path: {adapter.path!r} is neither an absolute folder nor a hub name such as owner/adapter"
            )
    if lora.resolver_folder is not None and not lora.resolver_folder.startswith("/"):
        given = names.given("lora.resolverFolder", lora.resolver_folder)
        raise SettingsError(f"{given} is no absolute folder; give the folder in which adapters lie by their names")
