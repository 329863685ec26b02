"""The settings of engines with a chain of tiers, what they are asked, and what lies in the bucket."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import obstore
from engine_matrix.models import VOCABULARY
from obstore.store import S3Store
from s3_servers import BUCKET, KEYS, S3Server

PROMPT_BLOCKS = 12  # of 20 that the device has: each prompt evicts another one
CPU_BLOCKS = 16
NVME_BYTES = 2 << 20  # about 30 blocks of 64 KiB and their heads
IDLE_SECONDS = 0.5
# No deadline may pass on a busy machine, and loads happen whether they pay or not.
_PATIENT = {
    "lookup_timeout_seconds": 60.0,
    "load_timeout_seconds": 60.0,
    "store_timeout_seconds": 60.0,
    "store_queue_seconds_max": 60.0,
}


def chained(
    folder: Path, server: S3Server, limits: dict[str, float] = _PATIENT, *, cpu_blocks: int = CPU_BLOCKS
) -> dict[str, Any]:
    """The connector's settings. folder: of the NVMe tier."""
    below = {
        "type": "s3",
        "bucket": BUCKET,
        "prefix": "kv/",
        "endpoint": server.endpoint,
        "path_style": True,
        "idle_seconds": IDLE_SECONDS,
    }
    tier = {"type": "nvme", "mode": "files", "path": str(folder), "max_bytes": NVME_BYTES}
    return {
        "num_cpu_blocks": cpu_blocks,
        "prefill_tokens_per_second": 1e-3,
        "request_wait_seconds": limits["load_timeout_seconds"],
        "secondary_tiers": [tier | limits | {"below": below | limits}],
    }


def prompt(number: int, block_tokens: int) -> list[int]:
    chosen = random.Random(number)
    return [chosen.randrange(3, VOCABULARY) for _ in range(PROMPT_BLOCKS * block_tokens + 3)]


def blocks_below(server: S3Server) -> int:
    """The blocks in the bucket."""
    bucket = S3Store(
        BUCKET,
        endpoint=server.endpoint,
        region="us-east-1",
        access_key_id=KEYS[0],
        secret_access_key=KEYS[1],
        client_options={"allow_http": True},
    )
    found = (each for page in obstore.list(bucket) for each in page)
    return sum(not each["path"].endswith("document") for each in found)


def bytes_above(folder: Path) -> int:
    """Return the number of bytes that the files of the NVMe tier take."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
