"""Files and variables of the shared tier are looked at before anything starts; what they hold is never message."""

import secrets
import sys
from pathlib import Path
from typing import Any

import pytest

from spillway_engine.errors import SettingsError
from spillway_engine.settings_reader import read_settings
from spillway_engine.tier_files import misplaced_tier, require_tier_files
from spillway_engine.tier_settings import NvmeTierSettings, SharedTierSettings

KEY = secrets.token_hex(32)


def tier(**tree: Any) -> SharedTierSettings:
    return read_settings(SharedTierSettings, {"type": "redis", "redis": {"url": "rediss://h"}, **tree})


def redis(**settings: Any) -> SharedTierSettings:
    return tier(redis={"url": "rediss://h", **settings})


def test_what_is_there_is_accepted(tmp_path: Path) -> None:
    for name, text in {"password": "p", "ca": "c", "crt": "c", "key": "k", "seal": KEY}.items():
        (tmp_path / name).write_text(text)
    settings = tier(
        redis={
            "url": "rediss://h",
            "usernameEnv": "U",
            "passwordFile": str(tmp_path / "password"),
            "tls": {name: str(tmp_path / file) for name, file in
                    {"caFile": "ca", "certificateFile": "crt", "keyFile": "key"}.items()},
        },
        encryption={"keyId": "a", "keyFile": str(tmp_path / "seal")},
    )  # fmt: skip

    require_tier_files(settings, {"U": "me"})
    require_tier_files(tier(encryption={"keyId": "a", "keyEnv": "K"}), {"K": KEY})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (redis(passwordFile="/nowhere/p"), "redis.passwordFile: /nowhere/p cannot be read: No such file or directory"),
        (redis(tls={"caFile": "/nowhere/ca"}), "redis.tls.caFile: /nowhere/ca cannot be read"),
        (redis(tls={"certificateFile": "/nowhere/c", "keyFile": "/k"}), "redis.tls.certificateFile: /nowhere/c"),
        (redis(passwordEnv="P"), "redis.passwordEnv: the environment variable P is not set"),
        (redis(usernameEnv="U"), "redis.usernameEnv: the environment variable U is not set"),
        (tier(encryption={"keyId": "a", "keyFile": "/nowhere/k"}), "encryption.keyFile: /nowhere/k cannot be read"),
        (tier(encryption={"keyId": "a", "keyEnv": "K"}), "encryption.keyEnv: the environment variable K is not set"),
    ],
)
def test_what_is_missing_is_named(settings: SharedTierSettings, message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        require_tier_files(settings, {})

    assert str(refused.value).startswith("offload.sharedTier.") and message in str(refused.value)


def test_an_empty_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "p").touch()
    with pytest.raises(SettingsError, match=r"redis.passwordFile: .*/p is empty; does the Secret hold that key"):
        require_tier_files(redis(passwordFile=str(tmp_path / "p")), {})


def test_a_key_of_the_wrong_size_is_refused_unseen(tmp_path: Path) -> None:
    (tmp_path / "k").write_text(KEY[:40])
    for settings in (
        tier(encryption={"keyId": "a", "keyFile": str(tmp_path / "k")}),
        tier(encryption={"keyId": "a", "keyEnv": "K"}),
    ):
        with pytest.raises(SettingsError, match="holds no key of 16 or 32 bytes") as refused:
            require_tier_files(settings, {"K": KEY[:40]})
        assert KEY[:40] not in str(refused.value)


def test_encryption_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "spillway_connector.tiers.sealed", None)

    with pytest.raises(SettingsError, match=r"install spillway-connector\[encryption\]"):
        require_tier_files(tier(encryption={"keyId": "a", "keyEnv": "K"}), {"K": KEY})


def test_a_tier_that_is_not_in_use_needs_nothing() -> None:
    require_tier_files(read_settings(SharedTierSettings, {"redis": {"passwordFile": "/nowhere"}}), {})


MOUNTS = """\
20 1 8:1 / / rw - ext4 /dev/sda1 rw
21 20 0:50 / /shared rw - nfs4 server:/export rw
22 20 0:51 / /glued rw - fuse.mergerfs x rw
"""


@pytest.mark.parametrize(
    ("mode", "folder", "refused"),
    [
        ("slab", "/shared/kv", "nfs4"),
        ("slab", "/glued/kv", "fuse.mergerfs"),
        ("slab", "/disk/kv", None),
        ("files", "/shared/kv", None),
        ("auto", "/shared/kv", None),
    ],
)
def test_slabs_need_a_disk_of_one_node(mode: str, folder: str, refused: str | None, tmp_path: Path) -> None:
    (tmp_path / "mounts").write_text(MOUNTS)
    settings = read_settings(SharedTierSettings, {"type": "nvme", "nvme": {"path": folder, "mode": mode}})

    if refused is None:
        require_tier_files(settings, {}, tmp_path / "mounts")
        return
    with pytest.raises(
        SettingsError, match=f"mode: slab needs a disk of this node alone, but {folder} lies on {refused}"
    ):
        require_tier_files(settings, {}, tmp_path / "mounts")


def test_a_machine_without_a_list_of_mounts_is_believed(tmp_path: Path) -> None:
    settings = read_settings(SharedTierSettings, {"type": "nvme", "nvme": {"path": "/kv", "mode": "slab"}})

    require_tier_files(settings, {}, tmp_path / "nothing")


def test_a_folder_whose_parent_is_missing_is_said_and_keeps_nobody_from_serving(tmp_path: Path) -> None:
    mistyped = tmp_path / "nmve" / "kv"
    tier = SharedTierSettings(type="nvme", nvme=NvmeTierSettings(str(mistyped)))
    require_tier_files(tier)
    message = misplaced_tier(tier)
    assert message is not None
    assert message.startswith(f"offload.sharedTier.nvme.path: {mistyped}: ")
    assert f"{tmp_path / 'nmve'} does not exist" in message
    assert "correct the path, or mount the file system" in message
    assert "serves without the shared tier" in message
    mistyped.parent.mkdir()
    assert misplaced_tier(tier) is None
    assert misplaced_tier(SharedTierSettings(type="none", nvme=NvmeTierSettings("/no/such/folder"))) is None


def test_one_key_of_a_bucket_without_the_other_is_refused_by_name() -> None:
    bucket = tier(type="s3", s3={"bucket": "kv-cache"})
    require_tier_files(bucket, {})
    require_tier_files(bucket, {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"})
    with pytest.raises(SettingsError, match="AWS_ACCESS_KEY_ID is set, but AWS_SECRET_ACCESS_KEY is not"):
        require_tier_files(bucket, {"AWS_ACCESS_KEY_ID": "a"})
    with pytest.raises(SettingsError, match="AWS_SECRET_ACCESS_KEY is set, but AWS_ACCESS_KEY_ID is not"):
        require_tier_files(bucket, {"AWS_SECRET_ACCESS_KEY": "b"})
    with pytest.raises(SettingsError, match=r"s3\.caFile: /nothing cannot be read"):
        require_tier_files(tier(type="s3", s3={"bucket": "kv-cache", "caFile": "/nothing"}), {})
