"""Real engines from the real image: two pipeline stages in two pods that LeaderWorkerSet's own controller made.

They answer like an engine in one pod, end with their requests, and come back after a pod was lost. That a pod is ready
says already that the start-up check has found the right log-probabilities.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from cluster import real_engines
from cluster.client_pod import ClientPod
from cluster.helm import Release
from cluster.kube import Kubernetes, name_of
from cluster.local_cluster import REAL_ENGINES_NODE
from cluster.report import Row
from reference_answers.margins import REQUEST, Scored, difference, scored
from stack_driver.deadlines import eventually

pytestmark = pytest.mark.own_cluster
START_SECONDS = 900.0
STAGES, ALONE = "chat-spillway-engine-stages", "chat-spillway-engine-alone"
LEADER, FURTHER = f"{STAGES}-0", f"{STAGES}-0-1"
PROMPTS = ("The capital of France is", "1 2 3 4 5 6 7 8", "Water is made of hydrogen and", "To be, or not to be,")
LONG_TOKENS = 64  # of an answer that is under way when its pod is asked to end


@pytest.fixture(scope="module", autouse=True)
def installed(
    leader_worker_sets: None, real_engine_image: None, release: Release, namespace: Kubernetes, client: ClientPod
) -> None:
    release.install(real_engines.two_stages(), wait=False)
    client.create(node=REAL_ENGINES_NODE)
    namespace.wait_for_pods("engine", 3, START_SECONDS)


def ask(namespace: Kubernetes, client: ClientPod, pod: str, prompt: str, tokens: int) -> Scored:
    address = namespace.get("pod", pod)["status"]["podIP"]
    model = "alone" if pod.startswith(ALONE) else "stages"
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **REQUEST}
    code = (
        "import json, urllib.request as u\n"
        f"r = u.Request('http://{address}:8100/v1/completions', {json.dumps(body).encode()!r},"
        " {'content-type': 'application/json'})\n"
        "print(u.urlopen(r, timeout=280).read().decode())"
    )
    return scored(json.loads(client.python(code, seconds=300))["choices"][0])


def require_same_answers(namespace: Kubernetes, client: ClientPod) -> None:
    for prompt in PROMPTS:
        both = [ask(namespace, client, pod, prompt, 16) for pod in (LEADER, f"{ALONE}-0")]
        assert difference(*both) is None, prompt


def test_same_answers(namespace: Kubernetes, client: ClientPod, case: Row) -> None:
    """real engines: two pipeline stages in two pods answer like an engine in one pod"""
    require_same_answers(namespace, client)
    assert client.status_of("stages") == 200
    case.requests, case.note = 2 * len(PROMPTS) + 1, "the leader's answers are those of the engine in one pod"


def test_drained(namespace: Kubernetes, client: ClientPod, case: Row) -> None:
    """real engines: a replica of two pods that is asked to end answers what it has begun, and a new one serves"""
    before = uids(namespace)
    with ThreadPoolExecutor(1) as background:
        long = background.submit(ask, namespace, client, LEADER, PROMPTS[0], LONG_TOKENS)
        eventually("the answer is under way", lambda: running(namespace, client) > 0, 60.0)
        namespace.kubectl("delete", "pod", LEADER, "--wait=false")
        assert len(long.result().tokens) == LONG_TOKENS
    wait_for_new(namespace, before)
    case.requests = 1


def test_a_pod_is_lost(namespace: Kubernetes, client: ClientPod, case: Row) -> None:
    """real engines: a stage whose pod is deleted with --force is missed by its successor, and the replica comes back"""
    before = uids(namespace)
    namespace.kubectl("delete", "pod", FURTHER, "--force", "--grace-period=0")
    wait_for_new(namespace, before)
    require_same_answers(namespace, client)
    case.requests = 2 * len(PROMPTS)


def running(namespace: Kubernetes, client: ClientPod) -> float:
    """Requests that the leader computes."""
    page = client.get_text(f"http://{namespace.get('pod', LEADER)['status']['podIP']}:8100/metrics")
    lines = [line for line in page.splitlines() if line.startswith("vllm:num_requests_running")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def uids(namespace: Kubernetes) -> set[str]:
    return {pod["metadata"]["uid"] for pod in namespace.pods("engine") if name_of(pod) in (LEADER, FURTHER)}


def wait_for_new(namespace: Kubernetes, before: set[str]) -> None:
    def is_new() -> bool:
        ready = {name_of(pod) for pod in namespace.ready_pods("engine")}
        return {LEADER, FURTHER} <= ready and not uids(namespace) & before

    eventually("the whole replica is new", is_new, START_SECONDS)
