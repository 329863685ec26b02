"""The answers of a gateway and its engines about themselves, as they were read. Findings are made of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import Any

NO_REPORT = "the engine's processes have not said it: an earlier release, offload is off, or no request since the start"

_SERIES = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)(?: -?\d+)?")
_RANK = re.compile(r"/dp\d+$")  # what the gateway adds to the name of an engine with data parallel ranks
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True)
class Finding:
    """found: the value, or why it is unknown. change: the remedy; empty if nothing has to be done."""

    check: str
    where: str
    verdict: Verdict
    found: str
    change: str = ""


class Exposition:
    """One reading of a /metrics page, in the text format of Prometheus. Lines of another form are passed by."""

    def __init__(self, text: str) -> None:
        self._series: dict[str, list[tuple[dict[str, str], float]]] = {}
        for line in text.splitlines():
            match = _SERIES.fullmatch(line)
            if match is None:
                continue
            name, labels, amount = match.groups()
            try:
                value = float(amount)
            except ValueError:
                continue
            found = {label: re.sub(r"\\(.)", r"\1", text) for label, text in _LABEL.findall(labels or "")}
            self._series.setdefault(name, []).append((found, value))

    def series(self, name: str, **labels: str) -> list[tuple[dict[str, str], float]]:
        """Returns (all labels, value) of the samples that carry `labels`."""
        return [
            (found, value)
            for found, value in self._series.get(name, [])
            if all(found.get(label) == wanted for label, wanted in labels.items())
        ]

    def total(self, name: str, **labels: str) -> float | None:
        """Return the sum of the matching series; None if there is none."""
        found = self.series(name, **labels)
        return sum(value for _, value in found) if found else None


@dataclass(kw_only=True)
class Reading:
    """before, after: a process's /metrics at both ends of the window. problem: why it could not be asked."""

    problem: str | None = None
    config: Mapping[str, Any] | None = None  # of /spillway/config
    before: Exposition | None = None
    after: Exposition | None = None
    skew_seconds: float | None = None  # its clock ahead of this one

    def growth(self, name: str, **labels: str) -> tuple[float, float]:
        """(within the window, since the start) of a counter."""
        before, now = ((page or Exposition("")).total(name, **labels) or 0.0 for page in (self.before, self.after))
        return max(0.0, now - before), now


@dataclass
class GatewayReading(Reading):
    """A gateway process, asked at `url`."""

    url: str

    def engines(self) -> Iterator[tuple[str, str, str]]:
        """(model, name, url) of those that it knows; by its own name once for each data parallel rank."""
        for model, engine in self._engines():
            yield model, str(engine.get("name")), str(engine.get("url"))

    def roles(self, model: str) -> dict[str, str]:
        """The role of each engine of a model, by its name; one that the gateway does not say is not there."""
        return {
            str(engine.get("name")): str(engine["role"])
            for name, engine in self._engines()
            if name == model and "role" in engine
        }

    def _engines(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        config = self.config or {}
        for model in mappings(at(config, "settings", "models")):
            for engine in mappings(model.get("engines")):
                yield str(model.get("name")), engine
        discovered = config.get("discovered")
        for name, found in discovered.items() if isinstance(discovered, Mapping) else ():
            for engine in mappings(at(found, "engines")):
                yield str(name), {**engine, "name": _RANK.sub("", str(engine.get("name")))}


@dataclass
class EngineReading(Reading):
    """name: as the gateway knows it. tokens: the tokens of one text that all engines were asked about."""

    name: str
    url: str
    vllm_version: str | None = None  # of the API server's process
    tokens: Sequence[int] | None = None
    request_problem: str | None = None  # why no request was made of it, or why it failed
    event_lag_seconds: float | None = None  # from that request's answer until the gateway had its events; inf: never

    @property
    def model(self) -> str:
        return str((self.config or {}).get("servedName", "?"))

    def setting(self, *path: str) -> Any:
        """The value that the engine was started with; None if it does not say."""
        return at(self.config or {}, "settings", *path)

    @property
    def ranks(self) -> int:
        """The number of the engine's data parallel ranks."""
        size = self.setting("dataParallelSize")
        return size if isinstance(size, int) and size > 0 else 1

    @property
    def routed_names(self) -> list[str]:
        """The gateway's names of this engine: one, or one for each of its data parallel ranks."""
        return [self.name] if self.ranks == 1 else [f"{self.name}/dp{rank}" for rank in range(self.ranks)]

    def held(self, setting: str, process: str = "") -> dict[str, str]:
        """Return the value of a setting in each process that reports it. `process`: only processes of this name.

        Processes of data parallel ranks have the same names, so the rank is added: `worker-0 of rank 1`.
        """
        found = {}
        for labels, _ in self._now.series("spillway_process_setting", setting=setting):
            if {"process", "value"} <= labels.keys() and process in ("", labels["process"]):
                rank = f" of rank {labels['engine']}" if self.ranks > 1 and "engine" in labels else ""
                found[labels["process"] + rank] = labels["value"]
        return found

    def reasons(self, name: str, labels: Mapping[str, str], *, ever: bool = False) -> dict[str, list[str]]:
        """The values of a counter's label `reason` that grew within the window, each with the operations that it grew
        for. ever: that it has counted since the start."""
        found: dict[str, set[str]] = {}
        for each, _ in self._now.series(name, **labels):
            if self.growth(name, **each)[ever]:
                found.setdefault(each.get("reason", "?"), set()).update({each.get("operation", "")} - {""})
        return {reason: sorted(found[reason]) for reason in sorted(found)}

    @property
    def _now(self) -> Exposition:
        return self.after or Exposition("")


def by_process(values: Mapping[str, str | None], prefix: str = "") -> str:
    """`EngineCore 40, worker-0 40`; one value for all of them is said once."""
    if not values:
        return f"{prefix}?"
    if len(set(values.values())) == 1:
        return f"{prefix}{next(iter(values.values()))} ({', '.join(sorted(values))})"
    return ", ".join(f"{process} {prefix}{value}" for process, value in sorted(values.items()))


def at(tree: Any, *path: str) -> Any:
    """Return the value at a path of mappings; None if the tree lacks it."""
    for name in path:
        if not isinstance(tree, Mapping):
            return None
        tree = tree.get(name)
    return tree


def mappings(value: Any) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, Sequence) else []


def clock_skew(date: str | None, sent: float, received: float) -> float | None:
    """Seconds that another clock is ahead, by the date of its answer; None: it carries none.

    0 if both clocks may agree: a date is cut to a whole second, and was written at some time in between.
    """
    try:
        theirs = parsedate_to_datetime(date or "").timestamp()
    except (TypeError, ValueError):
        return None
    if theirs > received:
        return theirs - received
    return min(0.0, theirs + 1.0 - sent)
