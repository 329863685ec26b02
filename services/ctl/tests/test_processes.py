"""The command as a process of its own: terminals, pipes, signals, and engines that go on writing meanwhile."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from ctl_media import FRAME, ONE, FileMedium, SlabMedium, fill, left, soon

from spillway_ctl.command import main

COMMAND = [sys.executable, "-m", "spillway_ctl", "tier"]
WAIT_SECONDS = 60.0  # never waited out if all is well

WRITER = """
import json, sys, threading
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from ctl_media import FileMedium, SlabMedium, key_of, payload_of, soon, PAYLOAD_BYTES, TENANT
from spillway_connector.errors import TierMiss
medium = (FileMedium if sys.argv[2] == "files" else SlabMedium)(Path(sys.argv[3]))
tier = medium.tier()
tier.prepare(soon())
report = {"stored": 0, "hits": 0, "wrong": 0, "errors": []}
stopped = threading.Event()
payloads = [payload_of(seed) for seed in range(64)]

def work():
    target = memoryview(bytearray(PAYLOAD_BYTES))
    while not stopped.is_set():
        for seed, payload in enumerate(payloads):
            try:
                tier.store(key_of(seed), payload, soon(), TENANT if seed % 2 else bytes(8))
                report["stored"] += 1
                tier.load(key_of((seed * 7) % 64), target, soon())
                report["hits"] += 1
                report["wrong"] += target != payloads[(seed * 7) % 64]
            except TierMiss:
                pass
            except Exception as error:
                report["errors"].append(repr(error))
        print("round", flush=True)

thread = threading.Thread(target=work)
thread.start()
sys.stdin.readline()
stopped.set()
thread.join()
tier.close()
print(json.dumps(report))
"""


def on_terminal(arguments: list[str], answer: bytes = b"") -> tuple[int, str]:
    """Run on a pseudo terminal; what it shows. ``answer`` is typed when a question mark and bracket show."""
    primary, secondary = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=secondary,
        stdout=secondary,
        stderr=secondary,
        env={**os.environ, "COLUMNS": "120"},
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(1, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - so that ^C becomes a signal
    )
    os.close(secondary)
    shown = b""
    while select.select([primary], [], [], WAIT_SECONDS)[0]:
        try:
            part = os.read(primary, 4096)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        shown += part
        if answer and b"[y/N]" in shown:
            os.write(primary, answer)
            answer = b""
    os.close(primary)
    return process.wait(WAIT_SECONDS), shown.decode()


def test_progress_is_for_terminals_only(tmp_path: Path) -> None:
    files = FileMedium(tmp_path / "tier")
    fill(files, range(40))
    arguments = ["verify", *files.options, "--rate-limit", "1MiB/s"]  # 800 KB: most of a second
    status, shown = on_terminal(arguments)
    assert status == 0 and "\r\x1b[K" in shown and "left" in shown and "verified 40 frames" in shown
    piped = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=WAIT_SECONDS, check=True)
    assert piped.stderr == "" and "\x1b" not in piped.stdout and piped.stdout.count("\n") == 1


@pytest.mark.parametrize(("answer", "status", "kept"), [(b"y\n", 0, 0), (b"\n", 3, 5), (b"\x03", 3, 5)])
def test_purge_asks_on_a_terminal(tmp_path: Path, answer: bytes, status: int, kept: int) -> None:
    slabs = SlabMedium(tmp_path / "tier")
    fill(slabs, range(5))
    found, shown = on_terminal(["purge", *slabs.options, "--all"], answer)
    assert found == status
    assert "Remove 5 frames" in shown
    assert len(left(slabs, range(5))) == kept


def test_a_reader_that_has_enough_is_no_error(tmp_path: Path) -> None:
    files = FileMedium(tmp_path / "tier")
    fill(files, range(400))
    listing = subprocess.Popen(
        [*COMMAND, "ls", *files.options, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert listing.stdout is not None and listing.stderr is not None
    assert json.loads(listing.stdout.readline())["namespace"] == ONE.hex
    listing.stdout.close()
    assert listing.wait(WAIT_SECONDS) == 0 and listing.stderr.read() == b""
    listing.stderr.close()


@pytest.mark.parametrize(("kind", "number"), [(FileMedium, signal.SIGINT), (SlabMedium, signal.SIGTERM)])
def test_a_signal_ends_a_verification_that_says_how_far_it_came(
    kind: type[FileMedium] | type[SlabMedium], number: signal.Signals, tmp_path: Path
) -> None:
    medium = kind(tmp_path / "tier")
    fill(medium, range(50))
    medium.overwrite(ONE, _first_key(medium), 0, b"X")
    process = subprocess.Popen(
        [*COMMAND, "verify", *medium.options, "--remove-damaged", "--rate-limit", "20KB/s"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("damaged  magic")  # it is at work, and would be for 50 s
    process.send_signal(number)
    rest, _ = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 130 and rest.startswith("interrupted: verified ")
    assert len(left(medium, range(50))) == 49


@pytest.mark.parametrize("kind", ["files", "slab"])
def test_purging_under_a_live_writer_serves_no_wrong_byte_and_leaves_no_error(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "tier"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(Path(__file__).parent), kind, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdin is not None and writer.stdout is not None
    assert writer.stdout.readline() == "round\n"
    removed = 0
    for arguments in (["--all"], ["--tenant", "default"], ["--namespace", ONE.hex], ["--all"]):
        assert main(["tier", "purge", "--nvme", str(root), *arguments, "--yes", "--json"]) == 0
        removed += json.loads(capsys.readouterr().out)["removed_frames"]
        assert main(["tier", "verify", "--nvme", str(root), "--rate-limit", "none"]) == 0
        capsys.readouterr()
        assert writer.stdout.readline() == "round\n"
    out, _ = writer.communicate("\n", timeout=WAIT_SECONDS)
    report = json.loads(out.splitlines()[-1])
    assert report["wrong"] == 0 and report["errors"] == [] and report["hits"] > 0
    assert removed > 64  # frames came back and were removed again
    medium = (FileMedium if kind == "files" else SlabMedium)(root)
    tier = medium.tier()
    there = len(left(medium, range(64)))
    assert tier.resident_bytes(soon()) == there * FRAME.frame_bytes
    tier.close()


def _first_key(medium: FileMedium | SlabMedium) -> bytes:
    first = next(medium.store().frames(headers=True))
    assert first.key is not None
    return first.key
