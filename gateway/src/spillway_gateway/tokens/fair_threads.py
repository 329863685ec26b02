"""Threads that work on many prompts by round robin, one step at a time.

A job is a generator that yields between steps of a few milliseconds. Groups (tenants) take turns, and within a group
its jobs do, so a long prompt, or a thousand prompts of one tenant, delay another tenant's by one step.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Generator
from typing import Any, TypeVar

Result = TypeVar("Result")


class _Job:
    __slots__ = ("answer", "loop", "steps")

    def __init__(self, steps: Generator[None, None, Any], answer: asyncio.Future[Any]) -> None:
        self.steps = steps
        self.answer = answer
        self.loop = answer.get_loop()

    def step(self) -> bool:
        """Run one step on the calling thread. Returns True when the job is over; a cancelled job ends here."""
        if self.answer.cancelled():
            self.steps.close()
            return True
        try:
            next(self.steps)
        except StopIteration as end:
            self._resolve(self.answer.set_result, end.value)
        except Exception as error:
            self._resolve(self.answer.set_exception, error)
        except BaseException as error:  # a panic in a library; it must not end the thread
            self._resolve(self.answer.set_exception, RuntimeError(f"{error.__class__.__name__}: {error}"))
        else:
            return False
        return True

    def _resolve(self, set_outcome: Callable[[Any], None], outcome: object) -> None:
        def on_loop() -> None:
            if not self.answer.done():
                set_outcome(outcome)

        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(on_loop)


class FairThreads:
    """A pool of threads, each started when there is work for it. run() and close() are called on the event loop."""

    def __init__(self, threads: int, name: str) -> None:
        self._threads_max = threads
        self._name = name
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._groups: OrderedDict[str, deque[_Job]] = OrderedDict()  # the first is served next
        self._idle = 0
        self._closed = False

    def run(self, group: str, steps: Generator[None, None, Result]) -> asyncio.Future[Result]:
        """Return a future of the generator's return value or exception. Cancelling it ends the job at its next step."""
        answer: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        with self._changed:
            if self._closed:
                answer.cancel()
                return answer
            self._groups.setdefault(group, deque()).append(_Job(steps, answer))
            if self._idle:
                self._changed.notify()
            elif len(self._threads) < self._threads_max:
                thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
        return answer

    def close(self) -> None:
        """Drop queued jobs; a running step finishes."""
        with self._changed:
            self._closed = True
            self._groups.clear()
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._groups:
                    if self._closed:
                        return
                    self._idle += 1
                    self._changed.wait()
                    self._idle -= 1
                group, jobs = self._groups.popitem(last=False)
                job = jobs.popleft()
                if jobs:
                    self._groups[group] = jobs
            if not job.step():
                with self._changed:
                    if not self._closed:
                        self._groups.setdefault(group, deque()).append(job)
            del job, jobs  # or an idle thread would hold a reference to a prompt
