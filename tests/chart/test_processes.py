"""The rendered command lines start the real processes: the gateway serves, the engine service resolves its settings."""

import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart.rendering import CHART, nested, pod_spec, render

from spillway_ctl.live.asking import Asker
from spillway_ctl.live.release import differences

START_SECONDS = 180
SMOLLM2 = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 8192,
}

LIMITS = {
    "ioThreads": 7,
    "lookupTimeoutSeconds": 0.3,
    "loadQueueBytesMax": "3GiB",
    "storeQueueBytesMax": "2GiB",
    "storeQueueSecondsMax": 1.5,
    "encryption": {"enabled": True, "keyId": "2026-11-21", "keySecretName": "k"},
}
TIERS = [
    {
        "type": "redis",
        "redis": {
            "url": "rediss-cluster://a:1,b:2",
            "existingSecret": {"name": "p", "usernameKey": "u"},
            "tls": {"caSecret": {"name": "ca"}, "clientSecret": {"name": "c"}},
            "ttlSeconds": 60,
            "payloadConnections": 2,
            "tenantMaxBytes": "1GiB",
        },
        **LIMITS,
    },
    {
        "type": "nvme",
        "nvme": {"mode": "slab", "ttlSeconds": 60, "tenantMaxBytes": "9GiB", "volume": {"type": "perPodClaim"}},
        **LIMITS,
    },
]


def command_of(workload: dict[str, Any], config: Path, name: str) -> list[str]:
    """Return the container's command with this machine's interpreter and the path of the ConfigMap's file here."""
    container = pod_spec(workload)["containers"][0]
    words = [*container["command"], *container["args"]]
    assert words[0] == "python3"
    return [
        sys.executable,
        *(
            str(config) if word.startswith("/etc/spillway/") else word.replace("$(POD_NAME)", name)
            for word in words[1:]
        ),
    ]


def test_gateway_starts_and_says_what_it_lacks(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as other:
        port, ops_port = free.getsockname()[1], other.getsockname()[1]
    static = {"gateway": {"port": port, "opsPort": ops_port, "discovery": {"type": "static"}}}
    rendered = render(CHART / "values-cpu.yaml", values=static)
    config = tmp_path / "gateway.yaml"
    config.write_text(rendered.one("ConfigMap", "gateway")["data"]["gateway.yaml"])

    process = subprocess.Popen(
        command_of(rendered.one("Deployment", "gateway"), config, "gateway-0"), stderr=subprocess.PIPE, text=True
    )
    try:
        for line in process.stderr:
            if "listening on" in line:
                break
        for listener in (port, ops_port):
            assert status(listener, "/health") == 200
            assert status(listener, "/ready") == 503  # no engine answers under these names here
        assert status(port, "/metrics") == 404
        with urllib.request.urlopen(f"http://127.0.0.1:{ops_port}/metrics", timeout=60) as reply:
            assert 'engine="chat-spillway-engine-1"' in reply.read().decode()
    finally:
        process.terminate()
        process.communicate(timeout=START_SECONDS)
    assert process.returncode == 0


def test_gateway_asks_for_the_keys_of_its_secret(tmp_path):
    """The gateway reads its Secrets as files, hashes a key itself, and passes --check with the pod's command line."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    auth = {"keysSecret": {"name": "k"}, "saltSecret": {"name": "s"}}
    gateway = {"port": port, "opsPort": None, "auth": auth, "discovery": {"type": "static"}}
    rendered = render(CHART / "values-cpu.yaml", values={"gateway": gateway})
    config = tmp_path / "gateway.yaml"
    text = rendered.one("ConfigMap", "gateway")["data"]["gateway.yaml"]
    assert text.count("/var/lib/spillway/secrets/") == 2
    config.write_text(text.replace("/var/lib/spillway/secrets/", f"{tmp_path}/"))
    command = command_of(rendered.one("Deployment", "gateway"), config, "gateway-0")
    key = "sk-of-the-search-team-0123456789"
    digest = subprocess.run(
        [*command[:3], "--hash-key"], input=key, capture_output=True, text=True, check=True, timeout=START_SECONDS
    ).stdout.strip()
    tenant = {"name": "search", "keys": [digest], "operator": True}
    (tmp_path / "gateway-keys.yaml").write_text(yaml.safe_dump({"tenants": [tenant]}))
    (tmp_path / "gateway-salt").write_text("x" * 64)

    subprocess.run([*command, "--check"], check=True, capture_output=True, timeout=START_SECONDS)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        for line in process.stderr:
            if "listening on" in line:
                break
        chat = {"model": "smollm2-135m-instruct", "messages": [{"role": "user", "content": "Hello."}]}
        assert status(port, "/v1/chat/completions", chat) == 401
        assert status(port, "/v1/chat/completions", chat, "sk-of-somebody-else-0123456789") == 401
        assert status(port, "/v1/chat/completions", chat, key) == 503  # no engine answers here
        # What `helm test` asks of a running gateway: its resolved settings are the values'.
        resolved, _ = Asker().ask(f"http://127.0.0.1:{port}/spillway/config", key)
        assert list(differences(yaml.safe_load(config.read_text()), resolved["settings"])) == []
    finally:
        process.terminate()
        process.communicate(timeout=START_SECONDS)
    assert process.returncode == 0


def status(port: int, path: str, body: dict[str, Any] | None = None, key: str = "") -> int:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code


def test_engine_service_resolves_what_the_chart_reckoned(tmp_path):
    """float32 by name, since `auto` depends on the machine's core; the tier in Redis is only written down here."""
    model = {"path": str(tmp_path), "dtype": "float32", "servedName": "smol", "shape": {"preset": "smollm2-135m"}}
    values = nested(
        "engine",
        {"model": model, "offload": {"numCpuBlocks": 8, "blocksPerChunk": 2}, "extraArgs": ["--max-num-seqs=3"]},
    )
    rendered = render(CHART / "values-cpu.yaml", values=values)
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    files = rendered.one("ConfigMap", "engine")["data"]
    config = tmp_path / "engine.yaml"
    config.write_text(files["engine.yaml"])

    done = subprocess.run(
        [*command_of(rendered.one("StatefulSet", "engine"), config, "chat-spillway-engine-1"), "--print-config"],
        capture_output=True,
        text=True,
        check=False,
        timeout=START_SECONDS,
        env={**os.environ, "PYTHONHASHSEED": "0"},
    )

    resolved, reckoned = json.loads(done.stdout), json.loads(files["memory.json"])
    assert resolved["settings"]["name"] == "chat-spillway-engine-1" and resolved["servedName"] == "smol"
    assert resolved["memory"]["cpu_tier_bytes"] == reckoned["cpuTierBytes"] == 8 * 2 * 5_898_240
    assert resolved["memory"]["device_blocks"] == reckoned["deviceBlocks"] == 65
    assert resolved["memory"]["shared_memory_needed_bytes"] == reckoned["sharedMemoryNeededBytes"]
    assert resolved["arguments"][-1] == "--max-num-seqs=3"
    transfer = json.loads(resolved["arguments"][resolved["arguments"].index("--kv-transfer-config") + 1])
    extra = transfer["kv_connector_extra_config"]
    assert (extra["num_cpu_blocks"], extra["blocks_per_chunk"]) == (8, 2)
    assert extra["secondary_tiers"][0]["url"] == "redis://chat-spillway-redis.llm.svc.cluster.local:6379/0"


@pytest.mark.parametrize("tier", TIERS, ids=lambda tier: tier["type"])
def test_every_value_of_a_tier_reaches_the_engine_service(tier, tmp_path):
    """The engine's resolved settings are the values', as `helm test` requires of a running one."""
    model = {"path": str(tmp_path), "servedName": "smol", "shape": {"preset": "smollm2-135m"}}
    values = {"redis": {"enabled": False}, "engine": {"model": model, "offload": {"sharedTier": tier}}}
    rendered = render(CHART / "values-cpu.yaml", values=values)
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    config = tmp_path / "engine.yaml"
    config.write_text(rendered.one("ConfigMap", "engine")["data"]["engine.yaml"])

    done = subprocess.run(
        [*command_of(rendered.one("StatefulSet", "engine"), config, "chat-spillway-engine-0"), "--print-config"],
        capture_output=True,
        text=True,
        check=False,
        timeout=START_SECONDS,
    )

    expected, resolved = yaml.safe_load(config.read_text()), json.loads(done.stdout)["settings"]
    assert len(expected["offload"]["sharedTier"]) >= 10
    assert list(differences(expected, resolved)) == []
