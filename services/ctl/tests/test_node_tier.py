"""`spillway node-tier` as a process of its own: engines that ask, kill -9, what it serves and gives back."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from spillway_connector.node.region import NodeRegion
from spillway_connector.plan.node_index import READY
from spillway_connector.plan.node_records import RowWords
from spillway_connector.tiers.disk.slab.writers import new_number
from spillway_ctl.command import main
from spillway_ctl.node_tier import Page

WAIT_SECONDS = 60.0  # never waited out if all is well
ROW_BYTES = 1 << 20
ROWS = 64
OURS = b"o" * 16


class Keeper:
    """The command, and what it has printed."""

    def __init__(self, path: Path, *more: str) -> None:
        command = [sys.executable, "-m", "spillway_ctl", "node-tier", "--path", str(path)]
        self.process = subprocess.Popen(
            [*command, "--bytes", str(ROWS * ROW_BYTES), "--port", "0", *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.process.stdout is not None
        self.lines = self.process.stdout
        self.url = self.line_with("serves http").split()[2].removesuffix("/metrics")
        self.line_with("keeps ")

    def line_with(self, words: str) -> str:
        for line in self.lines:
            if words in line:
                return line
        raise AssertionError(f"ended without {words!r}")

    def page(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=WAIT_SECONDS) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_SECONDS)
        self.lines.close()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(WAIT_SECONDS)
        self.lines.close()
        return status


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "node"


def opened(path: Path) -> NodeRegion:
    """Open the node's rows as an engine does that waits for the keeper."""
    return NodeRegion(path, ROWS, ROW_BYTES, new_number(), kept_seconds=WAIT_SECONDS)


def test_two_engines_share_what_the_command_makes_and_it_may_be_killed_and_start_again(path: Path):
    keeper = Keeper(path)
    first, second = opened(path), opened(path)
    keeper.line_with("made ")
    assert first.memory.taken_bytes >= ROWS * ROW_BYTES
    places = first.join(lambda: 1), second.join(lambda: 1)
    keeper.kill()
    with first.changing() as index:
        known = RowWords(ROWS)
        known.reserved[3] = index.reserve([3], places[0])[0]
        index.claim([3], known, OURS, [b"k" * 36], places[0], now_ms=5)
        index.publish([3], known, places[0])
    assert second.index.count()[READY] == 1
    third = opened(path)  # an existing region needs no keeper
    again = Keeper(path)
    until = time.monotonic() + WAIT_SECONDS
    while not (text := again.page("/metrics")[1]):  # its first look at the rows
        assert time.monotonic() < until, "it never looked at the rows"
        time.sleep(0.01)
    assert f'spillway_node_tier_bytes{{row_bytes="{ROW_BYTES}"}} {ROWS * ROW_BYTES}\n' in text
    assert f'spillway_node_tier_rows{{row_bytes="{ROW_BYTES}",state="ready"}} 1\n' in text
    assert f'spillway_node_tier_engines{{row_bytes="{ROW_BYTES}"}} 2\n' in text
    assert f'namespace="{OURS.hex()[:8]}"}} 1\n' in text
    assert again.page("/health") == (200, "ok\n")
    assert again.page("/ready") == (200, "ready\n")
    assert again.page("/other")[0] == 404
    for region in (first, second, third):
        region.close()
    assert again.stop() == 0
    assert (path / f"rows-{ROW_BYTES}" / "rows").stat().st_size == ROWS * ROW_BYTES  # it stays
    assert main(["node-tier", "--path", str(path), "--remove"]) == 0
    assert not (path / f"rows-{ROW_BYTES}" / "rows").exists()


def test_a_kill_while_it_takes_memory_costs_the_engine_that_waits_nothing_but_time(path: Path):
    """Killed at whatever moment after the file has its name: before, in the middle of, or after taking its memory."""
    keeper = Keeper(path)
    found: list[NodeRegion] = []
    engine = threading.Thread(target=lambda: found.append(opened(path)))
    engine.start()
    keeper.line_with("making ")
    keeper.kill()
    again = Keeper(path)
    engine.join(WAIT_SECONDS)
    (region,) = found
    assert region.memory.taken_bytes >= ROWS * ROW_BYTES
    region.close()
    again.stop()


def test_a_folder_that_is_no_folder_is_said_and_the_command_goes_on_when_it_is_one(path: Path):
    path.write_text("")
    keeper = Keeper(path)
    assert "cannot be used" in keeper.line_with("correct that, and it goes on")
    assert keeper.page("/ready")[0] == 503
    path.unlink()
    opened(path).close()
    assert keeper.stop() == 0


def test_what_is_missing_or_in_use_is_a_sentence(path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["node-tier", "--path", str(path)]) == 2
    assert "needs --bytes above 0" in capsys.readouterr().err
    assert main(["node-tier", "--path", str(path), "--remove"]) == 0
    region = NodeRegion(path, 2, 4096, new_number())
    assert main(["node-tier", "--path", str(path), "--remove"]) == 2
    assert "rows-4096 stays, engines use it" in capsys.readouterr().out
    region.close()
    with pytest.raises(SystemExit):
        main(["node-tier", "--path", str(path), "--bytes", "many"])


def test_the_page_says_when_the_command_hangs():
    now = [0.0]
    page = Page(lambda: now[0])
    assert page.answer("/health")[0] == 200
    now[0] = 901.0
    assert page.answer("/health")[0] == 503
    page.beat()
    assert page.answer("/health")[0] == 200
