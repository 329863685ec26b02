"""`helm test`'s script against a gateway and engines that answer as real ones do, or do not."""

import http.server
import importlib.util
import json
import threading
from types import ModuleType

import pytest
from chart.rendering import CHART, render


@pytest.fixture(scope="module")
def live_check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("live_check", CHART / "files" / "live_check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.POLL_SECONDS = 0.0
    return module


class Tier:
    """What two engines share: prompts that were stored."""

    def __init__(self) -> None:
        self.prompts: set[str] = set()


class EngineServer:
    """Spills each long prompt once, and finds those that another engine spilled."""

    def __init__(self, settings: dict, tier: Tier | None, spills: bool = True) -> None:
        self.settings, self.tier, self.spills = settings, tier, spills
        self.stored = self.written = self.hits = 0
        self.seen: set[str] = set()
        self.authorizations: list[str | None] = []

    def complete(self, prompt: str) -> None:
        if len(prompt) < 200 or prompt in self.seen or not self.spills:
            return
        self.seen.add(prompt)
        self.stored += 4096
        if self.tier is not None:
            self.hits += prompt in self.tier.prompts
            self.tier.prompts.add(prompt)
            self.written += 4096

    def metrics(self) -> str:
        return (
            f'spillway_device_copy_bytes_total{{direction="store",model_name="m"}} {self.stored}\n'
            f'spillway_device_copy_bytes_total{{direction="load",model_name="m"}} 7\n'
            f'spillway_tier_written_bytes_total{{tier="redis"}} {self.written}\n'
            f'spillway_tier_lookups_total{{tier="redis",outcome="hit"}} {self.hits}.0\n'
        )


@pytest.fixture
def serve():
    servers = []

    def start(engine: EngineServer) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                replies = {
                    "/ready": b"{}",
                    "/metrics": engine.metrics().encode(),
                    "/spillway/config": json.dumps({"settings": engine.settings}).encode(),
                }
                self.reply(replies[self.path])

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                engine.authorizations.append(self.headers["authorization"])
                if self.path == "/v1/completions":
                    engine.complete(body["prompt"])
                self.reply(json.dumps({"choices": [{"message": {"content": "Paris."}}]}).encode())

            def reply(self, body: bytes) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def expected() -> dict:
    """What the chart gives the script, for the CPU values."""
    rendered = render(CHART / "values-cpu.yaml", values={"engine": {"apiKeySecret": {"name": "keys"}}})
    return json.loads(rendered.named("ConfigMap", "chat-spillway-test")["data"]["expected.json"])


@pytest.fixture
def run(live_check, expected, serve, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SPILLWAY_API_KEY_0", "sesame")

    def check(*engines: EngineServer, seconds: float = 20, **changes):
        urls = [serve(engine) for engine in engines]
        model = {**expected["models"][0], "engines": urls, **changes}
        file = tmp_path / "expected.json"
        file.write_text(json.dumps({"gateway": urls[0], "timeoutSeconds": seconds, "models": [model]}))
        return live_check.main([str(file)]), capsys.readouterr().out

    return check


def test_all_is_well(run, expected):
    tier, settings = Tier(), expected["models"][0]["settings"]
    engines = EngineServer(settings, tier), EngineServer({**settings, "name": "engine-1"}, tier)

    status, said = run(*engines)

    assert status == 0, said
    assert "2 of 2 engines ready" in said and "1 chunks that" in said
    assert set(engines[0].authorizations) == {"Bearer sesame"}


def test_an_engine_with_other_settings_is_named(run, expected):
    tier, settings = Tier(), expected["models"][0]["settings"]
    other = json.loads(json.dumps(settings))
    other["offload"]["numCpuBlocks"] = 7

    status, said = run(EngineServer(settings, tier), EngineServer(other, tier))

    assert status == 1
    assert "offload.numCpuBlocks is 7, not 128" in said


def test_a_tier_that_shares_nothing_is_found(run, expected):
    settings = expected["models"][0]["settings"]

    status, said = run(EngineServer(settings, Tier()), EngineServer(settings, Tier()), seconds=1)

    assert status == 1 and "spillway_tier_lookups_total" in said and "did not grow" in said


def test_nothing_spilled_is_found(run, expected):
    status, said = run(EngineServer(expected["models"][0]["settings"], None, spills=False), seconds=1)

    assert status == 1 and "spillway_device_copy_bytes_total" in said


def test_no_engine_ready(run):
    status, said = run(EngineServer({}, None), engines=["http://127.0.0.1:9"])

    assert status == 1 and "none of http://127.0.0.1:9 is ready" in said


def test_prompts_fit_the_model(live_check):
    for chunk_tokens, longest in ((128, 2048), (2048, 4096), (16, 256)):
        prompt = live_check.long_prompt({"chunkTokens": chunk_tokens, "maxLength": longest})
        assert len(prompt.split()) <= longest // 2 + 1
