"""Rendered ConfigMaps go through the real readers of the engine service and the gateway and mean what values say."""

from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from chart.rendering import CHART, EXAMPLES, VALUES_FILES, environment, pod_spec, render

from spillway_engine.machine import Machine
from spillway_engine.model_shape import ModelShape
from spillway_engine.resolve import resolve_engine
from spillway_engine.settings_reader import load_engine_settings
from spillway_gateway.config import load_config

GIB = 1 << 30


@pytest.fixture
def engine_of(tmp_path):
    """Render -> the settings that a pod of one engine group loads, with the arguments of its container."""

    def load(rendered, name="chat-spillway-engine"):
        file = tmp_path / f"{name}.yaml"
        file.write_text(rendered.named("ConfigMap", name)["data"]["engine.yaml"])
        arguments = pod_spec(rendered.named("StatefulSet", name))["containers"][0]["args"]
        assert arguments[:3] == ["--config", "/etc/spillway/engine.yaml", "--set"]
        return load_engine_settings(file, [arguments[3].replace("$(POD_NAME)", f"{name}-0")])

    return load


@pytest.fixture
def gateway_of(tmp_path):
    def load(rendered):
        file = tmp_path / "gateway.yaml"
        file.write_text(rendered.one("ConfigMap", "gateway")["data"]["gateway.yaml"])
        return load_config(file)

    return load


@pytest.mark.parametrize("file", VALUES_FILES, ids=lambda file: file.stem)
def test_every_values_file_is_read_by_the_processes(file, engine_of, gateway_of):
    rendered = render(file)
    gateway = gateway_of(rendered)

    workloads = rendered.of_kind("StatefulSet", "engine")
    assert len(gateway.models) == len(workloads)
    for workload in workloads:
        name = workload["metadata"]["name"]
        engine = engine_of(rendered, name)
        assert engine.name == f"{name}-0"
        model = next(model for model in gateway.models if model.name == engine.served_name)
        service = rendered.named("Service", workload["spec"]["serviceName"])
        ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
        host = f"{name}-0.{workload['spec']['serviceName']}.llm.svc.cluster.local"
        assert model.engines[0].name == engine.name
        assert model.engines[0].url == f"http://{host}:{engine.port}" and ports["http"] == engine.port
        assert model.engines[0].kv_events == f"tcp://{host}:{engine.kv_events.port}"
        assert model.engines[0].kv_replay == f"tcp://{host}:{engine.kv_events.replay_port}"


def test_offload_values_reach_the_connector(engine_of):
    values = {
        "engine": {
            "tensorParallelSize": 2,
            "offload": {
                "numCpuBlocks": None,
                "cpuBytes": "64GiB",
                "blocksPerChunk": 4,
                "evictionPolicy": "arc",
                "batchMemcpy": True,
                "sharedTier": {
                    "type": "redis",
                    "redis": {
                        "url": "rediss://c:6380/2",
                        "existingSecret": {"name": "s", "usernameKey": "u"},
                        "ttlSeconds": 60,
                        "connections": 9,
                    },
                    "lookupTimeoutSeconds": 0.5,
                    "loadTimeoutSeconds": 3,
                    "storeTimeoutSeconds": 7.5,
                },
                "extraTiers": [{"type": "fs", "root_dir": "/x", "size": 3000000000}],
            },
        }
    }
    rendered = render(values=values)
    offload = engine_of(rendered).offload

    assert (offload.num_cpu_blocks, offload.cpu_bytes, offload.blocks_per_chunk) == (None, 64 * GIB, 4)
    assert (offload.eviction_policy, offload.batch_memcpy) == ("arc", "on")
    tier = offload.shared_tier
    assert (tier.type, tier.redis.url, tier.redis.ttl_seconds, tier.redis.connections) == (
        "redis",
        "rediss://c:6380/2",
        60,
        9,
    )
    assert (tier.lookup_timeout_seconds, tier.load_timeout_seconds, tier.store_timeout_seconds) == (0.5, 3.0, 7.5)
    assert offload.extra_tiers == ({"type": "fs", "root_dir": "/x", "size": 3_000_000_000},)
    variables = environment(rendered.one("StatefulSet", "engine"))
    assert variables[tier.redis.username_env] == {"secretKeyRef": {"name": "s", "key": "u"}}
    assert variables[tier.redis.password_env] == {"secretKeyRef": {"name": "s", "key": "password"}}


def test_nvme_tier_lies_where_the_volume_is_mounted(engine_of):
    nvme = {
        "path": "/kv/cache",
        "maxBytes": "1.5TiB",
        "ioThreads": 7,
        "volume": {"type": "sharedClaim", "size": "2TiB"},
    }
    rendered = render(values={"engine": {"offload": {"sharedTier": {"type": "nvme", "nvme": nvme}}}})
    tier = engine_of(rendered).offload.shared_tier

    assert (tier.nvme.path, tier.nvme.max_bytes, tier.nvme.io_threads) == ("/kv/cache", 3 * (1 << 39), 7)
    pod = pod_spec(rendered.one("StatefulSet", "engine"))
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    volume = next(volume for volume in pod["volumes"] if volume["name"] == mounts["/kv/cache"])
    claim = rendered.one("PersistentVolumeClaim")
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert claim["spec"]["resources"]["requests"]["storage"] == "2097152Mi"


def test_embedded_server_is_the_one_the_engines_use(engine_of):
    rendered = render(CHART / "values-cpu.yaml", values={"redis": {"port": 7000, "existingSecret": {"name": "pw"}}})
    redis = engine_of(rendered).offload.shared_tier.redis
    service = rendered.one("Service", "redis")

    assert redis.url == f"redis://{service['metadata']['name']}.llm.svc.cluster.local:7000/0"
    assert service["spec"]["ports"][0]["port"] == 7000
    server, engine = (environment(rendered.one("StatefulSet", kind)) for kind in ("redis", "engine"))
    assert (
        server["VALKEY_PASSWORD"] == engine[redis.password_env] == {"secretKeyRef": {"name": "pw", "key": "password"}}
    )
    conf = rendered.one("ConfigMap", "redis")["data"]["valkey.conf"]
    assert "port 7000" in conf and f"maxmemory {3 * GIB // 4}" in conf


@pytest.mark.parametrize(
    ("given", "meant"), [("auto", "auto"), ("on", "on"), ("off", "off"), (True, "on"), (False, "off")]
)
def test_batch_memcpy_words(given, meant, engine_of):
    """A bare on or off is true or false to YAML."""
    assert engine_of(render(values={"engine": {"offload": {"batchMemcpy": given}}})).offload.batch_memcpy == meant


@pytest.mark.parametrize(("given", "meant"), [("auto", "auto"), ("off", "off"), (False, "off")])
def test_self_check_words(given, meant, engine_of):
    assert engine_of(render(values={"engine": {"lifecycle": {"selfCheck": given}}})).lifecycle.self_check == meant


def test_an_entry_of_engines_differs_where_it_says_so(engine_of):
    values = {
        "engine": {"nodeSelector": {"a": "b"}, "lifecycle": {"drainTimeoutSeconds": 77}},
        "engines": {
            "large": {
                "model": {"path": "Qwen/Qwen3-32B"},
                "tensorParallelSize": 4,
                "offload": {"cpuBytes": "100GiB"},
                "nodeSelector": {"c": "d"},
            },
            "small": {"replicas": 0, "lifecycle": {"drainTimeoutSeconds": 5}, "offload": {"enabled": False}},
        },
    }
    rendered = render(values=values)
    large, small = (engine_of(rendered, f"chat-spillway-engine-{key}") for key in ("large", "small"))

    assert (large.tensor_parallel_size, small.tensor_parallel_size) == (4, 1)
    assert (large.offload.num_cpu_blocks, large.offload.cpu_bytes) == (None, 100 * GIB)
    assert (large.lifecycle.drain_timeout_seconds, small.lifecycle.drain_timeout_seconds) == (77, 5)
    assert not small.offload.enabled
    pods = [pod_spec(rendered.named("StatefulSet", f"chat-spillway-engine-{key}")) for key in ("large", "small")]
    assert [pod["nodeSelector"] for pod in pods] == [{"a": "b", "c": "d"}, {"a": "b"}]


def test_gateway_values_reach_the_gateway(gateway_of):
    values = {
        "timeouts": {"connectSeconds": 1.5, "plainSeconds": 77},
        "limits": {"bodyBytesMax": "3MiB", "retryRatio": 0},
        "index": {"bytesMax": "1GiB"},
        "routing": {"prefillTokensPerSecond": 2500000},
        "log": {"level": "debug", "requests": True},
        "lifecycle": {"drainDelaySeconds": 3, "drainTimeoutSeconds": 44},
        "port": 8080,
    }
    config = gateway_of(
        render(values={"gateway": values, "engine": {"model": {"aliases": ["a", "b"], "tokenizer": "/tok"}}})
    )

    assert (config.timeouts.connect_seconds, config.timeouts.plain_seconds) == (1.5, 77)
    assert (config.limits.body_bytes_max, config.limits.retry_ratio) == (3 << 20, 0)
    assert config.index.bytes_max == GIB and config.routing.prefill_tokens_per_second == 2_500_000
    assert (config.log.level, config.log.requests) == ("debug", True)
    assert (config.shutdown.drain_delay_seconds, config.shutdown.drain_timeout_seconds) == (3, 44)
    assert (config.listen.host, config.listen.port) == ("0.0.0.0", 8080)
    assert config.models[0].aliases == ("a", "b") and config.models[0].tokenizer == "/tok"


def test_tokenizer_folder_is_mounted_into_the_gateway(gateway_of):
    rendered = render(CHART / "examples" / "ascend-mindcluster.yaml")
    pod = pod_spec(rendered.one("Deployment", "gateway"))

    assert gateway_of(rendered).models[0].tokenizer == "/var/lib/spillway/models/default/Qwen3-32B"
    mount = next(
        mount
        for mount in pod["containers"][0]["volumeMounts"]
        if mount["mountPath"] == "/var/lib/spillway/models/default"
    )
    volume = next(volume for volume in pod["volumes"] if volume["name"] == mount["name"])
    assert mount["readOnly"] and volume["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}


def test_autoscaled_engines_are_all_known_to_the_gateway(gateway_of):
    rendered = render(CHART / "examples" / "production.yaml")

    assert len(gateway_of(rendered).models[0].engines) == 6
    assert rendered.one("ScaledObject")["spec"]["maxReplicaCount"] == 6
    assert "replicas" not in rendered.one("StatefulSet", "engine")["spec"]
    assert "replicas" not in rendered.one("Deployment", "gateway")["spec"]


def test_resolved_command_line_is_what_the_values_mean(engine_of):
    settings = engine_of(render(next(file for file in EXAMPLES if file.stem == "ascend-cce-redis")))
    shape = ModelShape(40, 8, 128, None, "bfloat16", 40960, 0)
    machine = Machine("npu", frozenset(), (0,), 1 << 42, "cgroup limit", 1 << 42, 1 << 42)

    arguments = resolve_engine(settings, shape, machine).public()["arguments"]

    pairs = dict(pairwise(arguments))
    assert pairs["--model"] == "Qwen/Qwen3-14B" and pairs["--tensor-parallel-size"] == "2"
    offload = yaml.safe_load(pairs["--kv-transfer-config"])["kv_connector_extra_config"]
    assert (offload["num_cpu_blocks"], offload["blocks_per_chunk"], offload["batch_memcpy"]) == (4096, 2, "on")
    assert offload["secondary_tiers"][0]["url"] == "rediss://cache.example.com:6380/0"
    assert yaml.safe_load(pairs["--kv-events-config"])["endpoint"] == "tcp://*:8200"


def test_defaults_of_the_gateway_are_written_once(gateway_of):
    """values.yaml repeats the gateway's defaults as documentation; they may not drift apart."""
    config = gateway_of(render())
    own = type(config)(models=config.models)

    for section in ("timeouts", "health", "limits", "routing", "index", "log"):
        assert getattr(config, section) == getattr(own, section), section


def test_chart_needs_no_file_outside_itself():
    assert not (CHART / "charts").exists()
    assert "dependencies" not in yaml.safe_load(Path(CHART, "Chart.yaml").read_text())
