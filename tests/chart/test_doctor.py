"""The script of `helm test`, against a gateway and engines that answer as real ones do, or do not."""

import datetime
import http.server
import io
import json
import socket
import ssl
import threading
import time
import urllib.error
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from chart.rendering import CHART, render
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from spillway_ctl.command import main
from spillway_ctl.live import asking, release
from spillway_ctl.live.asking import Asker


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch) -> None:
    monkeypatch.setattr(release, "Asker", partial(Asker, poll_seconds=0.0))


class Tier:
    """The shared tier of two engines: prompts that were stored."""

    def __init__(self) -> None:
        self.prompts: set[str] = set()


USAGE = {"prompt_tokens": 30, "completion_tokens": 2, "total_tokens": 32}
CHAT = {
    "object": "chat.completion",
    "choices": [{"message": {"role": "assistant", "content": "Here."}, "finish_reason": "stop"}],
    "usage": USAGE,
}
Answer = tuple[int, dict | str]


def streamed(*pieces: str, usage: dict | None = USAGE) -> str:
    head = {"id": "1", "object": "chat.completion.chunk"}
    choices = [{"delta": {"role": "assistant"}}, *({"delta": {"content": piece}} for piece in pieces)]
    choices.append({"delta": {}, "finish_reason": "stop"})
    chunks = [*({**head, "choices": [choice]} for choice in choices), {**head, "choices": [], "usage": usage}]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


class GatewayServer:
    """Asks for client_key where there is one; its tenant may read the settings if it is an operator."""

    def __init__(
        self,
        settings: dict,
        client_key: str | None = None,
        operator: bool = True,
        chat: dict | str = CHAT,
        stream: str | None = None,
    ) -> None:
        self.settings, self.client_key, self.operator = settings, client_key, operator
        self.chat, self.stream = chat, streamed("He", "re.") if stream is None else stream
        self.authorizations: list[str | None] = []

    page = 'spillway_gateway_tokenizer_usable{model="m"} 1.0\n'

    def get(self, path: str, authorization: str | None) -> Answer:
        assert path in {"/spillway/config", "/metrics"}
        if self.refuses(authorization):
            return 401, {"error": {"code": "invalid_api_key"}}
        if path == "/metrics":
            return 200, self.page
        return (200, {"settings": self.settings}) if self.operator else (403, {"error": {"code": "operator_only"}})

    def post(self, path: str, body: dict, authorization: str | None) -> Answer:
        assert path == "/v1/chat/completions"
        self.authorizations.append(authorization)
        if self.refuses(authorization):
            return 401, {"error": {"code": "invalid_api_key"}}
        return 200, self.stream if body.get("stream") else self.chat

    def refuses(self, authorization: str | None) -> bool:
        return self.client_key is not None and authorization != f"Bearer {self.client_key}"


class EngineServer:
    """Spills each long prompt once, and finds those that another engine spilled."""

    def __init__(self, settings: dict, tier: Tier | None, spills: bool = True) -> None:
        self.settings, self.tier, self.spills = settings, tier, spills
        self.more = ""  # of the page of metrics
        self.stored = self.written = self.hits = 0
        self.seen: set[str] = set()
        self.authorizations: list[str | None] = []

    def get(self, path: str, authorization: str | None) -> Answer:
        config = {"settings": self.settings, "servedName": "m"}
        version = {"version": "0.23.0"}
        return 200, {
            "/ready": {},
            "/version": version,
            "/metrics": self.metrics() + self.more,
            "/spillway/config": config,
        }[path]

    def post(self, path: str, body: dict, authorization: str | None) -> Answer:
        self.authorizations.append(authorization)
        self.complete(body["prompt"])
        return 200, {}

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

    def start(model: GatewayServer | EngineServer, certificate: Path | None = None) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply(*model.get(self.path, self.headers["authorization"]))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                self.reply(*model.post(self.path, body, self.headers["authorization"]))

            def reply(self, status: int, body: dict | str) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write((body if isinstance(body, str) else json.dumps(body)).encode())

            def log_message(self, *_: object) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        return f"http{'s' if certificate else ''}://127.0.0.1:{server.server_address[1]}"

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def expected() -> dict:
    """The chart's input to the script, for the CPU values without a port for operators, so that keys are asked for."""
    values = {"engine": {"apiKeySecret": {"name": "keys"}}, "gateway": {"opsPort": None}}
    rendered = render(CHART / "values-cpu.yaml", values=values)
    return json.loads(rendered.named("ConfigMap", "chat-spillway-test")["data"]["release.json"])


@pytest.fixture
def run(expected, serve, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SPILLWAY_API_KEY_0", "sesame")

    def check(
        *engines: EngineServer, gateway: GatewayServer | None = None, seconds: float = 20, arguments=(), **overrides
    ):
        urls = [serve(engine) for engine in engines]
        given = json.loads(json.dumps(expected))
        url = serve(gateway or GatewayServer(given["gateway"]["settings"]))
        given["gateway"].update(url=url, operations=url)
        given["auth"] = overrides.pop("auth", given["auth"])
        given["models"][0].update({"engines": urls, **overrides})
        file = tmp_path / "release.json"
        file.write_text(json.dumps({**given, "timeoutSeconds": seconds}))
        return main(["doctor", "--release", str(file), *arguments]), capsys.readouterr().out

    return check


def test_all_is_well(run, expected):
    tier, settings = Tier(), expected["models"][0]["settings"]
    engines = EngineServer(settings, tier), EngineServer({**settings, "name": "engine-1"}, tier)
    gateway = GatewayServer(expected["gateway"]["settings"])

    status, output = run(*engines, gateway=gateway)

    assert status == 0, output
    assert (
        "2 of 2 engines ready" in output and "1 chunks that" in output and "runs with the settings of these" in output
    )
    assert {*engines[0].authorizations, *gateway.authorizations} == {"Bearer sesame"}


def test_what_processes_say_of_themselves_is_checked_too(run, expected):
    """Checks cover what the processes report: here the CPU tier and the shared tier."""
    tier, settings = Tier(), expected["models"][0]["settings"]
    engines = EngineServer(settings, tier), EngineServer({**settings, "name": "engine-1"}, tier)
    label = 'process="EngineCore",setting="generated_tokens"'
    for engine in engines:
        engine.more = f'spillway_process_setting{{{label},value="auto"}} 1\nspillway_tier_ready{{tier="redis"}} 1\n'
    status, output = run(*engines)
    assert status == 0, output
    assert "ok    generatedTokens, engine-1: auto (EngineCore)" in output
    assert "ok    tokenizer of the gateway, m: " in output
    assert "not checked devices, engine-1: the engine's processes have not said it" in output

    engines[1].more = f'spillway_process_setting{{{label},value="off"}} 1\nspillway_tier_ready{{tier="redis"}} 0\n'
    status, output = run(*engines)
    failed = [line for line in output.splitlines() if line.startswith("FAILED")]
    assert status == 1 and len(failed) == 2
    assert "generatedTokens, engine-1: off" in failed[0]
    assert "cannot be used -> the engine's log has the reason" in failed[1]


def test_its_pod_runs_the_command_on_what_the_chart_wrote(capsys, tmp_path, monkeypatch):
    """The command runs in the image of the tools, without rights and without anything to write to. Here nothing
    answers."""
    monkeypatch.setattr(release, "REACHABLE_SECONDS", 0.0)
    front = {"nodeSelector": {"role": "front"}, "tolerations": [{"operator": "Exists"}]}
    front |= {"dnsConfig": {"searches": ["a.b"]}, "hostAliases": [{"ip": "10.0.0.1", "hostnames": ["c"]}]}
    rendered = render(CHART / "values-cpu.yaml", values={"gateway": front, "tests": {"timeoutSeconds": 30}})
    pod = rendered.one("Pod", "test")["spec"]
    (container,) = pod["containers"]
    assert {key: pod[key] for key in front} == front and pod["automountServiceAccountToken"] is False
    assert container["image"].startswith("spillway-tools:")
    assert container["command"][0] == "spillway" and container["securityContext"]["readOnlyRootFilesystem"]
    folder = Path(container["volumeMounts"][0]["mountPath"])
    unreachable = "http://127.0.0.1:1"
    for name, text in rendered.named("ConfigMap", "chat-spillway-test")["data"].items():
        given = json.loads(text)
        given["gateway"].update(url=unreachable, operations=unreachable)
        given["models"][0]["engines"] = [unreachable]
        (tmp_path / name).write_text(json.dumps(given))

    status = main([word.replace(str(folder), str(tmp_path)) for word in container["command"][1:]])

    assert status == 1 and "none of http://127.0.0.1:1 is ready" in capsys.readouterr().out


def test_it_speaks_json_too(run, expected):
    engine = EngineServer(expected["models"][0]["settings"], None)

    status, output = run(engine, shared=False, arguments=("--json",))

    document = json.loads(output)
    assert status == 0 and document["command"] == "doctor" and not document["failed"]
    assert {"chat", "values", "tier"} <= {finding["check"] for finding in document["findings"]}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--release", "/no/such.json"), "--release /no/such.json: cannot be read"),
        (("--release", "-"), "--release -: not a release as the chart writes it ('gateway')"),
        (("--release", "-", "--gateway", "http://g"), "--release names gateway and engines itself"),
    ],
)
def test_a_wrong_command_ends_with_two(arguments, words, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("{}"))

    assert main(["doctor", *arguments]) == 2 and words in capsys.readouterr().err


def test_a_gateway_with_other_settings_is_named(run, expected):
    """Defaults that the values do not mention are its own affair, also within a list."""
    running = json.loads(json.dumps(expected["gateway"]["settings"]))
    running["breaker"]["failures"] = 9
    running["models"][0]["discovery"]["kubernetes"]["service"] = "old-engine-pods"
    running["models"][0]["tokenizer"] = running["listen"]["tls"] = None

    status, output = run(
        EngineServer(expected["models"][0]["settings"], None), gateway=GatewayServer(running), shared=False
    )

    assert status == 1
    (line,) = (line for line in output.splitlines() if line.startswith("FAILED"))
    assert "breaker.failures is 9, not 5; models[0].discovery.kubernetes.service is 'old-engine-pods', not" in line


AUTH = {"keysSecret": {"name": "k"}, "saltSecret": {"name": "s"}, "engineKeySecret": {"name": "keys"}}


def auth_of(test_key: str) -> tuple[dict, dict]:
    """Return the script's input about keys, and its variables' Secrets, with this one as tests.apiKeySecret."""
    values = {"engine": {"apiKeySecret": {"name": "keys"}}, "gateway": {"auth": AUTH}}
    rendered = render(CHART / "values-cpu.yaml", values={**values, "tests": {"apiKeySecret": {"name": test_key}}})
    given_auth = json.loads(rendered.named("ConfigMap", "chat-spillway-test")["data"]["release.json"])["auth"]
    variables = rendered.one("Pod", "test")["spec"]["containers"][0]["env"]
    return given_auth, {entry["name"]: entry["valueFrom"]["secretKeyRef"]["name"] for entry in variables}


def test_a_gateway_with_keys_is_asked_with_a_client_s(run, expected, monkeypatch):
    auth, variables = auth_of("client")
    assert variables == {"SPILLWAY_CLIENT_KEY": "client", "SPILLWAY_API_KEY_0": "keys"}
    monkeypatch.setenv("SPILLWAY_CLIENT_KEY", "open")
    engine = EngineServer(expected["models"][0]["settings"], None)
    gateway = GatewayServer(expected["gateway"]["settings"], "open")

    status, output = run(engine, gateway=gateway, auth=auth, shared=False)

    assert status == 0 and "'Here.'" in output
    assert gateway.authorizations == [None, "Bearer open", "Bearer open"]
    assert set(engine.authorizations) == {"Bearer sesame"}  # engines hear their own key alone


def test_a_key_that_may_not_read_the_settings(run, expected, monkeypatch):
    monkeypatch.setenv("SPILLWAY_CLIENT_KEY", "open")
    gateway = GatewayServer(expected["gateway"]["settings"], "open", operator=False)

    engine = EngineServer(expected["models"][0]["settings"], None)
    status, output = run(engine, gateway=gateway, auth=auth_of("client")[0], shared=False)

    assert status == 1 and "give the tenant of tests.apiKeySecret 'operator: true'" in output


def test_without_a_key_the_gateway_has_to_refuse(run, expected):
    auth, variables = auth_of("")
    assert auth == {"required": True} and variables == {"SPILLWAY_API_KEY_0": "keys"}
    gateway = GatewayServer(expected["gateway"]["settings"], "open")

    status, output = run(
        EngineServer(expected["models"][0]["settings"], None), gateway=gateway, auth=auth, shared=False
    )

    assert status == 0, output
    assert "refuses without a key; name one in tests.apiKeySecret" in output and "not compared" in output


def test_a_gateway_that_lets_anybody_in_is_found(run, expected):
    auth, _ = auth_of("")

    status, output = run(EngineServer(expected["models"][0]["settings"], None), auth=auth, shared=False)

    assert status == 1 and "FAILED chat, " in output and "answers without a key" in output


def test_only_the_gateway_s_own_certificate_is_trusted(serve, expected, tmp_path):
    """The certificate is trusted whatever names it was made for, and without the authority that signed it."""
    mine, other = (self_signed(tmp_path / name) for name in ("mine.pem", "other.pem"))
    url = serve(GatewayServer(expected["gateway"]["settings"]), mine)

    assert Asker(mine).ask(f"{url}/spillway/config", "")[0]["settings"]["index"]
    for asker in (Asker(other), Asker()):
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            asker.ask(f"{url}/spillway/config", "")


def test_the_certificate_is_where_the_pod_has_it():
    rendered = render(values={"gateway": {"tls": {"secret": {"name": "own"}}}})
    gateway = json.loads(rendered.named("ConfigMap", "chat-spillway-test")["data"]["release.json"])["gateway"]
    mounts = rendered.one("Pod", "test")["spec"]["containers"][0]["volumeMounts"]

    assert str(Path(gateway["certificate"]).parent) in {mount["mountPath"] for mount in mounts}
    assert gateway["url"].startswith("https://")


def self_signed(path: Path) -> Path:
    """Key and certificate of llm.example.com."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "llm.example.com")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(
        now + datetime.timedelta(days=1)
    )
    certificate = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(private + certificate)
    return path


def test_an_engine_with_other_settings_is_named(run, expected):
    tier, settings = Tier(), expected["models"][0]["settings"]
    other = json.loads(json.dumps(settings))
    other["offload"]["numCpuBlocks"] = 7

    status, output = run(EngineServer(settings, tier), EngineServer(other, tier))

    assert status == 1
    assert "offload.numCpuBlocks is 7, not 128" in output


def test_a_tier_that_shares_nothing_is_found(run, expected, monkeypatch):
    # A slow machine too has to reach the wait for the second engine before the time is over.
    clock = SimpleNamespace(monotonic=partial(next, count(0.0, 0.1)), sleep=time.sleep, time=time.time)
    monkeypatch.setattr(release, "time", clock)
    monkeypatch.setattr(asking, "time", clock)
    settings = expected["models"][0]["settings"]

    status, output = run(EngineServer(settings, Tier()), EngineServer(settings, Tier()), seconds=10)

    assert status == 1 and "spillway_tier_lookups_total" in output and "did not grow" in output


def test_nothing_spilled_is_found(run, expected):
    status, output = run(EngineServer(expected["models"][0]["settings"], None, spills=False), seconds=1)

    assert status == 1 and "spillway_device_copy_bytes_total" in output


def test_adapters_on_a_cpu_spill_nothing_of_the_model_s_own_requests(run):
    values = {
        "engine": {"apiKeySecret": {"name": "keys"}, "lora": {"adapters": [{"name": "sql", "path": "owner/sql"}]}}
    }
    rendered = render(CHART / "values-cpu.yaml", values=values)
    document = json.loads(rendered.named("ConfigMap", "chat-spillway-test")["data"]["release.json"])
    settings = document["models"][0]["settings"]

    status, output = run(EngineServer(settings, None, spills=False), settings=settings, seconds=5)

    assert (status, "no tier to check" in output) == (0, True), output


def test_no_engine_ready(run):
    status, output = run(EngineServer({}, None), engines=["http://127.0.0.1:9"])

    assert status == 1 and "none of http://127.0.0.1:9 is ready" in output


def test_prompts_fit_the_model():
    for chunk_tokens, longest in ((128, 2048), (2048, 4096), (16, 256)):
        prompt = release.long_prompt({"chunkTokens": chunk_tokens, "maxLength": longest})
        assert len(prompt.split()) <= longest // 2 + 1


def test_a_chat_that_is_not_well_formed_is_found(run, expected):
    usage = {**USAGE, "prompt_tokens": 31, "total_tokens": 33}
    for broken, output in (
        ({"chat": {"choices": []}}, "the answer is no chat.completion"),
        ({"chat": {**CHAT, "usage": usage}}, "31 tokens, and 30 when"),
        ({"stream": streamed(" ")}, "answer is empty"),
    ):
        gateway = GatewayServer(expected["gateway"]["settings"], **broken)

        status, printed = run(EngineServer(expected["models"][0]["settings"], None), gateway=gateway, shared=False)

        assert status == 1 and output in printed, printed


def test_other_words_in_the_stream_are_no_fault(run, expected):
    """Another engine may have answered, and rounding decides a near tie otherwise there."""
    gateway = GatewayServer(expected["gateway"]["settings"], stream=streamed("Elsewhere."))

    status, output = run(EngineServer(expected["models"][0]["settings"], None), gateway=gateway, shared=False)

    assert status == 0 and "'Here.', streamed 'Elsewhere.'" in output


def test_an_address_that_a_policy_refuses_at_first_is_waited_for(monkeypatch):
    attempts = []

    def connect(address: tuple[str, int], timeout_seconds: float) -> socket.socket:
        attempts.append(address)
        if len(attempts) < 3:
            raise ConnectionRefusedError
        return socket.socket()

    monkeypatch.setattr(asking.socket, "create_connection", connect)
    Asker(poll_seconds=0.0).wait_until_reachable("https://gateway.llm.svc", time.monotonic() + 600)
    assert attempts == [("gateway.llm.svc", 443)] * 3


def test_an_address_that_is_never_reached_is_left_to_the_checks(monkeypatch):
    def connect(address: tuple[str, int], timeout_seconds: float) -> socket.socket:
        raise ConnectionRefusedError

    monkeypatch.setattr(asking.socket, "create_connection", connect)
    Asker(poll_seconds=0.0).wait_until_reachable("http://gateway.llm.svc:9090", time.monotonic())
