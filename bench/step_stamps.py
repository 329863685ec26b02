"""Stamps of when an engine's scheduler planned each step and had its result, and of how long the user's prompts
waited.

vLLM is given `step_stamps.Stamped` or `step_stamps.StampedAsync` as its scheduler class; both do what vLLM's own do. A
request whose name begins with MARK is an order from the bench: `file=PATH` begins a file of stamps, and any other word
sets a constant of the rule of fair steps, `STEP_TIMES=1.1`.

A line of the file is `step,planned,seconds of planning,result,prompt tokens,requests that decode` or
`request,NAME,came,step planned,result of the first token`; times are those of time.monotonic, which processes share.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from spillway_connector.plan import step_shares

MARK = "stamps "


class _Stamping:
    """The part in front of one of vLLM's scheduler classes."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._file: TextIO | None = None
        self._came: dict[str, float] = {}
        self._first: dict[str, float] = {}  # when the step with a request's first tokens was planned
        self._planned: dict[int, tuple[float, float, int, int]] = {}

    def add_request(self, request: Any) -> None:
        name = request.request_id
        if name.startswith(MARK):
            for word in name.removeprefix(MARK).split():
                if "=" in word:  # the others are the request's number and vLLM's
                    self._obey(word)
        else:
            self._came[name] = time.monotonic()
        super().add_request(request)  # type: ignore[misc]

    def _obey(self, order: str) -> None:
        name, _, value = order.partition("=")
        if name == "file":
            if self._file is not None:
                self._file.close()
            self._file = Path(value).open("w") if value else None  # noqa: SIM115 - it lasts until the next order
        else:
            setattr(step_shares, name, type(getattr(step_shares, name))(float(value)))

    def schedule(self, *arguments: Any, **options: Any) -> Any:
        began = time.monotonic()
        output = super().schedule(*arguments, **options)  # type: ignore[misc]
        prompts, decoding = 0, 0
        for name, tokens in output.num_scheduled_tokens.items():
            if tokens > 1:
                prompts += tokens
                if name in self._came:
                    self._first.setdefault(name, began)
            else:
                decoding += 1
        self._planned[id(output)] = began, time.monotonic() - began, prompts, decoding
        return output

    def update_from_output(self, output: Any, model_output: Any) -> Any:
        result = time.monotonic()
        planned, seconds, prompts, decoding = self._planned.pop(id(output), (0.0, 0.0, 0, 0))
        names = [name for name in output.num_scheduled_tokens if name in self._came]
        outputs = super().update_from_output(output, model_output)  # type: ignore[misc]
        if self._file is not None:
            print(f"step,{planned:.5f},{seconds:.5f},{result:.5f},{prompts},{decoding}", file=self._file)
            requests: Mapping[str, Any] = self.requests  # type: ignore[attr-defined]
            for name in names:
                if name not in requests or requests[name].num_output_tokens:
                    began = self._first.pop(name, 0.0)
                    print(f"request,{name},{self._came.pop(name):.5f},{began:.5f},{result:.5f}", file=self._file)
        return outputs


class Stamped(_Stamping, Scheduler):
    pass


class StampedAsync(_Stamping, AsyncScheduler):
    pass


class Step(NamedTuple):
    planned: float
    planning: float  # seconds
    result: float
    prompts: int  # tokens
    decoding: int


class Stamps(NamedTuple):
    """The file of one case. Requests are `name: (came, step planned, result)`."""

    steps: list[Step]
    requests: dict[str, tuple[float, float, float]]


def read(path: Path) -> Stamps:
    found = Stamps([], {})
    for line in path.read_text().splitlines():
        kind, *cells = line.split(",")
        if kind == "step":
            planned, seconds, result, prompts, decoding = cells
            found.steps.append(Step(float(planned), float(seconds), float(result), int(prompts), int(decoding)))
        else:
            name, came, planned, result = cells
            found.requests[name.partition("-")[0]] = float(came), float(planned), float(result)
    return found


def medians(stamps: Stamps, asked: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Medians and 90th percentiles in milliseconds of each part of the user's first tokens, and of steps of others'
    prompts; of these also tokens and requests.

    Args:
        asked: When the user's requests were sent and when their first tokens came, by name.
    """
    parts: dict[str, list[float]] = defaultdict(list)
    results = [step.result for step in stamps.steps]
    for name in asked.keys() & stamps.requests.keys():
        (sent, first), (came, planned, result) = asked[name], stamps.requests[name]
        before = max((each for each in results if each < result), default=planned)
        parts["to_the_engine"].append(1e3 * (came - sent))
        parts["until_planned"].append(1e3 * (planned - came))
        parts["steps_under_way"].append(1e3 * max(0.0, before - planned))
        parts["own_step"].append(1e3 * (result - max(before, planned)))
        parts["to_the_user"].append(1e3 * (first - result))
        parts["in_all"].append(1e3 * (first - sent))
    own = {stamps.requests[name][1] for name in asked.keys() & stamps.requests.keys()}
    for earlier, step in pairwise(stamps.steps):
        if step.prompts and step.planned not in own:
            parts["floods_step"].append(1e3 * (step.result - earlier.result))
            parts["floods_step_planning"].append(1e3 * step.planning)
            parts["floods_step_prompt_tokens"].append(step.prompts)
            parts["floods_step_decoding"].append(step.decoding)
    return {
        f"{part}_{name}": round(value, 2)
        for part, values in parts.items()
        if len(values) > 1
        for name, value in (("p50", statistics.median(values)), ("p90", statistics.quantiles(values, n=10)[-1]))
    }
