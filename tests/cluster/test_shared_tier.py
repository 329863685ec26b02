"""Real engines from the real image: a prefix that one pod computed is served to another from the shared tier."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from chart.helm_binaries import helms
from cluster.client_pod import ClientPod
from cluster.helm import CHART, VERSION, Release
from cluster.kube import Kubernetes
from cluster.local_cluster import REAL_ENGINES_NODE
from cluster.report import Row
from cluster.values import CLIENT_READS_METRICS, MODEL, Values, over
from reference_answers.margins import REQUEST, Scored, difference, scored

from spillway_stack.chat_answers import plain_answer, require_agreement, streamed_answer
from spillway_stack.first_answer import ANSWER_TOKENS

FOLDER = Path("/var/tmp/spillway-lane-kv")  # of the node, which both pods share
START_SECONDS = 900.0
USER = 10001
PROMPT_WORDS = 700
VALUES_CPU: Values = yaml.safe_load((CHART / "values-cpu.yaml").read_text())


def values(tier: str, replicas: int) -> Values:
    """values-cpu.yaml but for the tier, requests that a small machine holds, and deadlines that a slow one meets."""
    shared = {
        "redis": {"type": "redis"},
        "nvme": {"type": "nvme", "nvme": {"maxBytes": "2GiB", "volume": {"type": "hostPath", "hostPath": str(FOLDER)}}},
    }[tier]
    patient = {"lookupTimeoutSeconds": 30, "loadTimeoutSeconds": 60, "storeTimeoutSeconds": 60}
    small = {
        "engine": {
            "replicas": replicas,
            "cpu": {"request": "100m"},
            **({"memory": {"pageCache": "256MiB"}} if tier == "nvme" else {}),
            "nodeSelector": {"kubernetes.io/hostname": REAL_ENGINES_NODE},
            # At this rate of prefill any load takes less time than prefill.
            "offload": {"sharedTier": {**shared, **patient}, "requestWaitSeconds": 60, "prefillTokensPerSecond": 10},
            "lifecycle": {"selfCheckTimeoutSeconds": 600},
        },
        "gateway": {"resources": {"requests": {"cpu": "50m"}}},
        "redis": {
            "enabled": tier == "redis",
            "image": {"registry": "", "repository": "valkey", "tag": "lane"},
            "cpu": {"request": "50m"},
        },
    }
    return over(over(VALUES_CPU, small), CLIENT_READS_METRICS)


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
    FOLDER.mkdir(parents=True, exist_ok=True)
    shutil.chown(FOLDER, USER, USER)
    try:
        for replicas in (1, 2):  # one after the other: each then has the machine's cores to itself while it loads
            release.upgrade(values(tier, replicas), False, "--install")
            namespace.wait_for_pods("engine", replicas, START_SECONDS)
        namespace.wait_for_pods("gateway", 2)
        client.create(node=REAL_ENGINES_NODE)
        yield release, client
    finally:
        release.uninstall_if_there()
        namespace.kubectl("delete", "namespace", str(namespace.namespace), "--wait", seconds=180)
        shutil.rmtree(FOLDER, ignore_errors=True)


@pytest.mark.own_cluster
def test_served_from_the_tier(served: tuple[Release, ClientPod], tier: str, case: Row) -> None:
    """real engines: a prefix computed by one pod served from the shared tier by another, with the same answer"""
    release, client = served
    first, second = (pod["status"]["podIP"] for pod in release.kubernetes.ready_pods("engine"))
    text = " ".join(f"{number} houses by the river" for number in range(PROMPT_WORDS // 5))

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

    _, cached_before = ask(first)
    assert cached_before == 0
    wait_until_stored(client, first)
    hit, _ = ask(first)  # rounds as a hit elsewhere does
    loaded, cached = ask(second)
    assert cached >= 128, "whole blocks came from the tier"
    assert difference(hit, loaded) is None
    case.requests, case.note = 3, f"{cached} tokens of the prompt were loaded by the second pod"


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
    plain = plain_answer(json.loads(answer["body"]), ANSWER_TOKENS)
    lines = answer["streamed"]["body"].encode().splitlines()
    require_agreement(streamed_answer(lines, ANSWER_TOKENS, lambda: None), plain, same_text=True)
    case.requests, case.note = 2, f"{plain.text!r} from {answer['headers'].get('x-spillway-engine')}"


def wait_until_stored(client: ClientPod, address: str) -> None:
    """Small requests until the engine has written what it computed, and nothing is on its way."""
    code = (
        "import json, re, time, urllib.request as u\n"
        f"base = 'http://{address}:8100'\n"
        "def written():\n"
        "  text = u.urlopen(base + '/metrics', timeout=30).read().decode()\n"
        "  return sum(float(x) for x in re.findall(r'^spillway_tier_written_bytes_total\\S* (\\S+)', text, re.M))\n"
        f"body = json.dumps(dict(model='{MODEL}', prompt='Hi', max_tokens=1)).encode()\n"
        "last, end = -1.0, time.monotonic() + 120\n"
        "while time.monotonic() < end:\n"
        "  r = u.Request(base + '/v1/completions', body, {'content-type': 'application/json'})\n"
        "  u.urlopen(r, timeout=60).read()\n"
        "  now = written()\n"
        "  if now and now == last: break\n"
        "  last = now; time.sleep(0.5)\n"
        "else: raise SystemExit('nothing was written')\n"
    )
    client.python(code, seconds=180)
