"""API keys and their tenants, read from a file that holds hashes only.

    tenants:
      - name: search
        keys: ["sha256:<64 hex digits>"]   # of the key's UTF-8 bytes; python -m spillway_gateway --hash-key
        models: [qwen3-14b]                # empty or absent: every model
        priority: normal                   # high | normal | low: order in the queue when engines are full
        concurrentRequestsMax: 64          # absent: no limit
        requestsPerMinute: 600             # absent: no limit
        promptTokensPerMinute: 2000000     # absent: no limit
        tokensPerMinute: 3000000           # the same with the replies' tokens; absent: no limit
        retentionSecondsMax: 86400         # the longest retention of its prompts; absent: retention.secondsMax
        retentionTierShare: 0.2            # of each tier that it may retain; absent: retention.tierShare
        operator: false                    # true: may read /spillway/config

A plain hash is enough because keys are random and long, so a dictionary attack has nothing to try. Keys shorter than
KEY_BYTES_MIN are refused when they are hashed.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import yaml

from spillway_gateway.config import unique_yaml
from spillway_gateway.errors import ConfigError
from spillway_settings.values.gateway import RETENTION_TIER_SHARE_MAX
from spillway_settings.wire import RETENTION_SECONDS_MAX

KEY_BYTES_MIN = 24
KEY_BYTES_MAX = 512
FILE_BYTES_MAX = 16 * 1024 * 1024
_PREFIX = "sha256:"


class Priority(IntEnum):
    """Order in the queue; the lowest value is served first."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant of the keys file. models: empty allows all. Limits: None for no limit. retention_*: None for those
    of the configuration."""

    name: str
    models: frozenset[str] = frozenset()
    priority: Priority = Priority.NORMAL
    concurrent_requests_max: int | None = None
    requests_per_minute: int | None = None
    prompt_tokens_per_minute: int | None = None
    tokens_per_minute: int | None = None
    operator: bool = False
    retention_seconds_max: float | None = None
    retention_tier_share: float | None = None

    @property
    def limited(self) -> bool:
        """Whether the tenant has any limit."""
        limits = (
            self.concurrent_requests_max,
            self.requests_per_minute,
            self.prompt_tokens_per_minute,
            self.tokens_per_minute,
        )
        return any(limit is not None for limit in limits)

    @property
    def counts_prompts(self) -> bool:
        """Whether a limit needs the tokens of prompts."""
        return self.prompt_tokens_per_minute is not None or self.tokens_per_minute is not None

    def may_use(self, model: str) -> bool:
        """Whether the tenant may use this model or alias."""
        return not self.models or model in self.models


NOBODY = Tenant("")  # if no keys are configured: one tenant without a name, a salt or limits


class KeyRing:
    """Tenants by the hash of their keys. A lookup selects a bucket by the first two bytes of the hash and compares
    whole hashes in constant time, so timing reveals nothing beyond those bytes."""

    def __init__(self, tenants: dict[bytes, Tenant]) -> None:
        self._buckets: dict[bytes, list[tuple[bytes, Tenant]]] = {}
        for digest, tenant in tenants.items():
            self._buckets.setdefault(digest[:2], []).append((digest, tenant))

    def tenant_of(self, key: bytes) -> Tenant | None:
        """The tenant of an API key, None for an unknown one."""
        if len(key) > KEY_BYTES_MAX:
            return None
        digest = hashlib.sha256(key).digest()
        found: Tenant | None = None
        for known, tenant in self._buckets.get(digest[:2], ()):
            if hmac.compare_digest(known, digest):
                found = tenant
        return found


def hash_key(key: str) -> str:
    """A key's entry in the keys file. Raises ConfigError for keys too short to resist guessing, or too long."""
    data = key.encode()
    if not KEY_BYTES_MIN <= len(data) <= KEY_BYTES_MAX:
        raise ConfigError(
            f"key: {len(data)} bytes given, {KEY_BYTES_MIN} to {KEY_BYTES_MAX} needed; make one with: "
            "python -c 'import secrets; print(\"sk-\" + secrets.token_urlsafe(32))'"
        )
    return _PREFIX + hashlib.sha256(data).hexdigest()


def read_keys(path: Path, reading: unique_yaml.Reading | None = None) -> KeyRing:
    """Raises ConfigError naming the file, the tenant and the remedy; no message shows a hash or a key. Raises
    unique_yaml.GivenUp once `reading` is."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise ConfigError(f"auth.keysFile {path}: more than {FILE_BYTES_MAX} bytes; remove old tenants")
        document = unique_yaml.load(path.read_text(encoding="utf-8"), reading)
    except OSError as error:
        raise ConfigError(f"auth.keysFile {path}: cannot be read ({error.strerror}); give a readable file") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"auth.keysFile {path}: is not YAML text ({error.__class__.__name__}); save it as UTF-8 YAML"
        ) from error
    return parse_keys(document, f"auth.keysFile {path}")


def parse_keys(document: object, where: str) -> KeyRing:
    """A parsed keys file. where: prefix of error messages. Pure; raises ConfigError."""
    rows = document.get("tenants") if isinstance(document, dict) and set(document) == {"tenants"} else None
    if not isinstance(rows, list):
        raise ConfigError(f"{where}: one key 'tenants' with a list needed")
    keys: dict[bytes, Tenant] = {}
    names: set[str] = set()
    for at, row in enumerate(rows):
        tenant, digests = _tenant(row, f"{where}: tenants[{at}]")
        if tenant.name in names:
            raise ConfigError(f"{where}: two tenants are named {tenant.name!r}; list both keys under one")
        names.add(tenant.name)
        for digest in digests:
            if digest in keys:
                raise ConfigError(f"{where}: {tenant.name!r} and {keys[digest].name!r} have the same key; make two")
            keys[digest] = tenant
    return KeyRing(keys)


_LIMITS = ("concurrentRequestsMax", "requestsPerMinute", "promptTokensPerMinute", "tokensPerMinute")
_RETENTION = {"retentionSecondsMax": RETENTION_SECONDS_MAX, "retentionTierShare": RETENTION_TIER_SHARE_MAX}
_FIELDS = frozenset({"name", "keys", "models", "priority", "operator", *_LIMITS, *_RETENTION})


def _tenant(row: Any, where: str) -> tuple[Tenant, list[bytes]]:
    if not isinstance(row, dict) or not set(row) <= _FIELDS:
        raise ConfigError(f"{where}: a mapping with no other settings than {', '.join(sorted(_FIELDS))} needed")
    name = row.get("name")
    if not isinstance(name, str) or not name or len(name) > 128 or not name.isprintable():
        raise ConfigError(f"{where}.name: a text of 1 to 128 printable characters needed")
    models = row.get("models") or []
    if not isinstance(models, list) or not all(isinstance(model, str) for model in models):
        raise ConfigError(f"{where}.models: a list of model names needed")
    priority = row.get("priority", "normal")
    if priority not in ("high", "normal", "low"):
        raise ConfigError(f"{where}.priority: {priority!r} given; high, normal or low needed")
    limits = [_limit(row.get(key), f"{where}.{key}") for key in _LIMITS]
    retention = [_number(row.get(key), most, f"{where}.{key}") for key, most in _RETENTION.items()]
    operator = row.get("operator", False)
    if not isinstance(operator, bool):
        raise ConfigError(f"{where}.operator: true or false needed")
    hashes = row.get("keys")
    if not isinstance(hashes, list) or not hashes:
        raise ConfigError(f"{where}.keys: a list of at least one 'sha256:...' needed")
    digests = [_digest(text, f"{where}.keys[{at}]") for at, text in enumerate(hashes)]
    tenant = Tenant(
        name,
        frozenset(models),
        Priority[priority.upper()],
        concurrent_requests_max=limits[0],
        requests_per_minute=limits[1],
        prompt_tokens_per_minute=limits[2],
        tokens_per_minute=limits[3],
        operator=operator,
        retention_seconds_max=retention[0],
        retention_tier_share=retention[1],
    )
    return tenant, digests


def _limit(value: object, where: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{where}: a whole number above 0 needed, or leave it out")
    return value


def _number(value: object, most: float, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise ConfigError(f"{where}: a number from 0 to {most:g} needed, or leave it out")
    return float(value)


def _digest(text: object, where: str) -> bytes:
    if isinstance(text, str) and text.startswith(_PREFIX) and len(text) == len(_PREFIX) + 64:
        try:
            return bytes.fromhex(text.removeprefix(_PREFIX))
        except ValueError:
            pass
    raise ConfigError(f"{where}: 'sha256:' and 64 hex digits needed; python -m spillway_gateway --hash-key makes them")
