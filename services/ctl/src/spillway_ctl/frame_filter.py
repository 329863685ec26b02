"""Choice of the frames that a command is about. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from blake3 import blake3

from spillway_connector.tiers.inspection import TENANT_HEX_DIGITS, StoredFrame
from spillway_connector.tiers.tier import NO_TENANT, TENANT_BYTES
from spillway_ctl.quantities import format_seconds
from spillway_settings.tenant_salts import account_of

DEFAULT_TENANT = "default"
_PREFIX = re.compile(r"[0-9a-f]{1,32}")


@dataclass(frozen=True, slots=True)
class FrameFilter:
    """A choice of frames; None and "" stand for any. older_s, newer_s: bounds of a frame's age in seconds."""

    namespace_prefix: str = ""
    tenant: bytes | None = None
    older_s: float | None = None
    newer_s: float | None = None

    @property
    def has_ages(self) -> bool:
        return self.older_s is not None or self.newer_s is not None

    @property
    def whole_namespaces(self) -> bool:
        """Whether it takes all of each namespace that it is about."""
        return self.tenant is None and not self.has_ages

    @property
    def is_everything(self) -> bool:
        return self.whole_namespaces and not self.namespace_prefix

    @property
    def needs_headers(self) -> bool:
        """Whether it can be decided from headers alone."""
        return self.tenant is not None

    def takes(self, frame: StoredFrame, now_s: float) -> bool:
        """A frame with a damaged header has no known tenant and matches none."""
        if self.tenant is not None and (frame.tenant != self.tenant or frame.damage is not None):
            return False
        if not frame.namespace.hex().startswith(self.namespace_prefix):
            return False
        if not self.has_ages:
            return True
        reference_s = frame.age_reference_s
        if reference_s is None:
            return False
        age_s = now_s - reference_s
        return (self.older_s is None or age_s > self.older_s) and (self.newer_s is None or age_s < self.newer_s)

    def __str__(self) -> str:
        parts = []
        if self.namespace_prefix:
            parts.append(f"of namespace {self.namespace_prefix}{'' if len(self.namespace_prefix) == 32 else '...'}")
        if self.tenant is not None:
            parts.append(f"of tenant {tenant_name(self.tenant)}")
        if self.older_s is not None:
            parts.append(f"older than {format_seconds(self.older_s)}")
        if self.newer_s is not None:
            parts.append(f"younger than {format_seconds(self.newer_s)}")
        return " ".join(parts) if parts else "of all namespaces"


def parse_namespace_prefix(text: str) -> str:
    """Raises ValueError."""
    if _PREFIX.fullmatch(text.lower()) is None:
        raise ValueError(f"{text!r} is no namespace; give the first of its 32 hex digits, as `status` shows them")
    return text.lower()


def parse_tenant(text: str) -> bytes:
    """16 hex digits or `default`. Raises ValueError."""
    if text == DEFAULT_TENANT:
        return NO_TENANT
    try:
        tenant = bytes.fromhex(text)
    except ValueError:
        tenant = b""
    if len(tenant) != TENANT_BYTES:
        raise ValueError(
            f"{text!r} is no tenant; give {TENANT_HEX_DIGITS} hex digits or {DEFAULT_TENANT}; "
            "`spillway tier tenant --salt-env NAME` finds the digits of a cache salt"
        )
    return tenant


def tenant_name(tenant: bytes) -> str:
    """Return the tenant's name for people: `default` for requests without a cache salt."""
    return DEFAULT_TENANT if tenant == NO_TENANT else tenant.hex()


def tenant_of_salt(salt: str) -> bytes:
    """The tenant of requests with this cache salt, as engines compute it."""
    return blake3(account_of(salt).encode("utf-8")).digest(length=TENANT_BYTES)
