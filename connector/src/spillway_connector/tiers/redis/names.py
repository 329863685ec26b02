"""The keys of everything that the Redis tier stores on a server: built and parsed, without I/O.

spillway1:<namespace hex>:<key hex>              a block, or the commit record of one in stripes
spillway1:<namespace hex>:<key hex>:<index>      another stripe of it
spillway1:<namespace hex>:document               the namespace document
spillway1:<namespace hex>:tenant:<tenant hex>    which blocks a tenant has, where tenants have a quota
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

KEY_PREFIX = "spillway1"  # the number is the version of this key layout

_NAME = re.compile(
    rb"spillway1:(?P<namespace>[0-9a-f]{32}):"
    rb"(?:(?P<document>document)|tenant:(?P<tenant>[0-9a-f]{16})|"
    rb"(?P<key>(?:[0-9a-f]{2}){1,64})(?::(?P<stripe>0|[1-9][0-9]{0,4}))?)"
)


@dataclass(frozen=True, slots=True)
class RedisNames:
    """The names within one namespace, given as 32 hex digits."""

    namespace: str
    prefix: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefix", f"{KEY_PREFIX}:{self.namespace}:".encode("ascii"))

    @property
    def document(self) -> bytes:
        return self.prefix + b"document"

    def block(self, key: bytes) -> bytes:
        return self.prefix + key.hex().encode("ascii")

    def stripe(self, key: bytes, index: int) -> bytes:
        return b"%b:%d" % (self.block(key), index)

    def tenant(self, tenant: bytes) -> bytes:
        return self.prefix + b"tenant:" + tenant.hex().encode("ascii")


@dataclass(frozen=True, slots=True)
class RedisName:
    """The parts of one Redis key. A commit record has a ``key`` and no ``stripe``; a document has neither."""

    namespace: str
    key: bytes | None = None
    stripe: int | None = None
    tenant: bytes | None = None


def parse_name(name: bytes) -> RedisName | None:
    """The parts of ``name``; None if it is not a key of this tier."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    key, stripe, tenant = match["key"], match["stripe"], match["tenant"]
    return RedisName(
        match["namespace"].decode(),
        None if key is None else bytes.fromhex(key.decode()),
        None if stripe is None else int(stripe),
        None if tenant is None else bytes.fromhex(tenant.decode()),
    )
