"""The keys of everything that the S3 tier stores in a bucket: built and parsed, without I/O.

<prefix>spillway1/<namespace hex>/document     the namespace document
<prefix>spillway1/<namespace hex>/<key hex>    a block: a frame of 192 bytes of header and the payload
"""

from __future__ import annotations

import re
from dataclasses import dataclass

FOLDER = "spillway1"  # the number is the version of this key layout

_NAME = re.compile(r"(?P<namespace>[0-9a-f]{32})/(?:(?P<document>document)|(?P<key>(?:[0-9a-f]{2}){1,64}))")


@dataclass(frozen=True, slots=True)
class S3Names:
    """The names within one namespace, given as 32 hex digits. ``root``: see :func:`root_of`."""

    root: str
    namespace: str

    @property
    def folder(self) -> str:
        return f"{self.root}/{self.namespace}"

    @property
    def document(self) -> str:
        return f"{self.folder}/document"

    def block(self, key: bytes) -> str:
        return f"{self.folder}/{key.hex()}"


@dataclass(frozen=True, slots=True)
class S3Name:
    """The parts of one object's key. A document has no ``key``."""

    namespace: str
    key: bytes | None = None


def root_of(prefix: str) -> str:
    """Return the common beginning of the keys of this tier's objects, without a slash at its end."""
    return f"{prefix}{FOLDER}"


def parse_name(root: str, name: str) -> S3Name | None:
    """Return the parts of an object's key; None if it is not one of this tier."""
    if not name.startswith(f"{root}/"):
        return None
    match = _NAME.fullmatch(name, len(root) + 1)
    if match is None:
        return None
    return S3Name(match["namespace"], None if match["key"] is None else bytes.fromhex(match["key"]))
