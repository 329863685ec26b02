"""A client in a process of its own that reads one stream and records when bytes came.

`python -m attack.paced_stream PORT MODEL FILE [KEY]` appends one time.monotonic() per read to FILE; all processes of a
machine share that clock. It ends when the stream does.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from stack_driver.deadlines import eventually

SECONDS_MAX = 120.0  # of any single wait: a machine with other work, not a slow product


class PacedStream:
    """A running recorder of the stream that `port` gives for `model`."""

    def __init__(self, port: int, model: str, file: Path, key: str = "") -> None:
        self._file = file
        file.touch()
        command = [sys.executable, "-m", "attack.paced_stream", str(port), model, str(file), key]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
        self._process = subprocess.Popen(command, env=environment)
        eventually("the paced stream flows", lambda: len(self.arrivals()) > 5, SECONDS_MAX)

    def arrivals(self, since: float = 0.0) -> list[float]:
        """Seconds of time.monotonic(), in order."""
        whole = self._file.read_text().rpartition("\n")[0]
        return [at for at in map(float, whole.split()) if at >= since]

    def longest_gap(self, since: float) -> float:
        """Seconds without a byte, from `since` to the first arrival after now. Raises where the stream has ended."""
        now = time.monotonic()

        def settled() -> list[float]:
            assert self._process.poll() is None, "the other client's stream ended"
            arrivals = self.arrivals(since)
            return arrivals if arrivals and arrivals[-1] > now else []

        arrivals = eventually("the other client's stream goes on", settled, SECONDS_MAX)
        times = [since, *arrivals]
        return max(later - earlier for earlier, later in itertools.pairwise(times))

    def close(self) -> None:
        self._process.kill()
        self._process.wait(SECONDS_MAX)


async def record(port: int, model: str, file: Path, key: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"model": model, "prompt": "steady", "stream": True}).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: paced\r\nauthorization: Bearer %s\r\ncontent-length: %d\r\n\r\n%s"
        % (key.encode(), len(body), body)
    )
    status = await reader.readline()
    assert b" 200 " in status, status
    await reader.readuntil(b"\r\n\r\n")
    with file.open("a", buffering=1) as lines:
        while await reader.read(65536):
            lines.write(f"{time.monotonic():.6f}\n")


if __name__ == "__main__":
    _, number, model_name, path, *rest = sys.argv
    asyncio.run(record(int(number), model_name, Path(path), rest[0] if rest else ""))
