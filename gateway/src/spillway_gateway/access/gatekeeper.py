"""Derives from a request's headers its tenant, the tenant's limits and salt, and the headers for the engine.

Without a keys file every request has the tenant NOBODY: the client's headers pass unchanged, and its salt with a prefix
of clients' salts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from spillway_gateway.access.keys import NOBODY, KeyRing, Priority, Tenant, read_keys
from spillway_gateway.access.limits import Settlement, SharedLimitsUnavailable, TenantUsage, limited
from spillway_gateway.background import on_daemon_thread
from spillway_gateway.config.certificate import file_state
from spillway_gateway.config.settings import AuthConfig
from spillway_gateway.config.unique_yaml import Reading
from spillway_gateway.errors import (
    BackgroundNotCounted,
    ConfigError,
    KeyMissing,
    KeyUnknown,
    ModelForbidden,
    OperatorOnly,
    RouteNotSalted,
    TokensNotCounted,
)
from spillway_settings.tenant_salts import SECRET_BYTES_MIN, client_salt, tenant_salt

if TYPE_CHECKING:
    from spillway_gateway.access.shared_limits import SharedLimits

logger = logging.getLogger(__name__)

Headers = list[tuple[bytes, bytes]]
_CREDENTIALS = frozenset({b"authorization", b"x-api-key", b"api-key"})
_PRIORITY = b"x-vllm-priority"  # goes before the body's in vLLM 0.32; tenants have the priority of the keys file
_BEARER = b"bearer "


class Gatekeeper:
    """Authentication and limits of one gateway. On the event loop. Raises ConfigError for files that cannot be used."""

    def __init__(self, config: AuthConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._path = Path(config.keys_file) if config.keys_file is not None else None
        self._ring: KeyRing | None = None
        self._secret = b""
        self._engine_key: bytes | None = None
        self._usage: dict[str, TenantUsage] = {}
        self.shared: SharedLimits | None = None
        self._file_state: tuple[int, int, int] | None = None
        self.reloads_total = 0
        self.failed_reloads_total = 0
        if self._path is not None:
            assert config.salt_secret_file is not None
            self._secret = _secret(Path(config.salt_secret_file))
            self._file_state = file_state(self._path)
            self._ring = read_keys(self._path)
        if config.shared_limits is not None:
            from spillway_gateway.access.shared_limits import SharedLimits  # noqa: PLC0415 - its client only if used

            self.shared = SharedLimits(config.shared_limits, self._secret)
        if config.engine_key_file is not None:
            self._engine_key = _text(Path(config.engine_key_file), "auth.engineKeyFile")

    @property
    def enabled(self) -> bool:
        """Whether requests need an API key."""
        return self._ring is not None

    @property
    def engine_key(self) -> str | None:
        """The engines' own API key."""
        return self._engine_key.decode("latin-1") if self._engine_key is not None else None

    def tenant_of(self, headers: Iterable[tuple[bytes, bytes]]) -> Tenant:
        """The tenant of the request's API key. Raises KeyMissing or KeyUnknown; no message repeats the key."""
        if self._ring is None:
            return NOBODY
        key = _key(headers)
        if key is None:
            raise KeyMissing("No API key given; send one as 'Authorization: Bearer KEY'")
        tenant = self._ring.tenant_of(key)
        if tenant is None:
            raise KeyUnknown("This API key is not known here; check it, or ask for one")
        return tenant

    def allow_model(self, tenant: Tenant, asked: str, model: str) -> None:
        """asked: the name in the request, the model's or an alias; either may be in the tenant's list. Raises
        ModelForbidden."""
        if not tenant.may_use(model) and not tenant.may_use(asked):
            raise ModelForbidden(f"This API key may not use the model {asked!r}")

    def salt(self, tenant: Tenant, given: str | None) -> str | None:
        """The cache_salt for the engine; None: the body is not changed."""
        if self._ring is not None:
            return tenant_salt(self._secret, tenant.name, given)
        return client_salt(given) if given else None  # engines refuse an empty one

    def may_steer(self, tenant: Tenant, *, by_connector: bool) -> bool:
        """Whether the tenant's kv_transfer_params pass, in requests and in replies: a router that stands in front.
        by_connector: engines obey the gateway's, so that without keys no client's pass."""
        if self._ring is None:
            return not by_connector
        return tenant.name in self._config.kv_transfer_tenants

    def allow_unsalted(self, path: str) -> None:
        """Allow a route on which the engine caches and takes no salt. Raises RouteNotSalted if one tenant could detect
        another's prompts by cache hits."""
        if self._ring is not None and self._config.unsalted_routes == "refuse":
            raise RouteNotSalted(
                f"{path} is closed here: the engines cannot keep tenants' caches apart on it. Use another route, or "
                "ask the operator about auth.unsaltedRoutes"
            )

    def allow_uncounted(self, tenant: Tenant, path: str, *, prompt_counts: bool, reply_counts: bool) -> None:
        """prompt_counts, reply_counts: whether the tokens of prompt and reply will be known. Raises TokensNotCounted
        if the tenant has a limit of tokens that will not be."""
        if (tenant.counts_prompts and not prompt_counts) or (tenant.tokens_per_minute is not None and not reply_counts):
            raise TokensNotCounted(
                f"This API key has a limit of tokens, and those of this request to {path} cannot be counted; if "
                "the route can stream, send 'stream': true and 'stream_options': {'include_usage': true}"
            )

    def allow_background(self, tenant: Tenant) -> None:
        """Allow a response that its engine goes on with after the reply. Raises BackgroundNotCounted if the tenant has
        limits, which end with the exchange."""
        if tenant.limited:
            raise BackgroundNotCounted(
                "This API key has limits, and what a response takes in the background is not counted; send "
                "'background': false"
            )

    def allow_operator(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raises KeyMissing, KeyUnknown or OperatorOnly; without a keys file every caller is an operator."""
        if self._ring is not None and not self.tenant_of(headers).operator:
            raise OperatorOnly("This API key's tenant is no operator; see 'operator' in the keys file")

    def priority(self, tenant: Tenant, objective: int | None) -> Priority:
        """The priority of a request. objective: that of the InferenceObjective which it names, more is more urgent.

        Anybody can name one, so with keys it may only lower the priority of the tenant's key.
        """
        if objective is None:
            return tenant.priority
        asked = Priority.HIGH if objective > 0 else Priority.NORMAL if objective == 0 else Priority.LOW
        return max(asked, tenant.priority) if self.enabled else asked

    def engine_headers(self, headers: Headers) -> Headers:
        """The caller's headers without its API key, and with the engines' key."""
        if self._ring is None and self._engine_key is None:
            return headers
        kept = [pair for pair in headers if pair[0] not in _CREDENTIALS and pair[0] != _PRIORITY]
        if self._engine_key is not None:
            kept.append((b"authorization", b"Bearer " + self._engine_key))
        return kept

    async def begin(self, tenant: Tenant, prompt_tokens: int) -> TenantUsage:
        """Count a request of this tenant; end() must follow. Raises TenantLimited.

        With shared limits the replicas decide together while Redis answers in time, and each by itself otherwise.
        """
        usage = self._usage.get(tenant.name)
        if usage is None:
            usage = self._usage[tenant.name] = TenantUsage(self._clock())
        if self.shared is None or not tenant.limited:
            usage.begin(tenant, prompt_tokens, self._clock())
            return usage
        usage.running_requests += 1  # before the round trip: requests that are admitted meanwhile count this one
        try:
            refusal = await self.shared.admit(tenant, usage, prompt_tokens)
        except SharedLimitsUnavailable:
            usage.running_requests -= 1
            usage.begin(tenant, prompt_tokens, self._clock())
            return usage
        except BaseException:
            usage.running_requests -= 1
            raise
        if refusal is not None:
            usage.running_requests -= 1
            raise limited(tenant, refusal.limit, refusal.retry_after_seconds)
        usage.take(tenant, prompt_tokens, self._clock())  # kept in case this replica has to decide by itself
        return usage

    def end(self, tenant: Tenant, usage: TenantUsage, settlement: Settlement) -> None:
        """The request has ended. usage: as begin() returned it."""
        usage.end(tenant, settlement, self._clock())
        if self.shared is not None and tenant.limited:
            self.shared.ended(tenant, usage, settlement)

    async def follow(self) -> None:
        """Reload the keys whenever their file changes, until cancelled; a bad file is logged and the old keys stay."""
        reading = Reading()
        try:
            while self._path is not None:
                await asyncio.sleep(self._config.reload_seconds)
                await on_daemon_thread(partial(self.reload, reading))
        finally:
            reading.give_up()

    def reload(self, reading: Reading | None = None) -> None:
        """Reload if the file changed. On a thread. A mounted Secret is replaced by a link: its inode changes."""
        assert self._path is not None
        state = file_state(self._path)
        if state == self._file_state:
            return
        self._file_state = state
        try:
            ring = read_keys(self._path, reading)
        except ConfigError as error:
            self.failed_reloads_total += 1
            logger.error("%s; the previous keys stay in use", error)
            return
        self._ring = ring
        self.reloads_total += 1
        logger.info("auth.keysFile %s: reloaded", self._path)


def _key(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == _BEARER:
            return value[7:].strip() or None
        if name == b"x-api-key":
            return value.strip() or None
    return None


def _secret(path: Path) -> bytes:
    secret = _text(path, "auth.saltSecretFile")
    if len(secret) < SECRET_BYTES_MIN:
        raise ConfigError(
            f"auth.saltSecretFile {path}: {len(secret)} bytes given, at least {SECRET_BYTES_MIN} needed; "
            "make it with: openssl rand -base64 48"
        )
    return secret


def _text(path: Path, setting: str) -> bytes:
    try:
        text = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{setting} {path}: cannot be read ({error.strerror}); give a readable file") from error
    if not text or len(text) > 4096 or b"\n" in text or b"\r" in text:
        raise ConfigError(f"{setting} {path}: one line of 1 to 4096 bytes needed")
    return text
