"""Loads from an object store over paths of given bandwidths: what they take, and when they are given up. No engine.

    python bench/narrow_path.py [--chunks 32] [--megabytes 5.9] [--compute-seconds 17] [--round-trips-ms 1 50]

Each load is the first one of its tier, of so many chunks that would be computed in --compute-seconds. The bandwidths
are multiples of that at which loading takes as long as computing. Prints a table; writes build/bench/narrow_path.json
(flat; units are in the keys).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from bench_report import write_report
from slow_path import slow_path

from spillway_connector.limits import TransferLimits
from spillway_connector.namespace import Namespace
from spillway_connector.tiers.s3.place import S3Place
from spillway_connector.tiers.s3.tier import S3Tier
from spillway_connector.transfer.jobs import JobOutcome
from spillway_connector.transfer.shared_tier import Lookup, SharedTier
from spillway_stack import object_store

SHARES = (0.2, 0.4, 0.8, 1.5, 4.0)  # of the bandwidth at which loading takes as long as computing
FIRST_PORT = 26_000
START_SECONDS = 60.0
LOOK_SECONDS = 0.005  # between two steps of a scheduler
LIMITS = TransferLimits(lookup_timeout_seconds=5, load_timeout_seconds=600)
NAMESPACE = Namespace.of({"bench": "narrow path"})
OUTPUT = Path("build/bench/narrow_path.json")


@contextmanager
def server() -> Iterator[int]:
    """A SeaweedFS on loopback; its port."""
    with tempfile.TemporaryDirectory(prefix="spillway-bench-") as name:
        folder = Path(name)
        (folder / "identities.json").write_text(object_store.identities())
        ports = range(FIRST_PORT, FIRST_PORT + len(object_store.PORTS))
        command = object_store.server_arguments(object_store.server_binary(), folder, folder / "identities.json", ports)
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        try:
            until = time.monotonic() + START_SECONDS
            while process.poll() is None and time.monotonic() < until:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{ports[0]}/healthz", timeout=5).close()
                    break
                except OSError:
                    time.sleep(0.1)
            object_store.make_bucket(object_store.BUCKET, ports[0], *object_store.KEYS.values())
            yield ports[0]
        finally:
            process.kill()
            process.wait()


def first_load(
    tier: S3Tier, keys: Sequence[bytes], rows: np.ndarray, compute_seconds: float
) -> tuple[float, JobOutcome]:
    """Seconds until the load has ended or was given up, and how it ended."""
    row_bytes = rows.shape[1]
    shared = SharedTier(
        tier, rows=memoryview(rows).cast("B"), row_bytes=row_bytes, payload_bytes=row_bytes, limits=LIMITS
    )
    while Lookup.PENDING in (found := shared.lookup_prefix(keys, "first").found):
        shared.step_end()
        shared.wait_for_progress(1.0)
    if set(found) != {Lookup.HIT}:
        raise SystemExit("narrow_path: a lookup was not answered in time")
    begun = time.monotonic()
    shared.submit_load(1, keys, range(len(keys)))
    while not (outcomes := shared.finished()):
        shared.give_up_behind(compute_seconds / len(keys), lambda job_id: False)
        time.sleep(LOOK_SECONDS)
    seconds = time.monotonic() - begun
    shared.close(1.0)
    return seconds, outcomes[0]


def tier_at(port: int, payload_bytes: int) -> S3Tier:
    endpoint = f"http://127.0.0.1:{port}"
    place = S3Place(object_store.BUCKET, prefix="kv/", endpoint=endpoint, path_style=True, region="us-east-1")
    return S3Tier(NAMESPACE, payload_bytes, place)


def measure(port: int, keys: Sequence[bytes], given: argparse.Namespace) -> dict[str, float]:
    """Each on a path of its own, since what a load leaves on one holds up the next."""
    payload_bytes = int(given.megabytes * 1e6)
    rows = np.zeros((len(keys), payload_bytes), np.uint8)
    report: dict[str, float] = {}
    for milliseconds in given.round_trips_ms:
        for share in SHARES:
            with slow_path(port) as path:
                path.round_trip_seconds = milliseconds / 1000
                path.bytes_per_second = share * payload_bytes * len(keys) / given.compute_seconds
                tier = tier_at(path.port, payload_bytes)
                seconds, outcome = first_load(tier, keys, rows, given.compute_seconds)
            of_computing = seconds / given.compute_seconds
            key = f"at_{milliseconds:g}_ms_of_{share:g}_of_break_even"
            report[f"{key}_seconds"] = round(seconds, 3)
            report[f"{key}_of_computing_ratio"] = round(of_computing, 3)
            if outcome.success:
                report[f"{key}_share_of_bandwidth_ratio"] = round(1 / share / of_computing, 3)
            ended = f"{100 / share / of_computing:.0f} % of the bandwidth" if outcome.success else "given up"
            print(f"{milliseconds:g} ms, {share:g} of break-even: {seconds:.2f} s, {100 * of_computing:.1f} %, {ended}")
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description="Loads over narrow paths.")
    parser.add_argument("--chunks", type=int, default=32)
    parser.add_argument("--megabytes", type=float, default=5.9, help="of a chunk")
    parser.add_argument("--compute-seconds", type=float, default=17.0, help="of all chunks")
    parser.add_argument("--round-trips-ms", type=float, nargs="+", default=[1.0, 50.0])
    given = parser.parse_args()
    os.environ.update(object_store.KEYS)
    keys = [number.to_bytes(32, "big") for number in range(1, given.chunks + 1)]
    with server() as port:
        filling = tier_at(port, int(given.megabytes * 1e6))
        payload = memoryview(os.urandom(filling.payload_bytes))
        for key in keys:
            filling.store(key, payload, time.monotonic() + 60)
        filling.close()
        report = measure(port, keys, given)
    write_report(report, OUTPUT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
