"""Threads that work on many prompts in turns: a step of one, then a step of another's.

Work is a generator that yields between its steps, which take some milliseconds each. Groups (tenants) take turns, and
within a group its jobs do, so a long prompt, or a thousand of one tenant's, delay another's by a step and not by all.
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
        """True when the job is over. One whose answer nobody waits for any more ends here."""
        if self.answer.cancelled():
            self.steps.close()
            return True
        try:
            next(self.steps)
        except StopIteration as end:
            self._tell(self.answer.set_result, end.value)
        except Exception as error:
            self._tell(self.answer.set_exception, error)
        else:
            return False
        return True

    def _tell(self, tell: Callable[[Any], None], outcome: object) -> None:
        def on_loop() -> None:
            if not self.answer.done():
                tell(outcome)

        with contextlib.suppress(RuntimeError):  # the loop is closed, and whoever asked is gone
            self.loop.call_soon_threadsafe(on_loop)


class FairThreads:
    """threads: at most so many; each starts when there is work for it."""

    def __init__(self, threads: int, name: str) -> None:
        self._threads_max = threads
        self._name = name
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._groups: OrderedDict[str, deque[_Job]] = OrderedDict()  # the first is next
        self._idle = 0
        self._closed = False

    def run(self, group: str, steps: Generator[None, None, Result]) -> asyncio.Future[Result]:
        """The generator's return value. Cancelling the future ends the work at its next step. On the event loop."""
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
        """What waits is dropped; a running step ends by itself."""
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
            del job, jobs  # or an idle thread would keep a prompt
