"""Checks before vLLM starts that the pod has what the shared tier needs: keys, passwords, certificates, a fitting disk.

The connector reads the same files from inside vLLM, where a missing one would end as a traceback of another process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import permutations
from pathlib import Path

from spillway_connector.errors import ConfigError
from spillway_connector.setting_names import PLAIN_NAMES, SettingNames
from spillway_connector.tiers.disk.layout_choice import file_system_of, is_shared
from spillway_connector.tiers.disk.root import MOUNTS, missing_parent
from spillway_engine.errors import SettingsError
from spillway_engine.tier_settings import (
    ENCRYPTION,
    NVME,
    REDIS,
    S3,
    EncryptionSettings,
    SharedTierSettings,
    connector_refusal,
)

_KEY_VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


def require_tier_files(
    tier: SharedTierSettings,
    environment: Mapping[str, str] = os.environ,
    mounts: Path = MOUNTS,
    names: SettingNames = PLAIN_NAMES,
) -> None:
    """Raises SettingsError naming the setting and the file or variable, never what is in it."""
    if "nvme" in tier.types and tier.nvme.mode == "slab":
        _require_local_disk(Path(tier.nvme.path), names, mounts)
    if "redis" in tier.types:
        redis = tier.redis
        files = {
            "passwordFile": redis.password_file,
            "tls.caFile": redis.tls.ca_file,
            "tls.certificateFile": redis.tls.certificate_file,
            "tls.keyFile": redis.tls.key_file,
        }
        for key, file in files.items():
            if file is not None:
                _require_readable(names.given(REDIS + key, file), Path(file))
        for key, variable in {"usernameEnv": redis.username_env, "passwordEnv": redis.password_env}.items():
            if variable is not None and variable not in environment:
                raise SettingsError(
                    f"{names.name(REDIS + key)}: the environment variable {variable} is not set; "
                    "set it from a Secret, or remove the setting"
                )
    if "s3" in tier.types:
        if tier.s3.ca_file is not None:
            _require_readable(names.given(S3 + "caFile", tier.s3.ca_file), Path(tier.s3.ca_file))
        for given, other in permutations(_KEY_VARIABLES):
            if environment.get(given) and not environment.get(other):
                raise SettingsError(
                    f"{names.given(*tier.setting_of('s3'))}: the environment variable {given} is set, but {other} "
                    "is not; set both from a Secret, or none for a workload identity"
                )
    if tier.type != "none" and tier.encryption is not None:
        _require_key(tier.encryption, names, environment)


def misplaced_tier(tier: SharedTierSettings, names: SettingNames = PLAIN_NAMES) -> str | None:
    """Return the fault of an NVMe tier's folder; None if there is none. It is no reason not to start: engines serve."""
    if "nvme" not in tier.types:
        return None
    try:
        problem = missing_parent(Path(tier.nvme.path))
    except OSError as error:
        problem = f"cannot be looked at: {error.strerror}"
    if problem is None:
        return None
    return (
        f"{names.given(NVME + 'path', tier.nvme.path)}: {problem.removeprefix('path: ')}; "
        "until then the engine serves without the shared tier"
    )


def _require_readable(given: str, file: Path) -> None:
    try:
        with file.open("rb") as opened:
            empty = not opened.read(1)
    except OSError as error:
        raise SettingsError(
            f"{given} cannot be read: {error.strerror}; mount it, readable for user {os.geteuid()}"
        ) from error
    if empty:
        raise SettingsError(f"{given} is empty; does the Secret hold that key?")


def _require_local_disk(folder: Path, names: SettingNames, mounts: Path) -> None:
    try:
        kind = file_system_of(folder, mounts.read_text(encoding="utf-8", errors="surrogateescape"))
    except OSError:
        return  # not Linux: without /proc the setting is trusted
    if kind is not None and is_shared(kind):
        raise SettingsError(
            f"{names.given(NVME + 'mode', 'slab')} needs a disk of this node alone, but {folder} lies on {kind}, which "
            f"other nodes may mount too; set {names.given(NVME + 'mode', 'files')} (or auto), or another "
            f"{names.name(NVME + 'path')}"
        )


def _require_key(encryption: EncryptionSettings, names: SettingNames, environment: Mapping[str, str]) -> None:
    try:
        from spillway_connector.tiers.sealed import SealKey  # noqa: PLC0415  needs a package of its own
    except ImportError as error:
        raise SettingsError(
            f"{names.name(ENCRYPTION[:-1])} needs a package that is not installed ({error}); "
            "install spillway-connector[encryption]"
        ) from error
    try:
        if encryption.key_file is not None:
            SealKey.from_file(encryption.key_id, Path(encryption.key_file))
        elif encryption.key_env is not None:
            if encryption.key_env not in environment:
                raise ConfigError(f"encryption.keyEnv: the environment variable {encryption.key_env} is not set")
            SealKey.parse(encryption.key_id, environment[encryption.key_env], f"encryption.keyEnv {encryption.key_env}")
    except ConfigError as error:
        raise connector_refusal(error, names) from error
