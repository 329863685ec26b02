"""Real engines from the real image: a prefix that one pod computed is served to another from the shared tier, after its
password was changed too."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from chart.helm_binaries import helms
from cluster import real_engines
from cluster.client_pod import ClientPod
from cluster.helm import VERSION, Release
from cluster.kube import Kubernetes, name_of
from cluster.local_cluster import REAL_ENGINES_NODE
from cluster.real_engines import TIER_FOLDER
from cluster.report import Row
from cluster.valkey_password import passwords_held, wait_for_logins, write_password
from cluster.values import MODEL
from reference_answers.margins import REQUEST, Scored, difference, scored
from stack_driver.deadlines import eventually

from spillway_engine.chat_answers import event_data, plain_chat, streamed_chat
from spillway_stack.first_answer import require_agreement

START_SECONDS = 900.0
USER = 10001
PROMPT_WORDS = 700
BLOCK_TOKENS = 128
LEGS = 'spillway_gateway_legs_total{decision="two"'


@pytest.fixture(scope="module", params=["redis", "nvme"])
def tier(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def served(tier: str, real_engine_image: None, new_namespace) -> Iterator[tuple[Release, ClientPod]]:
    """Installed and ready, and taken away with its folder. A folder of the node needs more than restricted pods may."""
    namespace: Kubernetes = new_namespace(f"tier-{tier}", "privileged" if tier == "nvme" else "restricted")
    release = Release("chat", helms()[1], namespace)
    client = ClientPod(
        namespace,
        f"chat-spillway-gateway.{namespace.namespace}.svc.cluster.local",
        MODEL,
        f"spillway-gateway:{VERSION}",
    )
    TIER_FOLDER.mkdir(parents=True, exist_ok=True)
    shutil.chown(TIER_FOLDER, USER, USER)
    try:
        write_password(namespace, "a" * 32)
        for replicas in (1, 2):  # one after the other: each then has the machine's cores to itself while it loads
            release.upgrade(real_engines.shared_tier(tier, replicas), False, "--install")
            namespace.wait_for_pods("engine", replicas, START_SECONDS)
        namespace.wait_for_pods("gateway", 2)
        client.create(node=REAL_ENGINES_NODE)
        yield release, client
    finally:
        release.uninstall_if_there()
        namespace.kubectl("delete", "namespace", str(namespace.namespace), "--wait", seconds=180)
        shutil.rmtree(TIER_FOLDER, ignore_errors=True)


@pytest.mark.own_cluster
def test_served_from_the_tier(served: tuple[Release, ClientPod], tier: str, case: Row) -> None:
    """real engines: a prefix computed by one pod served from the shared tier by another, with the same answer"""
    release, client = served
    cached = require_shared(release, client, "houses by the river")
    case.requests, case.note = 3, f"{cached} tokens of the prompt were loaded by the second pod"


def require_shared(release: Release, client: ClientPod, words: str) -> int:
    """A new prompt of these words is computed by one pod and loaded by the other; returns the tokens loaded."""
    first, second = (pod["status"]["podIP"] for pod in release.kubernetes.ready_pods("engine"))
    text = " ".join(f"{number} {words}" for number in range(PROMPT_WORDS // 5))

    def ask(address: str) -> tuple[Scored, int]:
        body = {"model": MODEL, "prompt": text, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **REQUEST}
        code = (
            "import json, urllib.request as u\n"
            f"r = u.Request('http://{address}:8100/v1/completions', {json.dumps(body).encode()!r},"
            " {'content-type': 'application/json'})\n"
            "print(u.urlopen(r, timeout=120).read().decode())"
        )
        answer = json.loads(client.python(code, seconds=150))
        details = answer["usage"].get("prompt_tokens_details") or {}
        return scored(answer["choices"][0]), int(details.get("cached_tokens") or 0)

    before = written_bytes(client, first)
    _, cached_before = ask(first)
    assert cached_before == 0
    wait_until_stored(client, first, before)
    hit, _ = ask(first)  # rounds as a hit elsewhere does
    loaded, cached = ask(second)
    assert cached >= 128, "whole blocks came from the tier"
    assert difference(hit, loaded) is None
    return cached


@pytest.mark.own_cluster
def test_own_test_of_real_engines(served: tuple[Release, ClientPod], tier: str, case: Row) -> None:
    """real engines: helm test, with a prefix from the shared tier where every pod shares it"""
    release, _ = served
    report = release.test()
    # A folder of a node is shared by the pods of that node, and the test does not see where pods are.
    words = {
        "redis": r"[1-9]\d* chunks that \S+ computed were served to \S+ from the shared tier",
        "nvme": "KV spilled",
    }
    assert re.search(words[tier], report), report
    case.requests, case.note = 4, "; ".join(line for line in report.splitlines() if line.startswith("ok "))


@pytest.mark.own_cluster
def test_real_chat(served: tuple[Release, ClientPod], tier: str, case: Row) -> None:
    """real engines: a chat through the Service gets a well-formed answer, and streamed the same one"""
    _, client = served
    answer = client.chat()
    assert (answer["status"], answer["streamed"]["status"]) == (200, 200)
    plain = plain_chat(json.loads(answer["body"]))
    lines = answer["streamed"]["body"].encode().splitlines()
    require_agreement(streamed_chat(event_data(lines)), plain, same_text=True)
    case.requests, case.note = 2, f"{plain.text!r} from {answer['headers'].get('x-spillway-engine')}"


@pytest.mark.own_cluster
@pytest.mark.parametrize("tier", ["redis"], indirect=True)
def test_password_rotated(served: tuple[Release, ClientPod], tier: str, case: Row) -> None:
    """real engines: the embedded Valkey's password rotated: no request fails, and the tier is used again"""
    release, client = served
    namespace, new = release.kubernetes, "b" * 32
    engines = {pod["metadata"]["uid"]: name_of(pod) for pod in namespace.ready_pods("engine")}
    with client.load(workers=2, real_engines=True) as result:
        write_password(namespace, new)
        eventually("the engines have it", lambda: passwords_held(namespace, engines.values()) == {new}, 180.0)
        release.upgrade(real_engines.shared_tier(tier, len(engines), secrets_revision="2"))
        wait_for_logins(namespace, engines.values())
        client.wait_for_requests(client.progress() + 4)
    assert {pod["metadata"]["uid"] for pod in namespace.ready_pods("engine")} == set(engines)
    cached = require_shared(release, client, "boats upon the lake")
    case.requests, case.failed = result.requests, result.failed
    case.note = f"{cached} tokens were loaded afterwards; {result.words()}"
    assert result.failed == 0, result.failures


@pytest.mark.own_cluster
@pytest.mark.parametrize("tier", ["redis"], indirect=True)
def test_prefill_and_decode_apart(served: tuple[Release, ClientPod], tier: str, case: Row) -> None:
    """real engines: a prompt computed by the prefill engine is answered by the decode engine, which loads all of it"""
    release, client = served
    namespace = release.kubernetes
    release.upgrade(real_engines.apart(), False)
    eventually("both engines are ready", lambda: len(namespace.ready_pods("engine")) == 2, START_SECONDS)
    numbers = itertools.count()

    def handed_over() -> dict[str, Any] | None:
        """The gateways must have found both roles and the store in common, which they learn from events. They have no
        tokenizer."""
        answer = client.complete(MODEL, [100 + next(numbers), *range(1000, 1000 + PROMPT_WORDS)], 8)
        assert answer["status"] == 200, answer
        return answer if client.counted(LEGS, MODEL) else None

    answer = eventually("a prompt is handed over", handed_over, START_SECONDS)
    usage = json.loads(answer["body"])["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached >= usage["prompt_tokens"] - BLOCK_TOKENS - 1, usage
    engine = answer["headers"]["x-spillway-engine"]
    assert "decode" in engine, engine
    case.requests, case.note = next(numbers), f"{cached} tokens were loaded by {engine}"


def written_bytes(client: ClientPod, address: str) -> float:
    """Count the bytes that this engine has written to the shared tier since it started."""
    page = client.get_text(f"http://{address}:8100/metrics")
    return sum(map(float, re.findall(r"^spillway_tier_written_bytes_total\S* (\S+)", page, re.MULTILINE)))


def wait_until_stored(client: ClientPod, address: str, before: float) -> None:
    """Small requests until the engine has written more than `before`, and nothing is on its way."""
    body = json.dumps({"model": MODEL, "prompt": "Hi", "max_tokens": 1}).encode()
    url = f"http://{address}:8100/v1/completions"
    code = (
        "import urllib.request as u\n"
        f"r = u.Request({url!r}, {body!r}, {{'content-type': 'application/json'}})\n"
        "u.urlopen(r, timeout=60).read()"
    )
    last = [before]

    def settled() -> bool:
        client.python(code, seconds=90)
        last.append(written_bytes(client, address))
        return last[-1] > before and last[-1] == last[-2]

    eventually("what was computed is stored", settled, 180.0)
