"""Turns the command line, or an engine's configuration, into a store and the key of its encrypted contents."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from spillway_connector.tiers.redis.client.endpoint import RedisEndpoint
from spillway_connector.tiers.s3.place import S3Place
from spillway_ctl.errors import CommandError
from spillway_ctl.nvme_store import NvmeStore
from spillway_ctl.store import Store
from spillway_engine.settings_reader import load_engine_settings
from spillway_settings.values.offload import BUCKET_PATTERN, S3Tier

NO_STORE = (
    "which tier is meant? give --nvme DIR, --redis URL, --s3 URL, or --config with an engine's configuration file"
)
_S3_URL = re.compile(rf"s3://(?P<bucket>{BUCKET_PATTERN})(?:/(?P<prefix>.*))?")


@dataclass(frozen=True, slots=True)
class StoreChoice:
    """Paths, URL and names of variables as given; never a secret itself."""

    nvme: Path | None = None
    redis: str | None = None
    s3: S3Place | None = None
    max_bytes: int | None = None
    username_env: str | None = None
    password_env: str | None = None
    password_file: str | None = None
    tls_ca_file: str | None = None
    tls_certificate_file: str | None = None
    tls_key_file: str | None = None
    encryption_key_file: Path | None = None
    encryption_key_env: str | None = None

    @property
    def has_key(self) -> bool:
        return self.encryption_key_file is not None or self.encryption_key_env is not None

    def open(self, timeout_seconds: float) -> Store:
        """Open the store; nothing is read or connected yet. Raises ConfigError, CommandError."""
        if self.nvme is not None:
            return NvmeStore(self.nvme, max_bytes=self.max_bytes)
        if self.s3 is not None:
            from spillway_ctl.s3_store import S3BucketStore  # noqa: PLC0415 - only commands on such a tier need obstore

            return S3BucketStore(self.s3, answer_seconds=timeout_seconds)
        endpoint = self.endpoint()
        from spillway_ctl.redis_store import RedisStore  # noqa: PLC0415 - redis-py takes half a second to import

        return RedisStore(endpoint, answer_seconds=timeout_seconds)

    def endpoint(self) -> RedisEndpoint:
        """Raises ConfigError, CommandError."""
        if self.redis is None:
            raise CommandError(NO_STORE)
        if self.password_env is not None and self.password_file is not None:
            raise CommandError("--password-env and --password-file both name the password; leave one out")
        return RedisEndpoint.from_url(
            self.redis,
            username=secret_in("--username-env", self.username_env),
            password=secret_in("--password-env", self.password_env),
            password_file=self.password_file,
            tls_ca_file=self.tls_ca_file,
            tls_certificate_file=self.tls_certificate_file,
            tls_key_file=self.tls_key_file,
        )


def choice_from_config(path: Path, *, below: bool = False) -> StoreChoice:
    """The shared tier of an engine, or the one below it. Raises SettingsError, CommandError."""
    tier = load_engine_settings(path).offload.shared_tier
    encryption = tier.encryption
    key_file = None if encryption is None or encryption.key_file is None else Path(encryption.key_file)
    key_env = None if encryption is None else encryption.key_env
    # An operator who has no key still may look: payloads are then verified as they lie there.
    if key_file is not None and not key_file.exists():
        key_file = None
    if key_env is not None and key_env not in os.environ:
        key_env = None
    with_key = StoreChoice(encryption_key_file=key_file, encryption_key_env=key_env)
    chosen = tier.below.type if below else tier.type
    if chosen == "nvme":
        return replace(with_key, nvme=Path(tier.nvme.path), max_bytes=tier.nvme.max_bytes)
    if chosen == "redis":
        redis = tier.redis
        return replace(
            with_key,
            redis=redis.url,
            username_env=redis.username_env,
            password_env=redis.password_env,
            password_file=redis.password_file,
            tls_ca_file=redis.tls.ca_file,
            tls_certificate_file=redis.tls.certificate_file,
            tls_key_file=redis.tls.key_file,
        )
    if chosen == "s3":
        return replace(with_key, s3=S3Place.of(tier.s3))
    if below:
        raise CommandError(
            f"--config {path}: offload.sharedTier.below.type is none, so no tier is below this one; leave out --below"
        )
    raise CommandError(
        f"--config {path}: offload.sharedTier.type is none, so this engine has no shared tier; name one by --nvme, "
        "--redis or --s3"
    )


def place_of(url: str, endpoint: str | None, region: str | None, ca_file: str | None) -> S3Place:
    """Raises CommandError."""
    found = _S3_URL.fullmatch(url)
    if found is None:
        raise CommandError("--s3: no bucket was given; write s3://BUCKET or s3://BUCKET/PREFIX/")
    prefix = found["prefix"] or ""
    if prefix and not prefix.endswith("/"):
        prefix += "/"
    return S3Place(found["bucket"], prefix=prefix, endpoint=endpoint, region=region or S3Tier().region, ca_file=ca_file)


def secret_in(option: str, variable: str | None, meant: str = "the login") -> str | None:
    """The value of the variable that an option names; None: it names none. Raises CommandError."""
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise CommandError(f"{option} {variable}: the environment variable is not set or empty; set it to {meant}")
    return os.environ[variable]
