"""How an object store is named: the bucket, the beginning of its keys, the endpoint. Whole texts match."""

from __future__ import annotations

BUCKET = r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"
PREFIX = r"([A-Za-z0-9._-]+/)*"
ENDPOINT = r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?/?"
