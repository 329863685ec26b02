"""The shared tier of an engine pod: the connector's settings under the chart's keys, with their bounds and checks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spillway_connector.config import (
    EncryptionConfig,
    NvmeStore,
    RedisStore,
    RedisTls,
    S3Store,
    check_encryption,
    check_nvme,
    check_redis,
    check_s3,
)
from spillway_connector.errors import ConfigError
from spillway_connector.limits import TierLimits
from spillway_connector.setting_names import PLAIN_NAMES, SettingNames
from spillway_connector.tiers.redis.client.endpoint import RedisEndpoint
from spillway_engine.chart_keys import camel_case, camel_case_keys
from spillway_engine.errors import SettingsError
from spillway_settings.values.kinds import Seconds
from spillway_settings.values.offload import TierBelow, TierType

SHARED_TIER = "offload.sharedTier."
BELOW = SHARED_TIER + "below."
NVME = SHARED_TIER + "nvme."
REDIS = SHARED_TIER + "redis."
S3 = SHARED_TIER + "s3."
ENCRYPTION = SHARED_TIER + "encryption."
_PATH = re.compile(r"\w+(\.\w+)+")
_SECRET_KEY = re.compile(r"password|secret|credential|api_?key", re.IGNORECASE)


@camel_case_keys
class EncryptionSettings(EncryptionConfig, frozen=True):
    pass


@camel_case_keys
class NvmeTierSettings(NvmeStore, frozen=True):
    path: str = ""


@camel_case_keys
class RedisTlsSettings(RedisTls, frozen=True):
    pass


@camel_case_keys
class RedisTierSettings(RedisStore, frozen=True):
    url: str = ""
    tls: RedisTlsSettings = RedisTlsSettings()


@camel_case_keys
class S3TierSettings(S3Store, frozen=True):
    bucket: str = ""


_BELOW = TierBelow()


@camel_case_keys
class TierBelowSettings(TierLimits, frozen=True):
    type: TierType = _BELOW.type
    idle_seconds: Seconds = _BELOW.idle_seconds
    lookup_timeout_seconds: Seconds = _BELOW.lookup_timeout_seconds
    load_timeout_seconds: Seconds = _BELOW.load_timeout_seconds


@camel_case_keys
class SharedTierSettings(TierLimits, frozen=True):
    type: TierType = "none"
    below: TierBelowSettings = TierBelowSettings()
    nvme: NvmeTierSettings = NvmeTierSettings()
    redis: RedisTierSettings = RedisTierSettings()
    s3: S3TierSettings = S3TierSettings()
    encryption: EncryptionSettings | None = None

    @property
    def types(self) -> tuple[TierType, ...]:
        """The types of the tiers in use, the one above first."""
        return tuple(each for each in (self.type, self.below.type) if each != "none")

    def setting_of(self, tier_type: TierType) -> tuple[str, TierType]:
        """The setting that chooses a type in use, and the type."""
        return (SHARED_TIER if self.type == tier_type else BELOW) + "type", tier_type


def secondary_tiers(tier: SharedTierSettings) -> list[dict[str, Any]]:
    """One dict as spillway_connector.config.parse_tier reads it; none for type `none`. What is not set is left out."""
    if tier.type == "none":
        return []
    entry = _entry(tier, tier.type, tier)
    if tier.below.type != "none":
        entry["below"] = {**_entry(tier, tier.below.type, tier.below), "idle_seconds": tier.below.idle_seconds}
    return [entry]


def _entry(tier: SharedTierSettings, tier_type: TierType, limits: TierLimits) -> dict[str, Any]:
    if tier_type == "nvme":
        store = _given(tier.nvme, NvmeStore)
    elif tier_type == "s3":
        store = _given(tier.s3, S3Store)
    else:
        store = _given(tier.redis, RedisStore)
        del store["tls"]
        store |= {f"tls_{key}": file for key, file in _given(tier.redis.tls, RedisTls).items()}
    encryption = {} if tier.encryption is None else {"encryption": _given(tier.encryption, EncryptionConfig)}
    return {"type": tier_type, **store, **_given(limits, TierLimits), **encryption}


def _given(settings: object, kind: type[Any]) -> dict[str, Any]:
    """The fields of `kind` in `settings`, under the connector's keys."""
    values = {name: getattr(settings, name) for name in kind.__struct_fields__}
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class SectionNames:
    """Names of the settings of one section, which the connector calls by its own keys."""

    names: SettingNames
    section: str

    def name(self, path: str, /) -> str:
        return self.names.name(self._path(path))

    def given(self, path: str, value: object, /) -> str:
        return self.names.given(self._path(path), value)

    def _path(self, path: str) -> str:
        return self.section + ".".join(camel_case(key) for key in path.split("."))


def check_shared_tier(tier: SharedTierSettings, names: SettingNames = PLAIN_NAMES) -> None:
    """Refuse what needs no look at the machine. Raises SettingsError with what to change."""
    uses = tier.types
    if "nvme" in uses and not tier.nvme.path.startswith("/"):
        raise SettingsError(
            f"{names.given(NVME + 'path', repr(tier.nvme.path))} is no absolute folder; "
            f"{names.given(*tier.setting_of('nvme'))} needs one that every engine of this model can reach"
        )
    if "redis" in uses and not tier.redis.url:
        raise SettingsError(
            f"{names.name(REDIS + 'url')} is empty; {names.given(*tier.setting_of('redis'))} needs it, "
            "e.g. redis://cache:6379/0"
        )
    if tier.type == "none" and tier.encryption is not None:
        raise SettingsError(
            f"{names.name(ENCRYPTION[:-1])} is set, but {names.given(SHARED_TIER + 'type', 'none')}; "
            "it seals a shared tier: choose nvme, redis or s3"
        )
    if "redis" in uses:
        try:
            RedisEndpoint.from_url(tier.redis.url)
        except ConfigError as error:
            raise connector_refusal(error, names) from error
    try:
        if "nvme" in uses:
            check_nvme(tier.nvme, SectionNames(names, NVME))
        if "redis" in uses:
            check_redis(tier.redis, SectionNames(names, REDIS))
        if "s3" in uses:
            check_s3(tier.s3, SectionNames(names, S3))
        if tier.encryption is not None:
            check_encryption(tier.encryption, SectionNames(names, ENCRYPTION))
    except ConfigError as error:
        raise SettingsError(str(error)) from error


def refuse_credentials(tier: SharedTierSettings, unread: Mapping[str, Mapping[str, Any]], names: SettingNames) -> None:
    """Refuse credentials, also of tiers not in use: /spillway/config shows whatever stands in the file.

    Raises SettingsError.

    Args:
        tier: the shared tier.
        unread: options that are passed on unread, by the setting that has them.
        names: what settings are called.
    """
    if "@" in tier.redis.url:
        raise SettingsError(
            f"{names.name(REDIS + 'url')} holds credentials; keep them out of files: name environment variables in "
            f"{names.name(REDIS + 'usernameEnv')} and {names.name(REDIS + 'passwordEnv')}, "
            f"or a file in {names.name(REDIS + 'passwordFile')}"
        )
    if "@" in (tier.s3.endpoint or ""):
        raise SettingsError(
            f"{names.name(S3 + 'endpoint')} holds credentials; keep them out of files: AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY of the engine's environment, or its workload identity, are used"
        )
    for setting, options in unread.items():
        for key in plain_secrets(options):
            raise SettingsError(
                f"{names.name(f'{setting}.{key}')} would show a secret to every reader of this file; give it by an "
                "environment variable or a file"
            )


def plain_secrets(options: Mapping[str, Any]) -> list[str]:
    """The keys, of options that are passed on unread, whose text is a secret by their names."""
    return [
        key
        for key, value in options.items()
        if isinstance(value, str) and _SECRET_KEY.search(key) and not key.endswith(("_env", "_file"))
    ]


def connector_refusal(error: ConfigError, names: SettingNames) -> SettingsError:
    """The connector names keys below offload.sharedTier, as in `redis.url: ...`; the result uses `names`."""
    text = str(error)
    path = _PATH.match(text)
    if path is None:
        return SettingsError(f"{names.name(SHARED_TIER[:-1])}: {text}")
    return SettingsError(f"{names.name(SHARED_TIER + path[0])}{text[path.end() :]}")
