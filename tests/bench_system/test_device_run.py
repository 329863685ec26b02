from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from system import device_run
from system.agents import AgentLoad
from system.device_run import (
    SYSTEMS,
    Ports,
    Processes,
    Running,
    after_kill,
    counters,
    engine_command,
    engine_document,
    gateway_document,
    parsed,
    run_in_rounds,
)
from system.load_generator import Agents, Reply, words
from system.report import Answered

from spillway_engine.settings_reader import load_engine_settings
from spillway_gateway.config.settings import load_config


@pytest.mark.parametrize("name", [name for name, system in SYSTEMS.items() if system.spillway])
def test_spillways_services_accept_the_files_that_are_written(name: str, tmp_path: Path) -> None:
    options = parsed(["--model", str(tmp_path), "--work", str(tmp_path), "--gateway-set", "continuation.enabled=true"])
    file = tmp_path / "engine.yaml"
    file.write_text(json.dumps(engine_document(options, SYSTEMS[name], tmp_path / name, 3)), encoding="utf-8")
    settings = load_engine_settings(file, [])
    assert settings.device_blocks == 800
    assert settings.offload.storing == SYSTEMS[name].storing
    if SYSTEMS[name].shared == "nvme":  # of its own: a system may not find what another has stored
        assert settings.offload.shared_tier.nvme.path == str(tmp_path / name / "nvme")
    gateway = tmp_path / "gateway.yaml"
    gateway.write_text(json.dumps(gateway_document(options)), encoding="utf-8")
    config = load_config(gateway)
    assert config.continuation.enabled
    assert len({engine.url for engine in config.models[0].engines}) == 4


def test_vllms_own_engines_differ_by_their_connector(tmp_path: Path) -> None:
    options = parsed(["--model", str(tmp_path)])
    lazy = engine_command(options, "vllm_lazy_pinned", tmp_path, 0)
    assert json.loads(lazy[-1].partition("=")[2])["kv_connector_extra_config"]["lazy_offload"] is True
    assert not any("kv-transfer" in part for part in engine_command(options, "vllm_round_robin", tmp_path, 0))


def test_systems_that_run_at_once_share_gpu_and_no_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int, int, tuple[str, ...]]] = []
    ended: list[str] = []

    @contextmanager
    def running(options: argparse.Namespace, name: str) -> Iterator[Running]:
        urls = [f"http://127.0.0.1:{Ports(options.first_port).engine(at)}" for at in range(options.engines)]
        assert any(part == "--gpu-memory-utilization=0.450" for part in engine_command(options, name, tmp_path, 0))
        yield Running(name, SYSTEMS[name], Processes(tmp_path), tmp_path / name, urls, urls)
        ended.append(name)

    def load(options: object, running: Running, *, folder: Path, sessions: int, seed: int) -> dict[str, float]:
        asked.append((running.key, sessions, seed, tuple(running.urls)))
        return {"requests": float(len(asked))}

    monkeypatch.setattr(device_run, "running_system", running)
    monkeypatch.setattr(device_run, "run_load", load)
    systems = ["vllm_offload_pinned", "vllm_lazy_pinned"]
    arguments = ["--model", str(tmp_path), "--work", str(tmp_path), "--systems", *systems, "--sessions", "8", "16"]
    found = dict(run_in_rounds(parsed([*arguments, "--rounds", "3"])))
    assert [name for name, sessions, *_ in asked if sessions == 8] == [*systems, *systems[::-1], *systems]
    seeds = {(sessions, seed) for _, sessions, seed, _ in asked}
    assert len(seeds) == 6 and len({seed for _, seed in seeds}) == 6, "a text comes again on the same engines"
    assert not {url for name, *_, urls in asked if name == systems[0] for url in urls} & {
        url for name, *_, urls in asked if name == systems[1] for url in urls
    }
    assert found["vllm_offload_pinned_8"] == {"requests": 6.0}, "the median of the rounds 1, 6 and 9"
    assert sorted(ended) == sorted(systems)


def test_the_end_of_a_system_is_the_end_of_all_that_its_processes_started(tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    processes.start("engine-0", ["sh", "-c", "trap '' TERM; sleep 60 & echo $!; wait"])
    log = tmp_path / "engine-0.log"
    until = time.monotonic() + 20.0
    while not (started := log.read_text().split()) and time.monotonic() < until:
        time.sleep(0.05)
    processes.end(0.1)
    state = Path(f"/proc/{started[0]}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_counters_are_summed_over_processes() -> None:
    page = 'spillway_x_total{engine="a",tier="cpu"} 2\nspillway_x_total{engine="b",tier="cpu"} 3\nother 1\n'
    assert counters(page) == {'spillway_x_total{tier="cpu"}': 5.0}


def test_figures_after_a_kill_are_of_what_was_sent_since(tmp_path: Path) -> None:
    options = parsed(["--model", str(tmp_path), "--seconds", "60", "--kill-after", "20"])
    answered = [
        Answered(19.0, 9.0, 30.0, 100, 0, 0, 4),
        Answered(21.0, 1.0, 31.0, 100, 50, 100, 4),
        Answered(59.0, 2.0, 63.0, 100, 100, 100, 4),  # ended behind the load
    ]
    values = after_kill(answered, options)
    assert values["requests_after_kill"] == 1 and values["input_tokens_per_second_after_kill"] == 2.5
    assert (values["cached_share_after_kill"], values["first_token_max_seconds_after_kill"]) == (0.5, 1.0)


def test_an_answer_is_whole_with_its_last_event() -> None:
    agents = Agents(AgentLoad(), ["http://127.0.0.1:1"], "one", "model", ["word"])
    agents._began = 0.0
    reply = Reply(error="the stream ended without [DONE]")
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    for event in ({"choices": [{"delta": {"content": "a"}}]}, {"choices": [], "usage": usage}):
        agents._event(json.dumps(event).encode(), reply)
        assert reply.error is not None
    agents._event(b"[DONE]", reply)
    assert (reply.error, reply.text, reply.prompt_tokens, reply.cached_tokens) == (None, "a", 9, 4)


def test_an_error_within_a_stream_is_told() -> None:
    agents = Agents(AgentLoad(), ["http://127.0.0.1:1"], "one", "model", ["word"])
    reply = Reply(error="the stream ended without [DONE]")
    agents._event(json.dumps({"error": {"message": "engine-3 ended"}}).encode(), reply)
    assert reply.error is not None and "engine-3 ended" in reply.error


async def test_every_place_asks_and_an_error_of_the_load_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[dict[str, str]]] = []

    async def answer(self: Agents, http: object, url: str, messages: list[dict[str, str]]) -> Reply:
        asked.append(messages)
        if len(asked) == 2:
            self._began -= 1_000.0  # the load's seconds are over
        return Reply("a", 0.0, 9, 4, 2, 4)

    monkeypatch.setattr(Agents, "_ask", answer)
    load = AgentLoad(1, 900.0, 0.0, 20, 5, 5, 2, think_seconds=1e-9, crowd=1, crowd_tokens=(3, 3), crowd_is_cold=True)
    agents = Agents(load, ["http://127.0.0.1:1"], "one", "model", ["word"])
    await agents.run(grace_seconds=20.0)
    assert [messages[0]["role"] for messages in asked] == ["system", "user"]
    assert [one.of_crowd for one in agents.answered] == [False, True]
    with pytest.raises(ExceptionGroup) as raised:
        await Agents(load, ["http://127.0.0.1:1"], "one", "model", []).run(grace_seconds=20.0)
    assert raised.group_contains(IndexError)


def test_words_are_plain_and_whole(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    vocabulary = {"Ġhouse": 0, "Ġ12": 1, "tree": 2, "ĠHouse": 3, "Ġab": 4}
    file.write_text(json.dumps({"model": {"vocab": vocabulary}}), encoding="utf-8")
    assert words(file) == ["house"]
