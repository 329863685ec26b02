from __future__ import annotations

import gc
import logging
import threading

import pytest

from spillway_connector.errors import RefusedReason, TierRefused
from spillway_connector.tiers.disk.maintenance import STOP_SECONDS, MaintenanceThread

WAIT_SECONDS = 60.0


class Rounds:
    def __init__(self, failure: Exception | None = None) -> None:
        self.begun = threading.Semaphore(0)
        self.failure = failure

    def maintain(self) -> None:
        self.begun.release()
        if self.failure is not None:
            raise self.failure


def test_it_runs_again_until_it_is_stopped() -> None:
    rounds = Rounds()
    thread = MaintenanceThread("here", rounds.maintain, 0.001)
    assert not rounds.begun.acquire(blocking=False)
    thread.start()
    thread.start()
    for _ in range(3):
        assert rounds.begun.acquire(timeout=WAIT_SECONDS)
    thread.stop()
    thread.start()
    assert thread._thread is not None
    thread._thread.join(WAIT_SECONDS)
    assert not thread.is_running and thread.stop()


def test_waking_it_ends_the_pause() -> None:
    rounds = Rounds()
    thread = MaintenanceThread("here", rounds.maintain, 1e6)
    thread.start()
    for _ in range(3):
        thread.wake()
        assert rounds.begun.acquire(timeout=WAIT_SECONDS)
    assert thread.stop(), "stopping ends the pause, too"


def test_wakes_that_follow_each_other_cost_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    rests = threading.Semaphore(0)
    goes_on = threading.Event()

    class Stopped(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if timeout:  # the rest after a wake, which lasts until the test ends it
                rests.release()
                assert goes_on.wait(WAIT_SECONDS)
            return self.is_set()

    rounds = Rounds()
    thread = MaintenanceThread("here", rounds.maintain, 1e6)
    thread._stopped = Stopped()
    thread.start()
    for _ in range(100):
        thread.wake()
    assert rests.acquire(timeout=WAIT_SECONDS)
    for _ in range(100):
        thread.wake()
    goes_on.set()
    assert rounds.begun.acquire(timeout=WAIT_SECONDS)
    assert thread.stop() and not rounds.begun.acquire(blocking=False)


def test_a_stop_as_the_rest_after_a_wake_ends_is_not_slept_through() -> None:
    class Stopped(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            before = self.is_set()
            if timeout:  # the rest has ended, and only then does `stop` come
                self.set()
                thread.wake()
            return before

    rounds = Rounds()
    thread = MaintenanceThread("here", rounds.maintain, 1e6)
    thread._stopped = Stopped()
    thread.start()
    thread.wake()
    assert thread._thread is not None
    thread._thread.join(STOP_SECONDS)
    assert not rounds.begun.acquire(blocking=False) and not thread.is_running


def test_a_thread_stopped_before_its_start_never_runs() -> None:
    thread = MaintenanceThread("here", Rounds().maintain, 0.0)
    assert thread.stop()
    thread.start()
    assert thread._thread is None


@pytest.mark.parametrize("failure", [OSError(5, "sick"), TierRefused(RefusedReason.NO_SPACE, "sick")])
def test_a_failure_is_logged_and_survived(failure: Exception, caplog: pytest.LogCaptureFixture) -> None:
    rounds = Rounds(failure)
    thread = MaintenanceThread("NVMe tier /kv", rounds.maintain, 0.001)
    with caplog.at_level(logging.WARNING):
        thread.start()
        for _ in range(3):
            assert rounds.begun.acquire(timeout=WAIT_SECONDS)
        thread.stop()
    assert "NVMe tier /kv: maintenance failed" in caplog.text and "sick" in caplog.text


def test_a_tier_without_other_references_is_not_kept_alive() -> None:
    rounds = Rounds()
    thread = MaintenanceThread("here", rounds.maintain, 0.001)
    thread.start()
    running = thread._thread
    assert running is not None and rounds.begun.acquire(timeout=WAIT_SECONDS)
    del rounds
    gc.collect()
    running.join(WAIT_SECONDS)
    assert not running.is_alive()
