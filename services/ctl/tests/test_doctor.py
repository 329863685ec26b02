"""The command against servers that answer as a gateway and an engine do, or less, or not at all."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from ctl_media import FileMedium
from test_findings import CONFIG, GATEWAY_PAGE, PAGE, RANKS, held, of_ranks

from spillway_ctl import readings
from spillway_ctl.command import main
from spillway_ctl.evidence import clock_skew
from spillway_ctl.readings import NoAnswer, ask

Answers = dict[str, Any]  # by path: an object, text, or a status


class Server:
    """Counts requests by path. key: without it every answer is 401."""

    def __init__(self, answers: Answers, key: str = "") -> None:
        self.answers, self.asked, self.key = answers, [], key
        self.ranks: list[str | None] = []  # that requests with a body named
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer()

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                outer.ranks.append(self.headers["x-data-parallel-rank"])
                self._answer()

            def _answer(self) -> None:
                outer.asked.append(self.path)
                found = outer.answers.get(self.path, 404)
                if outer.key and self.headers["authorization"] != f"Bearer {outer.key}":
                    found = 401
                if callable(found):
                    found = found()
                status = found if isinstance(found, int) else 200
                body = found if isinstance(found, str) else json.dumps(found)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(answers: Answers, key: str = "") -> Server:
        servers.append(Server(answers, key))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def engine_answers() -> Answers:
    return {
        "/health": {},
        "/spillway/config": CONFIG,
        "/version": {"version": "0.23.0"},
        "/metrics": PAGE + held(),
        "/tokenize": {"tokens": [1, 2]},
        "/v1/completions": {"choices": []},
    }


def gateway_answers(engine_url: str) -> Answers:
    """Each reading shows one batch of events more."""
    batches = iter(range(1000))
    engines = [{"name": "engine-0", "url": engine_url}]

    def page() -> str:
        return GATEWAY_PAGE + f'spillway_gateway_event_batches_total{{engine="engine-0"}} {next(batches)}\n'

    settings = {"models": [{"name": "m", "engines": engines, "tokenizer": "/m"}]}
    return {"/spillway/config": {"settings": settings, "version": "0.1.0", "discovered": {}}, "/metrics": page}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main(["doctor", "--window", "0s", *arguments])
    return status, capsys.readouterr().out


def verdicts(out: str) -> dict[tuple[str, str], str]:
    return {(each["check"], each["where"]): each["verdict"] for each in json.loads(out)["findings"]}


def test_a_healthy_release_is_a_table_of_ok(serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = serve(engine_answers())
    gateway = serve(gateway_answers(engine.url))
    status, out = run(capsys, "--gateway", gateway.url, "--nvme", str(tmp_path))
    assert status == 0, out
    lines = out.splitlines()
    assert lines[0].split() == ["CHECK", "WHERE", "VERDICT", "FOUND", "->", "CHANGE"]
    assert lines[-1].endswith("ok, 0 warning, 0 failed, 0 not checked") or "clock" in out
    assert any(line.startswith("event stream") and "engine-0" in line and "lag 0." in line for line in lines)
    assert any(line.startswith("tier rates") and "MiB" in line for line in lines)
    assert engine.asked.count("/v1/completions") == 2, "one to take in what happened before, one that is judged"


def test_every_data_parallel_rank_of_a_discovered_engine_is_asked(serve, capsys: pytest.CaptureFixture[str]) -> None:
    answers = engine_answers()
    answers["/spillway/config"] = RANKS
    answers["/metrics"] = PAGE + of_ranks(held(), held())
    engine = serve(answers)
    batches = iter(range(1000))

    def page() -> str:
        return GATEWAY_PAGE + "".join(
            f'spillway_gateway_events_connected{{engine="engine-0/dp{rank}"}} 1\n'
            f'spillway_gateway_event_batches_total{{engine="engine-0/dp{rank}"}} {next(batches)}\n'
            for rank in range(2)
        )

    engines = [{"name": f"engine-0/dp{rank}", "url": engine.url} for rank in range(2)]
    config = {"settings": {"models": [{"name": "m"}]}, "discovered": {"m": {"engines": engines}}}
    status, out = run(capsys, "--gateway", serve({"/spillway/config": config, "/metrics": page}).url, "--json")
    assert status == 0, out
    found = {each["check"]: each for each in json.loads(out)["findings"] if each["where"] == "engine-0"}
    assert found["devices"]["verdict"] == "ok"
    assert "lag 0." in found["event stream"]["found"]
    assert [rank for rank in engine.ranks if rank is not None] == ["0", "1"] * 2


def test_a_failure_is_exit_status_1_with_its_remedy(serve, capsys: pytest.CaptureFixture[str]) -> None:
    answers = engine_answers()
    answers["/metrics"] = PAGE.replace('ready{tier="redis"} 1.0', 'ready{tier="redis"} 0.0') + held()
    status, out = run(capsys, "--engine", serve(answers).url, "--redis", "redis://127.0.0.1:1/0", "--json")
    assert status == 1
    document = json.loads(out)
    failed = {each["check"]: each for each in document["findings"] if each["verdict"] == "failed"}
    assert document["failed"] and set(failed) == {"shared tier", "tier rates"}
    assert "redis://cache:6379/0" in failed["shared tier"]["found"] and failed["shared tier"]["change"]
    assert "127.0.0.1:1" in failed["tier rates"]["found"] and failed["tier rates"]["change"]


def test_no_request_is_made_where_none_is_wanted(serve, capsys: pytest.CaptureFixture[str]) -> None:
    engine = serve(engine_answers())
    status, out = run(capsys, "--engine", engine.url, "--no-requests", "--json")
    assert status == 0 and "/v1/completions" not in engine.asked
    assert verdicts(out)["tier rates", "here"] == "not checked"


@pytest.mark.parametrize(
    "known", [{"/health": {}}, {"/health": {}, "/metrics": "x 1\n", "/spillway/config": "no JSON"}]
)
def test_an_engine_of_another_release_is_not_checked(known, serve, capsys: pytest.CaptureFixture[str]) -> None:
    engine = serve(known)
    gateway = serve({"/spillway/config": {"settings": {"models": [{"name": "m", "engines": [{"url": engine.url}]}]}}})
    status, out = run(capsys, "--gateway", gateway.url, "--json")
    assert status == 0
    assert "failed" not in verdicts(out).values() and "not checked" in verdicts(out).values()


def test_who_is_away_fails_and_the_others_are_checked(serve, capsys: pytest.CaptureFixture[str]) -> None:
    engine = serve(engine_answers())
    status, out = run(capsys, "--gateway", "http://127.0.0.1:1", "--engine", engine.url, "--json")
    found = verdicts(out)
    assert status == 1 and found["answers", "gateway"] == "failed" and found["CPU blocks", "engine-0"] == "ok"


def test_keys_come_from_variables(serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    gateway = serve({"/spillway/config": {"settings": {"models": []}, "version": "1"}, "/metrics": "x 1\n"}, key="k")
    monkeypatch.setenv("OPERATOR", "k")
    assert run(capsys, "--gateway", gateway.url, "--gateway-key-env", "OPERATOR")[0] == 0
    status, out = run(capsys, "--gateway", gateway.url)
    assert status == 1 and "--gateway-key-env" in out


def test_the_local_stack_is_found_by_its_folder(
    serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = serve(engine_answers())
    gateway = serve(gateway_answers(engine.url))
    folder = tmp_path / ".run" / "config"
    folder.mkdir(parents=True)
    FileMedium(tmp_path / "tier").root.mkdir(exist_ok=True)
    port = gateway.url.rpartition(":")[2]
    (folder / "gateway.yaml").write_text(f"listen: {{host: 127.0.0.1, port: {port}}}\n")
    (folder / "engine-0.yaml").write_text(
        f"{{model: {{path: /m}}, offload: {{numCpuBlocks: 8, sharedTier: {{type: nvme, "
        f"nvme: {{path: {tmp_path / 'tier'}}}}}}}}}"
    )
    monkeypatch.chdir(tmp_path)
    status, out = run(capsys, "--json")
    assert status == 0 and verdicts(out)["tier rates", str(tmp_path / "tier")] == "ok"


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (("--stack", "/nowhere"), "--gateway"),
        (("--stack", "x", "--gateway", "http://y"), "leave out"),
        (("--gateway", "localhost:8001"), "http://127.0.0.1:8001"),
        (("--engine", "http://y", "--engine-key-env", "SURELY_UNSET"), "SURELY_UNSET"),
        (("--engine", "http://y", "--config", "/nowhere.yaml"), "readable YAML"),
    ],
)
def test_mistakes_are_one_sentence(arguments: tuple[str, ...], remedy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments]) == 2
    message = capsys.readouterr().err
    assert message.startswith("spillway: ") and message.count("\n") == 1 and remedy in message


def test_why_there_is_no_answer_is_said(serve) -> None:
    with pytest.raises(NoAnswer, match="404"):
        ask(f"{serve({}).url}/x", "", 5.0)
    with pytest.raises(NoAnswer, match="Connection refused"):
        ask("http://127.0.0.1:1/x", "", 5.0)
    with pytest.raises(NoAnswer):
        ask("http://127.0.0.1:port/x", "", 5.0)


def test_skew_is_what_a_whole_second_and_the_way_cannot_explain() -> None:
    def said(at: float) -> str:
        return formatdate(at, usegmt=True)

    assert clock_skew(said(1000), 1000.2, 1000.4) == 0
    assert clock_skew(said(1000), 1000.9, 1001.1) == 0
    assert clock_skew(said(1010), 1000.2, 1000.4) == pytest.approx(9.6)
    assert clock_skew(said(990), 1000.2, 1000.4) == pytest.approx(-9.2)
    assert clock_skew(None, 1.0, 2.0) is None and clock_skew("yesterday", 1.0, 2.0) is None


def test_events_that_do_not_arrive_are_late(serve, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(readings, "EVENT_SECONDS_MAX", 0.2)
    engine = serve(engine_answers())
    answers = gateway_answers(engine.url)
    answers["/metrics"] = GATEWAY_PAGE
    gateway = serve(answers)
    _, out = run(capsys, "--gateway", gateway.url, "--json")
    [finding] = [each for each in json.loads(out)["findings"] if each["check"] == "event stream"]
    assert "no event" in finding["found"] and finding["verdict"] == "warning"
