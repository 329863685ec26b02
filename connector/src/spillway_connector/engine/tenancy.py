"""The tenant of a request: from vLLM's cache salt to the eight bytes of a shared tier's accounting.

The salt itself may be a secret of the tenant: it is hashed here, at the edge, and neither kept nor logged.
"""

from __future__ import annotations

from dataclasses import dataclass

from blake3 import blake3
from vllm.v1.kv_offload.base import ReqContext

from spillway_connector.tiers.tier import NO_TENANT, TENANT_BYTES


@dataclass
class TenantContext(ReqContext):
    """vLLM's offloading context of a request, with its tenant."""

    tenant: bytes = NO_TENANT


def tenant_of(cache_salt: str | None) -> bytes:
    """Eight bytes; NO_TENANT for a request without a salt."""
    return blake3(cache_salt.encode()).digest(TENANT_BYTES) if cache_salt else NO_TENANT


def tenant_of_context(context: ReqContext) -> bytes:
    return context.tenant if isinstance(context, TenantContext) else NO_TENANT
