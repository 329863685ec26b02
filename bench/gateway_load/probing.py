"""Probes as a kubelet sends them, from a separate process: a busy load generator would send them late.

    python -m gateway_load.probing 8000/ready 9000/ready

Every PERIOD_SECONDS each target is probed on a new connection, until stdin ends; then one line of JSON is printed. The
delay of the prober's timer shows how busy the machine was.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway_load.processes import answers

PERIOD_SECONDS = 0.1
TIMEOUT_SECONDS = 1.0  # a kubelet's default


@dataclass
class Target:
    port: int
    path: str
    seconds: list[float] = field(default_factory=list)
    failed: int = 0
    timer_late_seconds: float = 0.0

    def probe_until(self, end: threading.Event) -> None:
        while not end.is_set():
            before = time.monotonic()
            self.failed += not answers(self.port, self.path, TIMEOUT_SECONDS)
            after = time.monotonic()
            self.seconds.append(after - before)
            end.wait(PERIOD_SECONDS)
            if not end.is_set():
                self.timer_late_seconds = max(self.timer_late_seconds, time.monotonic() - after - PERIOD_SECONDS)


def main(arguments: Sequence[str]) -> None:
    targets = []
    for argument in arguments:
        port, _, path = argument.partition("/")
        targets.append(Target(int(port), "/" + path))
    end = threading.Event()
    threads = [threading.Thread(target=target.probe_until, args=(end,)) for target in targets]
    for thread in threads:
        thread.start()
    print("ready", flush=True)
    sys.stdin.read()
    end.set()
    for thread in threads:
        thread.join()
    print(json.dumps([[t.seconds, t.failed, t.timer_late_seconds] for t in targets]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
